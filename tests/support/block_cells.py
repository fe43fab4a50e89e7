"""Cells of targets with embeddings that a DFlash head can follow."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product

from shared.spec.draft_tree import TreeShape
from tests.support import cells
from tests.support.cells import BATCH, Cell
from tests.support.equality import Oracle, assert_few_excused
from tests.support.tiny_heads import BLOCK_SIZE, cyclic, tiny_block_head
from tests.support.tiny_models import FAMILIES

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


class Backends(cells.Backends):
    """Backends of these targets, in all shapes."""

    def __init__(self) -> None:
        shapes = dict.fromkeys(product(FAMILIES, ("DFLASH",)), (CHAIN, PLAIN, SHORT, SHARED))
        super().__init__(shapes, lambda family, drafter: head_of(family), model_of)


def assert_cell(cell: Cell, backends: Backends, frameworks: tuple[str, ...]) -> None:
    served = {framework: backends.served(framework, cell) for framework in frameworks}
    cells.compare(cell, served, oracle_of(cell.family))
    assert_few_excused()
