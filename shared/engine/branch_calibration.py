"""Calibration of trees over a block by the acceptance of draft tokens off their first path.

A block head predicts the tokens of all depths at once. Without a causal mask its predictions of
later depths assume the most probable tokens of earlier ones, so they are rarely right after a
sibling. A drafter's probabilities do not show this. The host therefore counts, by depth, how often
the first child of an accepted node is accepted: of nodes on the first path, and of nodes off it.
Every tree over a block grows with these rates: fixed trees, adaptive tiers, trees that are merged
with n-gram drafts, and trees that wait for the bitmasks of a grammar.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32

from shared.boundary.backend import BackendLimits, StepResult
from shared.boundary.program import StepKind
from shared.engine.controller import Controller, DelegatingController, Reserve
from shared.engine.request import Request
from shared.engine.rows import ScheduledRows
from shared.spec.draft_tree import TreeShape

PRIOR = 8.0
"""Number of nodes that the rate of all depths counts as in the rate of one depth, and that the rate
on the first path counts as in the rate off it."""

KEPT = 0.999
"""Fraction of the counts that remains after a step."""


class BranchRates:
    """Counts of first children by depth, on the first path and off it, of all requests.

    Args:
      depth: D, number of depths.

    Attributes:
      offered: [2, D] accepted nodes with children, by depth: on the first path, and off it.
      accepted: [2, D] of them those with an accepted first child.
    """

    def __init__(self, depth: int) -> None:
        self.offered, self.accepted = np.zeros((2, 2, depth))

    def learn(
        self,
        parents: Int32[np.ndarray, "B N"],
        drafts: Int32[np.ndarray, "B N"],
        num_nodes: Int[np.ndarray, " B"],
        copied: Int32[np.ndarray, "B N"] | None,
        tokens: Int32[np.ndarray, "B W"],
        accepted: Int[np.ndarray, " B"],
    ) -> None:
        """Updates the counts from the verified trees of a step.

        Children of a node are listed best first. N-gram drafts change the order of siblings, so a
        merged tree gives no information from the first node on that has such a child.

        Args:
          parents, drafts, num_nodes: The trees.
          copied: Index of each node in the n-gram tree, 0 if it is not in it; None without merging.
          tokens: Accepted draft tokens of each row, and the bonus token.
          accepted: Number of accepted draft tokens; a row with -1 gives no information.
        """
        self.offered *= KEPT
        self.accepted *= KEPT
        number = np.arange(parents.shape[1])
        is_child = (number > 0) & (number < num_nodes[:, None])
        node, path = np.zeros((2, len(parents)), np.int64)
        alive = accepted >= 0
        for depth in range(min(self.offered.shape[1], tokens.shape[1])):
            children = is_child & (parents == node[:, None])
            if copied is not None:
                alive = alive & ~(children & (copied > 0)).any(axis=1)
            if not alive.any():
                break
            offers = alive & children.any(axis=1)
            alive = alive & (depth < accepted)
            first = children.argmax(axis=1)
            child = (children & (drafts == tokens[:, depth, None])).argmax(axis=1)
            self._count(self.offered, path, depth, offers)
            self._count(self.accepted, path, depth, alive & (child == first))
            node, path = child, path | (child != first)

    @staticmethod
    def _count(
        counts: Float64[np.ndarray, "paths D"],
        path: Int[np.ndarray, " B"],
        depth: int,
        is_counted: Bool[np.ndarray, " B"],
    ) -> None:
        counts[:, depth] += np.bincount(path[is_counted], minlength=2)

    def log_ratio(self) -> Float64[np.ndarray, " D"]:
        """Returns the log of the rate off the first path, relative to the rate on it; at most 0."""
        won, offered = self.accepted.sum(axis=1), self.offered.sum(axis=1)
        on_path = (won[0] + 1) / (offered[0] + 2)
        off_path = (won[1] + PRIOR * on_path) / (offered[1] + PRIOR)
        pooled = np.array([[on_path], [off_path]])
        rates = (self.accepted + PRIOR * pooled) / (self.offered + PRIOR)
        return np.minimum(np.log(rates[1] / rates[0]), 0.0)


class BranchCalibrationController(DelegatingController):
    """Controller that calibrates the trees of another controller's steps.

    Args:
      inner: Controller that chooses the steps.
      capacity: Limits of the backend.

    Attributes:
      rates: Acceptance off the first path of all trees so far.
    """

    def __init__(self, inner: Controller, capacity: BackendLimits) -> None:
        super().__init__(inner)
        self.rates = BranchRates(capacity.max_calibrated)

    def select_rows(self, ready: Sequence[Request], reserve: Reserve) -> ScheduledRows | None:
        """Returns the rows of the inner controller, with the rates if the device grows a tree."""
        rows = self.inner.select_rows(ready, reserve)
        if rows is None or not _has_branches(rows.shape) or rows.drafts is not None:
            return rows
        return replace(rows, branch_calibration=self.rates.log_ratio().astype(np.float32))

    def on_result(self, rows: ScheduledRows, result: StepResult) -> None:
        """Learns from verified trees, also from those that a draft step has grown before."""
        self.inner.on_result(rows, result)
        if rows.work is not StepKind.DECODE or not _has_branches(rows.shape):
            return
        alive = [i for i, request in enumerate(rows.requests) if request.finish_reason is None]
        origins = result.origins
        self.rates.learn(
            parents=result.parents[alive],
            drafts=result.drafts[alive],
            num_nodes=result.num_nodes[alive],
            copied=None if origins is None else origins.copied[alive],
            tokens=result.tokens[alive],
            accepted=result.counts[alive].astype(np.int64) - 1,  # -1 for a failed row
        )


def with_branch_calibration(controller: Controller, capacity: BackendLimits) -> Controller:
    """Returns the controller, which calibrates trees over a block if the backend grows any.

    Simulated acceptance gives no information about branches. Its outputs depend on the trees, which
    therefore must not depend on earlier requests.
    """
    is_simulated = capacity.accept_rates is not None
    if is_simulated or not any(map(_has_branches, capacity.shapes)):
        return controller
    return BranchCalibrationController(controller, capacity)


def _has_branches(shape: TreeShape | None) -> bool:
    """Returns True for trees over a block that are no chains."""
    return shape is not None and shape.drafter.block > 0 and shape.drafter.width > 1
