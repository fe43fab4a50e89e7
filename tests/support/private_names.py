"""Private names of the product that test files use."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

OF_NAMED_TUPLES = {"_replace", "_fields", "_asdict", "_make"}


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in OF_NAMED_TUPLES


def _tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _defined(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name


def _named(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls")):
                continue
            case ast.Attribute(attr=name):
                yield name
            case ast.ImportFrom(names=names):
                yield from (alias.name for alias in names)


def defined_in(files: Iterable[Path]) -> set[str]:
    """The private names that files define: functions, classes, variables and attributes."""
    return {name for file in files for name in _defined(_tree(file)) if _is_private(name)}


def reached_by(file: Path, private: set[str]) -> set[str]:
    """Returns the private names that a file uses and does not define."""
    tree = _tree(file)
    return {name for name in _named(tree) if name in private} - set(_defined(tree))
