"""Markdown tables, and the parts of a page that a program writes between two markers."""

import textwrap
from collections.abc import Sequence

WIDTH = 100
"""Columns of a line of a page."""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows of cells as a table; the first row is its head."""
    head, *rest = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *rest))


def wrapped(text: str, indent: str = "") -> str:
    """Breaks a paragraph at spaces; `indent` begins all lines but the first."""
    return textwrap.fill(
        text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def between(page: str, begin: str, end: str, text: str) -> str:
    """Returns a page with other text between its two markers.

    Raises:
      ValueError: The page does not have both markers, in this order.
    """
    before, found, rest = page.partition(begin)
    _, closing, after = rest.partition(end)
    if not found or not closing:
        raise ValueError(f"the page has no {begin} and {end}")
    return f"{before}{begin}\n{text}\n{end}{after}"
