"""Cells of targets whose embeddings a DFlash head can follow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from shared.boundary.backend import Backend
from shared.spec.draft_tree import TreeShape
from tests.support import cells
from tests.support.backends import make_backend
from tests.support.cells import BATCH, Cell, capacity_of, serve
from tests.support.equality import Oracle, assert_few_excused
from tests.support.tiny_heads import BLOCK_SIZE, cyclic, tiny_block_head

CHAIN = TreeShape.chain(BLOCK_SIZE - 1, BATCH)
PLAIN = TreeShape.plain(BATCH)
SHORT = replace(TreeShape.chain(BLOCK_SIZE - 2, BATCH), block=BLOCK_SIZE)
SHARED = replace(SHORT, rows=2 * BATCH)
"""Chains of the block's first drafts, with a verify row for each and with fewer."""


@dataclass(frozen=True)
class BlockCell(Cell):
    """A cell of a `cyclic` target with a DFlash head."""

    @property
    def drafter(self) -> str:
        return "DFLASH"

    def __str__(self) -> str:
        return (
            f"{self.family}-{self.sampling}-{self.load}-overlap{self.overlap}-page{self.page_size}"
        )


def cell(family: str, sampling: str, load: str, overlap: int, page_size: int) -> BlockCell:
    return BlockCell(family, CHAIN.depth, sampling, load, overlap, page_size)


@lru_cache
def model_of(family: str):
    config, weights = cells.model_of(family)
    return config, cyclic(config, weights)


@lru_cache
def head_of(family: str):
    return tiny_block_head(model_of(family)[0], 4)


@lru_cache
def oracle_of(family: str) -> Oracle:
    return Oracle(*model_of(family))


class Backends:
    """Backends by framework, target and page size."""

    def __init__(self) -> None:
        self._made: dict[tuple[str, str, int], Backend] = {}

    def get(self, framework: str, cell: Cell) -> Backend:
        key = (framework, cell.family, cell.page_size)
        if key not in self._made:
            capacity = capacity_of(cell.family, cell.page_size, (CHAIN, PLAIN, SHORT, SHARED))
            made = (*model_of(cell.family), capacity, head_of(cell.family))
            self._made[key] = make_backend(framework, *made)
        return self._made[key]

    def close(self) -> None:
        for backend in self._made.values():
            backend.close()


def assert_cell(cell: Cell, backends: Backends, frameworks: tuple[str, ...]) -> None:
    served = {framework: serve(backends.get(framework, cell), cell) for framework in frameworks}
    cells.compare(cell, served, oracle_of(cell.family))
    assert_few_excused()
