"""Cells of trees over the blocks of block heads, and the heads."""

from __future__ import annotations

from functools import lru_cache

from shared.drafts.config import DraftHead
from shared.spec.draft_tree import TreeShape
from tests.support import cells
from tests.support.block_cells import model_of, oracle_of
from tests.support.cells import BATCH
from tests.support.equality import assert_few_excused
from tests.support.tiny_heads import (
    tiny_block_config,
    tiny_block_head,
    tiny_pair_head,
    tiny_spark_head,
)
from tests.support.tree_cells import TreeCell

SIZE = 8
"""Rows of a block, and nodes of its chain."""

KINDS = ("DFLASH", "JETSPEC", "DFLASH2", "DSPARK", "DSPARK-gated")


def tree(depth: int, width: int, nodes: int, share: float = 1.0) -> TreeShape:
    """A tree over the block, with a share of the verify rows."""
    return TreeShape(nodes, depth, width, round(BATCH * nodes * share), SIZE)


@lru_cache
def head_of(family: str, kind: str) -> DraftHead:
    config, weights = model_of(family)
    if kind.startswith("DSPARK"):
        how = "gated" if kind == "DSPARK-gated" else "vanilla"
        return tiny_spark_head(config, weights, 4, block_size=SIZE - 1, markov_head_type=how)
    if kind == "DFLASH2":
        return tiny_pair_head(config, 4, block_size=SIZE)
    if kind == "JETSPEC":
        own = tiny_block_config(config)["dflash_config"] | {"causal_head": True}
        return tiny_block_head(config, 4, block_size=SIZE, dflash_config=own)
    return tiny_block_head(config, 4, block_size=SIZE)


class Backends(cells.Backends):
    """Backends of `cyclic` targets with block heads, by the shapes of each family and kind."""

    def __init__(self, shapes: dict[tuple[str, str], tuple[TreeShape, ...]]) -> None:
        super().__init__(shapes, head_of, model_of)


def assert_cell(cell: TreeCell, backends: cells.Backends, frameworks: tuple[str, ...]) -> None:
    served = {framework: backends.served(framework, cell) for framework in frameworks}
    cells.compare(cell, served, oracle_of(cell.family))
    assert_few_excused()
