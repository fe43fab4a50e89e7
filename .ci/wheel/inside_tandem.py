"""Rewriting of source files whose top-level packages move into the package `tandem`.

Imports are found by Python's own parser. In strings a dotted name that begins with one of our
packages is a module ("shared.server.api.service" of a child process,
f"kernels.{language}.attention.attention_layer" of an import), so it gets the prefix too, in
docstrings as well. `check` fails for what it cannot prove.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGES = ("bench", "jax_impl", "kernels", "models", "shared", "tests", "torch_impl")
PREFIX = b"tandem."
_NAMES = "|".join(PACKAGES)
_MODULE = re.compile(rf"(?<![\w./-])(?=(?:{_NAMES})\.(?:[a-z_]\w|\{{))".encode())
_BACKEND = re.compile(rb"(?<![\w./-])(?=\{[^{}]*\}_impl\b)")
_OUTSIDE_BRACES = re.compile(rb"(\{[^{}]*\})|" + _MODULE.pattern)
_IMPORTERS = {"import_module", "find_spec", "run_module"}
SUFFIXES = (".py", ".pyi")


def move(package: Path) -> None:
    """Rewrites every source file below the folder."""
    for path in _files(package):
        path.write_bytes(inside(path.read_bytes(), str(path)))


def check(package: Path) -> None:
    """Checks that no file names one of our packages without the prefix.

    Raises:
      ValueError: The first file and line that does.
    """
    for path in _files(package):
        for line, fault in faults(path.read_bytes()):
            raise ValueError(f"{path.relative_to(package)}:{line}: {fault}")


def inside(source: bytes, path: str = "") -> bytes:
    """Returns a module's source with `tandem.` before each of our modules that it names."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(source, path)
    pieces, end = [], 0
    for begin, stop, text in sorted(_changed(tree, source, starts)):
        pieces += [source[end:begin], text]
        end = stop
    return b"".join([*pieces, source[end:]])


def _changed(tree: ast.AST, source: bytes, starts: list[int]) -> Iterator[tuple[int, int, bytes]]:
    """Parts of the source, by their first byte and the one after the last, and their new text."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.stmt | ast.expr | ast.alias):
            begin = starts[node.lineno - 1] + node.col_offset
            stop = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            text = source[begin:stop]
            if isinstance(node, ast.ImportFrom) and not node.level and _is_ours(node.module):
                yield begin, begin, b""
                at = begin + len(b"from ") + len(text[5:]) - len(text[5:].lstrip())
                yield at, at, PREFIX
                continue
            if isinstance(node, ast.alias) and _is_ours(node.name) and isinstance(tree, ast.Import):
                yield begin, begin, PREFIX
            elif isinstance(node, ast.JoinedStr):
                yield begin, stop, _in_f_string(text)
                continue
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield begin, stop, _MODULE.sub(PREFIX, text)
        yield from _changed(node, source, starts)


def _in_f_string(text: bytes) -> bytes:
    return _OUTSIDE_BRACES.sub(lambda found: found[1] or PREFIX, _BACKEND.sub(PREFIX, text))


def faults(source: bytes) -> Iterator[tuple[int, str]]:
    """Line and description of each of our modules that is named without the prefix."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and not node.level and _is_ours(node.module):
            yield node.lineno, f"imports from {node.module}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _is_ours(alias.name):
                    yield node.lineno, f"imports {alias.name}"
                elif alias.name.startswith("tandem.") and alias.asname is None:
                    yield node.lineno, f"binds {alias.name} to its first name. Use `from`"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if _MODULE.search(node.value.encode(errors="surrogatepass")):
                yield node.lineno, f"names a module in {node.value!r}"
        elif isinstance(node, ast.JoinedStr):
            text = ast.unparse(node).encode()
            if _in_f_string(text) != text:
                yield node.lineno, f"names a module in {ast.unparse(node)}"
        elif isinstance(node, ast.Call):
            yield from _call_faults(node)


def _call_faults(call: ast.Call) -> Iterator[tuple[int, str]]:
    """Imports by a bare name, which no rule of strings can distinguish from a word."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    given = call.args[0] if call.args else None
    if name in _IMPORTERS and isinstance(given, ast.Constant) and given.value in PACKAGES:
        yield call.lineno, f"imports {given.value} by its name"


def _is_ours(module: str | None) -> bool:
    return str(module).partition(".")[0] in PACKAGES


def _files(package: Path) -> list[Path]:
    return sorted(path for path in package.rglob("*") if path.suffix in SUFFIXES)
