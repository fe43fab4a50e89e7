"""Tests that the tables of guarantees name, as arguments for pytest.

    python -m tests.support.guarantees

`make guarantees` runs them. A row of `docs/invariants/` names a whole file or one test of it.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_ROW = re.compile(r"^\| .+ \| .+ \|$", re.MULTILINE)
_TEST = re.compile(r"`(tests/[\w/]*test_\w+\.py)(?:::(\w+))?`")


def pages() -> list[Path]:
    """The pages with tables of guarantees."""
    return [ROOT / "docs" / "invariants.md", *sorted((ROOT / "docs" / "invariants").glob("*.md"))]


def named_in(text: str) -> set[tuple[str, str]]:
    """File and test of each name in the tables of a page; a name of a whole file has no test."""
    return {match for row in _ROW.findall(text) for match in _TEST.findall(row)}


def node_ids(names: set[tuple[str, str]]) -> list[str]:
    """Arguments of pytest; a test is omitted if its whole file is named."""
    whole = {file for file, test in names if not test}
    single = {f"{file}::{test}" for file, test in names if test and file not in whole}
    return sorted(whole | single)


def main() -> None:
    """Prints one argument a line."""
    names = {name for page in pages() for name in named_in(page.read_text(encoding="utf-8"))}
    print("\n".join(node_ids(names)))


if __name__ == "__main__":
    main()
