"""JAX = torch = the specification, and speculation = plain decoding, token for token.

Every cell serves the same requests. Drafter, load, overlap depth and page size of a cell must not
change the outputs, which are also checked against the specification. Tokens and accepted drafts of
the two backends are equal.

A choice of cells that needs few compiled programs runs by default; the full product of section
"token for token" of docs/numerics.md has the marker `matrix`.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.cells import (
    DEPTHS,
    GREEDY,
    LOADS,
    OVERLAPS,
    PAGES,
    SAMPLED,
    SHAPES,
    Backends,
    Cell,
    assert_cell,
)
from tests.support.closing_fixture import closing_fixture


def full_product() -> list[Cell]:
    drafters = [("llama", 0), ("qwen3", 0)] + [("qwen3_5", depth) for depth in DEPTHS]
    axes = product(drafters, (GREEDY, SAMPLED), LOADS, OVERLAPS, PAGES)
    return [Cell(*drafter, *rest) for drafter, *rest in axes]


def default_choice() -> list[Cell]:
    """Every value of every axis with every drafter, and few programs: one page size a family."""
    page_sizes = {"llama": 1, "qwen3": 64, "qwen3_5": 16}
    cells = [cell for cell in full_product() if cell.page_size == page_sizes[cell.family]]
    overlap_of = {1: 0, 16: 1, 64: 2}
    return [
        cell
        for cell in cells
        if (cell.load == "mixed" and cell.overlap == overlap_of[cell.page_size])
        or (
            cell.load == "alone"
            and cell.depth in (0, 3)
            and cell.overlap == (overlap_of[cell.page_size] + 1) % 3
        )
    ]


CELLS = default_choice()
MATRIX = [cell for cell in full_product() if cell not in CELLS]


backends = closing_fixture(lambda: Backends(SHAPES, lambda family, drafter: drafter))


IN_JAX = (("qwen3_5", 0), ("qwen3_5", 3))
"""Models and depths that a default run compiles; chains of 1 and of 5 differ in one number.

Full attention is part of the hybrid; `tests/device/test_cross_backend_families.py` has JAX with a
dense family.
"""


def frameworks_of(cell: Cell) -> tuple[str, ...]:
    return ("torch", "jax") if (cell.family, cell.depth) in IN_JAX else ("torch",)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_backends_match_spec(cell, backends):
    assert_cell(cell, backends, frameworks_of(cell))


@pytest.mark.matrix
@pytest.mark.parametrize(
    "cell", [*MATRIX, *(each for each in CELLS if "jax" not in frameworks_of(each))], ids=str
)
def test_backends_full_matrix_match(cell, backends):
    assert_cell(cell, backends, ("torch", "jax"))


REFERENCE_CELLS = [
    Cell("llama", 0, SAMPLED, "mixed", 1, 1),
    Cell("qwen3", 0, GREEDY, "mixed", 2, 64),
    Cell("qwen3_5", 0, SAMPLED, "alone", 0, 16),
    Cell("qwen3_5", 3, SAMPLED, "mixed", 1, 16),
    Cell("qwen3_5", 5, GREEDY, "mixed", 2, 16),
]


@pytest.mark.parametrize("cell", REFERENCE_CELLS, ids=str)
def test_backends_acceptance_matches_spec(cell, backends):
    assert_cell(cell, backends, ("reference", *frameworks_of(cell)))


def test_sampled_chain_accepts_every_depth(backends):
    """Else the matrix would prove nothing about either."""
    cell = Cell("qwen3_5", 3, SAMPLED, "mixed", 1, 16)
    served = backends.served("torch", cell)
    accepted = [count for outcome in served.values() for count in outcome.accepted]
    assert {0, 1, 2, 3} <= set(accepted), accepted


def test_default_cells_cover_every_axis_value():
    for axis in ("family", "depth", "sampling", "load", "overlap", "page_size"):
        full = {getattr(cell, axis) for cell in full_product()}
        assert {getattr(cell, axis) for cell in CELLS} == full
