"""Acceptance of draft tokens off the first path of a tree, relative to those on it.

A block head predicts the tokens of all depths at once. Without a causal mask its predictions of
later depths assume the most probable tokens of earlier ones, so they are rarely right after a
sibling. A drafter's probabilities do not show this. The host therefore counts, by depth, how often
the first child of an accepted node is accepted: of nodes on the first path, and of nodes off it.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int, Int32

from shared.spec import draft_tree

PRIOR = 8.0
"""Number of nodes that the rate of all depths counts as in the rate of one depth, and that the rate
on the first path counts as in the rate off it."""

KEPT = 0.999
"""Fraction of the counts that remains after a step."""


class BranchRates:
    """Counts of first children by depth, on the first path and off it, of all requests.

    Args:
      depth: D, levels of the deepest tree.

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
        tokens: Int32[np.ndarray, "B W"],
        accepted: Int[np.ndarray, " B"],
    ) -> None:
        """Updates the counts from the verified trees of a step.

        Args:
          parents, drafts, num_nodes: The trees.
          tokens: Accepted draft tokens of each row, and the bonus token.
          accepted: Number of accepted draft tokens; a row with -1 gives no information.
        """
        self.offered *= KEPT
        self.accepted *= KEPT
        rows, number = np.arange(len(parents)), np.arange(parents.shape[1])
        is_child = (number > 0) & (number < num_nodes[:, None])
        is_first = draft_tree.first_path(parents)
        node, alive = np.zeros(len(parents), np.int64), accepted >= 0
        for depth in range(min(self.offered.shape[1], tokens.shape[1])):
            children = is_child & (parents == node[:, None])
            offers = alive & children.any(axis=1)
            path = 1 - is_first[rows, node].astype(np.int64)
            alive = alive & (depth < accepted)
            child = (children & (drafts == tokens[:, depth, None])).argmax(axis=1)
            wins = alive & (child == children.argmax(axis=1))
            self._count(self.offered, path, depth, offers)
            self._count(self.accepted, path, depth, wins)
            node = np.where(alive, child, node)

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
