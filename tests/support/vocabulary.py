"""Counts of private words, docstring openings, shared class names and argument spreads.

    python -m tests.support.vocabulary

prints one table a measure, with a column for each top folder. `tests/test_vocabulary.py` compares
the totals with ceilings.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN_FILES = {"tests/support/vocabulary.py", "tests/test_vocabulary.py"}
HISTORY = {"CHANGELOG.md"}
"""Files that may name what was renamed."""
OLD_FLAGS = re.compile(r"--[a-z][a-z0-9-]*|\bmax_picture_tokens\b|\bpicture_pool_tokens\b")
"""Flags keep their old spellings as hidden aliases, so words inside flags are not counted."""

WORDS = {
    # A word of the table is replaced by the term that follows it; `docs/glossary.md` has them all.
    "picture": r"picture",  # image
    "tell of data": r"\b(?:tells?|told|telling)\b",  # set, report, return, pass
    "say of data": r"\b(?:says?|said|saying)\b",  # report, state, contain
    "ask, hear, want of data": r"\b(?:asks?|asked|hears?|heard|wants?|wanted)\b",  # request, read
    "refuse": r"\brefus(?:es?|ed|al|ing)\b",  # unsupported, invalid, rejected
    "refused by name": r"refused by name",  # an error that names the option
    "stand": r"\b(?:stands?|stood|standing)\b",  # is stored, follows, precedes
    "lie": r"\b(?:lies?|lay|lain|lying)\b",  # is stored in, is between
    "is left": r"\b(?:is|are|was|were|be) left\b",  # remains
    "by lot": r"\bby lot\b|\blots?\b",  # simulated acceptance
    "law": r"\blaws?\b",  # distribution
    "mailbox": r"mail(?:box|boxes)?\b",  # symmetric buffer, shared-memory all-gather
    "tower": r"towers?\b",  # vision encoder
    "that sees": r"\bsees\b|\bseeing\b",  # vision-language model; attends to; observes
    "seen text": r"\bseen texts?\b",  # n-gram table
    "turns": r"\bturns\b|\bturned\b",  # M-RoPE positions, rotated
    "promise": r"\bpromises?\b",  # guarantee, invariant
    "asleep": r"\basleep\b|\bsleeps?\b",  # disabled, backoff
    "who, whose": r"\b(?:who|whose|whom|nobody)\b",  # request, client, row
    "so many, as many": r"\b(?:so|as) many\b",  # the number
}
OPENINGS = ("What", "How", "Which", "Where", "Whether", "Who", "Whose", "Of", "Those")
TWINS = re.compile(r"^(?:jax_impl|torch_impl|kernels|shared/spec|shared/reference)/")
PRODUCT = ("shared", "jax_impl", "torch_impl", "kernels")
_FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
_COMMENT = re.compile(r"(?:^\s*|\S  )# (.*)$")


@dataclass(frozen=True)
class Signature:
    """A function, or a class with a method `__init__`, and its docstring.

    Attributes:
      name: The name of the function or class.
      docstring: Its docstring; empty if it has none.
      parameters: Names of all parameters, in order.
    """

    name: str
    docstring: str
    parameters: list[str]


@dataclass
class Facts:
    """Facts of a module that the measures need; the syntax tree itself is not kept.

    Attributes:
      docstrings: Docstrings of the module, its classes and functions.
      strings: First line, last line and value of each string.
      classes: Names of all classes.
      spread: The kind of each expression that a call spreads into its arguments.
      signatures: Functions and classes that can have documented arguments.
    """

    docstrings: list[str] = field(default_factory=list)
    strings: list[tuple[int, int, str]] = field(default_factory=list)
    classes: list[str] = field(default_factory=list)
    spread: Counter[type[ast.expr]] = field(default_factory=Counter)
    signatures: list[Signature] = field(default_factory=list)

    def add(self, node: ast.AST) -> None:
        """Adds the facts of one node."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            self.strings.append((node.lineno, node.end_lineno or node.lineno, node.value))
        elif isinstance(node, ast.Call):
            stars = [x.value for x in node.args if isinstance(x, ast.Starred)]
            self.spread.update(type(star) for star in stars if not _is_forwarded(star))
        elif isinstance(node, ast.Module | ast.ClassDef | _FUNCTIONS):
            docstring = ast.get_docstring(node) or ""
            self.docstrings += [docstring] * bool(docstring)
            if isinstance(node, ast.ClassDef):
                self.classes.append(node.name)
            for function in _makers(node):
                name = getattr(node, "name", "")
                self.signatures.append(Signature(name, docstring, _parameters(function)))


