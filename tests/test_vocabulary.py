"""Ceilings of private words, docstring openings, shared class names and argument spreads.

A ceiling is the count of the day it was written. It may only fall: lower it when a count is lower.
`python -m tests.support.vocabulary` prints all counts by folder, and `docs/` has the glossary.
"""

import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.support import vocabulary
from tests.support.vocabulary import OPENINGS, WORDS, Source, counted

WORD_CEILINGS = {
    "picture": 5,
    "tell of data": 20,
    "say of data": 14,
    "ask, hear, want of data": 34,
    "refuse": 13,
    "refused by name": 0,
    "stand": 6,
    "lie": 8,
    "is left": 12,
    "by lot": 0,
    "law": 7,
    "mailbox": 6,
    "tower": 6,
    "that sees": 5,
    "seen text": 0,
    "turns": 28,
    "promise": 1,
    "asleep": 8,
    "who, whose": 228,
    "so many, as many": 13,
}
OPENING_CEILINGS = {
    "bench": 0,
    "jax_impl": 0,
    "kernels": 0,
    "models": 0,
    "shared": 0,
    "tests": 0,
    "torch_impl": 0,
}
"""Docstrings by top folder that open with a word of `OPENINGS`."""
AS_CEILING = 1
CLASS_NAME_CEILING = 12
UNDOCUMENTED_CEILING = 120
SPREAD_CEILINGS = {"# fmt: skip": 4, "f(*(a, b))": 95, "f(*name)": 867}


@pytest.fixture(autouse=True, scope="module")
def without_collections() -> Iterator[None]:
    """Syntax trees are freed by their reference counts; collections take two thirds of the time."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def words() -> dict[str, int]:
    return {name: count.total() for name, count in counted(vocabulary.words).items()}


@pytest.mark.parametrize("word", WORDS)
def test_private_word_count_within_ceiling(word: str, words: dict[str, int]) -> None:
    assert words[word] <= WORD_CEILINGS[word], (
        f"{word!r}: see the terms in tests/support/vocabulary.py"
    )


def openings_by_folder() -> Counter[str]:
    counts = counted(vocabulary.openings)
    found = Counter[str]()
    for word in OPENINGS:
        for room, count in counts[word].items():
            found[room.partition("/")[0]] += count
    return found


def test_docstring_openings_within_ceiling() -> None:
    above = openings_by_folder() - Counter(OPENING_CEILINGS)
    assert not above, f"begin with a noun phrase or a verb, not with {', '.join(OPENINGS)}"


def test_docstrings_opening_with_as_within_ceiling() -> None:
    assert counted(vocabulary.openings)["As"].total() <= AS_CEILING, "write: Same as `x.y`, for ..."


def test_class_names_of_unrelated_modules_within_ceiling() -> None:
    names = vocabulary.shared_class_names()
    assert len(names) <= CLASS_NAME_CEILING, "\n".join(map(str, names.items()))


def test_documented_arguments_are_parameters() -> None:
    assert not vocabulary.unknown_arguments()


def test_sections_omitting_parameters_within_ceiling() -> None:
    found = vocabulary.undocumented_arguments()
    assert len(found) <= UNDOCUMENTED_CEILING, "\n".join(found)


def test_spreads_and_unformatted_lines_within_ceilings() -> None:
    found = Counter({k: v.total() for k, v in counted(vocabulary.spreads).items()})
    assert not found - Counter(SPREAD_CEILINGS)


def test_names_of_tests_are_short_without_articles() -> None:
    """The pattern of CONTRIBUTING.md: `test_<unit>_<condition>_<expected>`, at most 8 words."""
    names = vocabulary.names_of_tests()
    words = {name: name.removeprefix("test_").split("_") for name in names}
    assert len(names) > 2000
    assert not [n for n, found in words.items() if len(found) > 8 or {"a", "an", "the"} & {*found}]


PLANTED = '''
"""What a module is told by a picture."""

class Rows:
    """Those of a tower.

    Args:
      missing: No parameter.
      given: A parameter.
    """

    def __init__(self, given, omitted):
        call(*(given, omitted), *given)  # fmt: skip


def stands():  # it lies there
    """As `x`."""
'''


def test_counts_of_planted_module() -> None:
    source = Source("kernels/planted.py", PLANTED)
    found = {name: count for name, count in vocabulary.words(source).items() if count}
    assert found == {"picture": 1, "tell of data": 1, "tower": 1, "lie": 1}
    opened = {word: count for word, count in vocabulary.openings(source).items() if count}
    assert opened == {"all": 3, "What": 1, "Those": 1, "As": 1}
    assert vocabulary.spreads(source) == {"# fmt: skip": 1, "f(*(a, b))": 1, "f(*name)": 1}
    (signature,) = [each for each in source.facts.signatures if each.name == "Rows"]
    assert vocabulary.documented(signature.docstring) == ["missing", "given"]
    assert signature.parameters == ["self", "given", "omitted"]
