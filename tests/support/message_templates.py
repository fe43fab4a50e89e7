"""Messages that the pages on troubleshooting quote, and all strings of the code to find them in."""

import ast
import difflib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("shared", "jax_impl", "torch_impl")
PAGES = ("docs/troubleshooting.md", "docs/troubleshooting_requests.md")
GAP = "\0"
"""Placeholder for a part of a message that varies."""


def template(node: ast.expr) -> str | None:
    """Returns the text of a string expression with `GAP` for each value; None for others."""
    match node:
        case ast.Constant(value=str(text)):
            return re.sub(r"\{\w*\}|%[sd]", GAP, text)
        case ast.JoinedStr(values=values):
            return "".join(template(value) or GAP for value in values)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return (template(left) or GAP) + (template(right) or GAP)
    return None


@cache
def templates() -> frozenset[str]:
    """Returns every string of the packages, docstrings excluded."""
    trees = (
        ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    )
    found = (template(node) for tree in trees for node in _strings(tree))
    return frozenset(text for text in found if text and len(text) > 10)


def _strings(tree: ast.Module) -> Iterator[ast.expr]:
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and node not in docstrings:
            yield node


def quoted_messages() -> list[tuple[str, str]]:
    """Returns page and message of every row with a message in its first or second cell."""
    row = re.compile(r"^\|(?: \d+ \|)? `([^`]+)` \|", re.MULTILINE)
    return [
        (name, message)
        for name in PAGES
        for message in row.findall((ROOT / name).read_text(encoding="utf-8"))
    ]


def occurs(message: str) -> bool:
    """Returns whether a string of the code contains a message, with any value for each `<name>`."""
    return any(_with_gaps(message) in text for text in templates())


def nearest(message: str) -> str:
    """Returns the string of the code that is most similar to a message."""
    found = difflib.get_close_matches(_with_gaps(message), templates(), n=1, cutoff=0.0)
    return found[0].replace(GAP, "<...>")


def _with_gaps(message: str) -> str:
    return re.sub(r"<[^<>]+>", GAP, message)