def _is_forwarded(star: ast.expr) -> bool:
    """Returns whether a wrapper passes its own `*args` on."""
    return isinstance(star, ast.Name) and star.id == "args"


def _makers(node: ast.AST) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """A function itself; `__init__` of a class."""
    if isinstance(node, ast.ClassDef):
        return [x for x in node.body if isinstance(x, ast.FunctionDef) and x.name == "__init__"]
    return [node] if isinstance(node, _FUNCTIONS) else []


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    given = function.args
    named = [*given.posonlyargs, *given.args, *given.kwonlyargs]
    more = [arg for arg in (given.vararg, given.kwarg) if arg]
    return [arg.arg for arg in (*named, *more)]


@dataclass(frozen=True)
class Source:
    """A text file of the project.

    Attributes:
      path: Its path from the root.
      text: The whole content.
    """

    path: str
    text: str

    @property
    def room(self) -> str:
        """The folder that a table counts it under."""
        top, _, rest = self.path.partition("/")
        inner = rest.partition("/")[0] if top == "shared" and "/" in rest else ""
        return f"{top}/{inner}" if inner else top if rest else "(root)"

    @property
    def is_code(self) -> bool:
        """Reports whether it is a module, in contrast to a page."""
        return self.path.endswith(".py")

    @cached_property
    def facts(self) -> Facts:
        """Facts of the module; none of a page."""
        facts = Facts()
        if self.is_code:
            for node in ast.walk(ast.parse(self.text)):
                facts.add(node)
        return facts

    @cached_property
    def prose(self) -> str:
        """A page, or the strings of several words and the comments of a module."""
        if not self.is_code:
            return self.text
        strings = self.facts.strings
        inside = {line for first, last, _ in strings for line in range(first + 1, last + 1)}
        comments = (
            found[1]
            for number, line in enumerate(self.text.splitlines(), start=1)
            if "# " in line and number not in inside and (found := _COMMENT.search(line))
        )
        return "\n".join([*(value for _, _, value in strings if " " in value), *comments])


