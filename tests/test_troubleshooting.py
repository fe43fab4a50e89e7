"""Messages that the pages on troubleshooting quote still occur in the code."""

import ast
import difflib
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("shared", "jax_impl", "torch_impl")
PAGES = ("troubleshooting.md", "troubleshooting_requests.md")
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
    """Every string of the packages, docstrings excluded."""
    trees = (
        ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
    )
    return frozenset(
        text
        for tree in trees
        for node in strings(tree)
        if (text := template(node)) and len(text) > 10
    )


def strings(tree: ast.Module) -> Iterator[ast.expr]:
    docstrings = {
        node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)
    }  # statements that are a string
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp) and node not in docstrings:
            yield node


def quoted() -> list[tuple[str, str]]:
    """Page and message of every row whose first or second cell is a message."""
    row = re.compile(r"^\|(?: \d+ \|)? `([^`]+)` \|", re.MULTILINE)
    return [
        (name, message)
        for name in PAGES
        for message in row.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))
    ]


@pytest.mark.parametrize("case", quoted(), ids="-".join)
def test_quoted_message_occurs_in_code(case: tuple[str, str]) -> None:
    page, message = case
    wanted = re.sub(r"<[^<>]+>", GAP, message)
    found = any(wanted in text for text in templates())
    near = difflib.get_close_matches(wanted, templates(), n=1, cutoff=0.3) if not found else []
    assert found, f"docs/{page} quotes a message that changed; nearest: {near}"


def test_pages_quote_most_likely_messages() -> None:
    messages = [message for _, message in quoted()]
    assert len(messages) >= 60
    assert len(messages) == len({*messages})
