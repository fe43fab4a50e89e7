"""Cells of trees over the blocks of block heads, and the heads."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from shared.boundary.backend import BackendLimits, StepResult
from shared.boundary.program import StepKind
from shared.drafts.config import DraftHead
from shared.engine.branch_calibration import BranchCalibrationController
from shared.engine.controller import Controller
from shared.engine.rows import ScheduledRows
from shared.spec import draft_tree
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


def has_branches(parents: np.ndarray, is_draft: np.ndarray) -> bool:
    """Returns True if draft nodes of one depth have several parents, so a sibling has children.

    Args:
      parents: Trees, [B, N].
      is_draft: Mask of the draft nodes that count.
    """
    depths = draft_tree.depths(parents)
    return any(
        len(set(row[drafts & (depth == level)].tolist())) > 1
        for row, drafts, depth in zip(parents, is_draft, depths, strict=True)
        for level in range(1, int(depth.max()) + 1)
    )


class CalibrationRecorder(BranchCalibrationController):
    """Controller with the same rate at all depths, which records the steps that grow branches.

    Attributes:
      branches: For each kind of step with trees (of the drafter, merged, or with a grammar), True
        if a sibling had children.
    """

    def __init__(self, inner: Controller, capacity: BackendLimits, known: float) -> None:
        super().__init__(inner, capacity)
        fixed = np.full(capacity.max_calibrated, known)
        vars(self.rates)["log_ratio"] = lambda: fixed
        self.branches: dict[str, bool] = {}

    def on_result(self, rows: ScheduledRows, result: StepResult) -> None:
        super().on_result(rows, result)
        if rows.shape is None or rows.shape.drafter.is_plain:
            return
        has_grammar = rows.work is StepKind.DRAFT or rows.masks is not None
        kind = "grammar" if has_grammar else "drafter" if rows.copies is None else "merged"
        number = np.arange(result.parents.shape[1])
        is_draft = (number > 0) & (number < result.num_nodes[:, None])
        if result.origins is not None:
            is_draft &= result.origins.drafted.astype(bool)
        found = has_branches(result.parents, is_draft)
        self.branches[kind] = self.branches.get(kind, False) or found


class Backends(cells.Backends):
    """Backends of `cyclic` targets with block heads, by the shapes of each family and kind."""

    def __init__(self, shapes: dict[tuple[str, str], tuple[TreeShape, ...]]) -> None:
        super().__init__(shapes, head_of, model_of)


def assert_cell(cell: TreeCell, backends: cells.Backends, frameworks: tuple[str, ...]) -> None:
    served = {framework: backends.served(framework, cell) for framework in frameworks}
    cells.compare(cell, served, oracle_of(cell.family))
    assert_few_excused()
