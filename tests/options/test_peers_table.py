"""The table of vLLM's and SGLang's flags equals its generator."""

import pytest

from docs.make import peers_table
from shared.options.command_line import FLAGS
from shared.options.flags import spelling

PAIRS = [pair for pairs in peers_table.GROUPS.values() for pair in pairs]


def test_peers_table_equals_generator() -> None:
    text = peers_table.PAGE.read_text(encoding="utf-8")
    assert text == peers_table.with_table(text), "run python -m docs.make.peers_table"


@pytest.mark.parametrize("pair", PAIRS, ids="/".join)
def test_peers_table_row_names_flag_or_reason(pair: tuple[str, str]) -> None:
    """Both spellings of a pair set the same field; any other spelling has a note."""
    (row,) = [
        line for line in peers_table.table().splitlines() if line.startswith(_beginning(pair))
    ]
    known = {spelling(FLAGS[name].name) for name in pair if name in FLAGS}
    assert len(known) <= 1
    flag, note = (cell.strip() for cell in row.split(" | ")[2:4])
    assert flag == (f"`{known.pop()}`" if known else "-")
    assert bool(note.strip(" |")) == any(name and name not in FLAGS for name in pair)


def _beginning(pair: tuple[str, str]) -> str:
    return "| " + " | ".join(f"`{name}`" if name else "-" for name in pair) + " | "