@cache
def paths() -> tuple[str, ...]:
    """Paths from the root of every module and page that git tracks or could track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.md"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return tuple(name for name in sorted({*listed.splitlines()}) if (ROOT / name).is_file())


@cache
def sources() -> tuple[Source, ...]:
    """All modules and pages whose words are counted."""
    counted_paths = (path for path in paths() if path not in OWN_FILES | HISTORY)
    return tuple(Source(path, (ROOT / path).read_text(encoding="utf-8")) for path in counted_paths)


Counts = dict[str, Counter[str]]
"""Counts of each name by room."""


def counted(measure: Callable[[Source], Mapping[str, int]]) -> Counts:
    """Counts of each name by room.

    Args:
      measure: Counts of one file by name.
    """
    counts: Counts = defaultdict(Counter)
    for source in sources():
        for name, count in measure(source).items():
            counts[name][source.room] += count
    return counts


def words(source: Source) -> dict[str, int]:
    """Counts of each entry of `WORDS`: `picture` in the whole file, the others in prose."""
    whole, prose = (OLD_FLAGS.sub("", text) for text in (source.text, source.prose))
    texts = {"picture": whole}
    return {
        name: len(re.findall(pattern, texts.get(name, prose), re.IGNORECASE))
        for name, pattern in WORDS.items()
    }


def openings(source: Source) -> dict[str, int]:
    """Counts of docstrings by an opening word of `OPENINGS`, or `As`, and of all."""
    docstrings = source.facts.docstrings
    firsts = Counter(re.match(r"\w*", text)[0] for text in docstrings)  # type: ignore[index]
    return {"all": len(docstrings), **{word: firsts[word] for word in (*OPENINGS, "As")}}


def spreads(source: Source) -> dict[str, int]:
    """Counts of `# fmt: skip`, of calls `f(*(a, b))` and of calls `f(*name)`."""
    spread = source.facts.spread
    return {
        "# fmt: skip": source.text.count("# fmt: skip") if source.is_code else 0,
        "f(*(a, b))": spread[ast.Tuple] + spread[ast.List],
        "f(*name)": spread[ast.Name] + spread[ast.Attribute],
    }


def names_of_tests() -> set[str]:
    """Returns the names of all test functions."""
    modules = (source.text for source in sources() if source.path.startswith("tests/"))
    return {
        name for text in modules for name in re.findall(r"^ *(?:async )?def (test_\w+)", text, re.M)
    }


def operation(path: str) -> str:
    """The module that twins share: the file name within the backends and kernels, else the path."""
    return Path(path).stem if TWINS.match(path) else path


def shared_class_names() -> dict[str, list[str]]:
    """Files of each class name that unrelated modules of the product define."""
    files: dict[str, set[str]] = defaultdict(set)
    for source in sources():
        if source.path.startswith(tuple(f"{name}/" for name in PRODUCT)):
            for name in source.facts.classes:
                files[name.lstrip("_")].add(source.path)
    related = {name: {*map(operation, paths)} for name, paths in files.items()}
    return {name: sorted(files[name]) for name in sorted(files) if len(related[name]) > 1}


def documented(docstring: str) -> list[str]:
    """Names of the entries of an `Args:` section, in order."""
    section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", docstring, re.MULTILINE)
    if not section:
        return []
    lines = section[1].splitlines()
    indent = min(len(line) - len(line.lstrip()) for line in lines if line.strip())
    entries = (
        re.match(rf" {{{indent}}}([*\w][*\w, ]*?)(?: \(.*\))?:(?: |$)", line) for line in lines
    )
    return [name.strip().lstrip("*") for entry in entries if entry for name in entry[1].split(",")]


def unknown_arguments() -> list[str]:
    """Documented arguments that their signature lacks."""
    return [
        f"{source.path} {signature.name}: no parameter {name}"
        for source in sources()
        for signature in source.facts.signatures
        for name in documented(signature.docstring)
        if name not in signature.parameters
    ]


def undocumented_arguments() -> list[str]:
    """Signatures with an `Args:` section that omits a parameter."""
    return [
        f"{source.path} {signature.name}: {', '.join(sorted(omitted))}"
        for source in sources()
        for signature in source.facts.signatures
        if (names := documented(signature.docstring))
        if (omitted := {*signature.parameters} - {*names, "self", "cls"})
    ]


def _print_table(title: str, counts: Counts) -> None:
    totals = Counter[str]()
    for by_room in counts.values():
        totals.update(by_room)
    rooms = [room for room in sorted(totals) if totals[room]]
    print(f"\n## {title}\n\n| room |", " | ".join(counts), "|")
    print("| --- |" + " ---: |" * len(counts))
    for room in rooms:
        print(f"| {room} |", " | ".join(str(counts[name][room]) for name in counts), "|")
    print("| **all** |", " | ".join(str(counts[name].total()) for name in counts), "|")


def main() -> None:
    """Prints every measure."""
    _print_table("Words", counted(words))
    _print_table("Docstrings by opening word", counted(openings))
    _print_table("Formatting and spreads", counted(spreads))
    names = shared_class_names()
    print(f"\n## Class names in unrelated modules: {len(names)}\n")
    for name, files in names.items():
        print(f"- `{name}`: {', '.join(files)}")
    print(f"\n## Documented arguments that no signature has: {len(unknown_arguments())}\n")
    print("\n".join(unknown_arguments()))
    print(f"\nSections `Args:` that omit a parameter: {len(undocumented_arguments())}")


if __name__ == "__main__":
    main()
