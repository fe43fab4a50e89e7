"""Regular expressions of Lark grammars without nesting."""

from __future__ import annotations

import re
import time

import pytest

from shared.text.grammar_source import InvalidGrammarError
from shared.text.lark_pattern import pattern_of
from tests.support.patches import OTHER_TEXTS, PATCH_GRAMMAR, PATCHES


def accepts(grammar: str, text: str) -> bool:
    return re.fullmatch(pattern_of(grammar), text) is not None


@pytest.mark.parametrize("text", PATCHES)
def test_patch_grammar_accepts_patch(text: str):
    assert accepts(PATCH_GRAMMAR, text)


@pytest.mark.parametrize("text", OTHER_TEXTS)
def test_patch_grammar_rejects_other_text(text: str):
    assert not accepts(PATCH_GRAMMAR, text)


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        ('start: "a" start | "b"', ["b", "ab", "aab"], ["", "a", "ba"]),
        ('start: start "a" | "b"', ["b", "ba", "baa"], ["", "a", "ab"]),
        ('start: item ("," item)*\nitem: /[0-9]+/', ["1", "1,23"], ["", "1,", ",1"]),
        ('start: "a"~2..3 "b"?', ["aa", "aaa", "aaab"], ["a", "aaaa"]),
        ('start: "a" "b"\n%ignore / +/', ["ab", " a  b "], ["a", "a\nb"]),
        ('start: A\nA: B /x/i\nB: "q" | /r+/', ["qX", "rrx"], ["q", "QX"]),
        ('start: "\\n\\\\" /[\\/.]/ "é"', ["\n\\/é", "\n\\.é"], ["\n/é"]),
        ("start: NUMBER\n%import common.INT -> NUMBER", ["12"], ["a", ""]),
        ("start: LF+\n%import common (LF, WS)", ["\n\n"], [""]),
        ('?start: a -> b\na: "c"i', ["c", "C"], ["b"]),
    ],
)
def test_pattern_matches_texts_of_grammar(grammar: str, right: list[str], wrong: list[str]):
    assert [text for text in right if not accepts(grammar, text)] == []
    assert [text for text in wrong if accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('start: "(" start ")" | "a"', "rule start of the grammar contains itself"),
        ('start: a\na: a "x" | "y" a | "z"', "rule a of the grammar contains itself"),
        ('start: b\nb: c\nc: "x" b "y" | "z"', "rule b of the grammar contains itself"),
        ("start: x", "not valid Lark: Rule 'x' used but not defined"),
        ('start: "a', "not valid Lark: Unexpected input at line 1"),
        ('other: "a"', "the grammar has no rule start"),
        ('start: "a" %json {}', "not valid Lark"),
        ("%import .secret.A\nstart: A", "imports .secret.A; only terminals of common"),
        ("%import python (A)\nstart: A", "imports python"),
        ("start: a~200\na: b~200\nb: c~200\nc: /x/", "more than"),
    ],
)
def test_unsupported_grammar_names_reason(grammar: str, reason: str):
    began = time.thread_time()
    with pytest.raises(InvalidGrammarError, match=re.escape(reason)):
        pattern_of(grammar)
    assert time.thread_time() - began < 5
