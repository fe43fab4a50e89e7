"""Acceptance of the model-based drafter by depth, and the expected tokens of merged drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64

from shared.engine.jit import compiled
from shared.engine.ngram.tree import NgramTreeBatch

MEMORY = 1 / 64
"""Weight of a new observation in the rate of a depth."""

PRIOR_RATE = 0.7
"""Initial acceptance rate of a draft token, given that its parent is accepted."""


@compiled
def _best_by_level(
    trees: NgramTreeBatch, chances: Float64[np.ndarray, "B N"], best: Float64[np.ndarray, "B N"]
) -> None:
    """Fills the highest probability of each level; zeros beyond the last."""
    levels = np.zeros(chances.shape[1], np.int64)
    for row in range(len(chances)):
        for node in range(int(trees.num_nodes[row])):
            levels[node] = levels[trees.parents[row, node]] + 1 if node else 0
            best[row, levels[node]] = max(best[row, levels[node]], chances[row, node])


FEW = 2.0
"""Number of observations that an estimate counts as after its confidence has been reduced."""


class DrafterAcceptance:
    """Recent acceptance rates of the drafter.

    Args:
      drafted_depth: Levels that the drafter drafts.
      depth: Levels of a tree.

    Attributes:
      depth: See above.
      rates: Acceptance rate of the drafter's token at each level, given that its parent is
        accepted.
    """

    def __init__(self, drafted_depth: int, depth: int) -> None:
        self.rates = np.full(drafted_depth, PRIOR_RATE)
        self._seen = np.full(drafted_depth, 1 / MEMORY)
        self.depth = depth

    def decay_confidence(self) -> None:
        """Reduces the confidence in the rates, so that a few observations can change them."""
        self.rates[:], self._seen[:] = np.maximum(self.rates, PRIOR_RATE), FEW

    @property
    def survivals(self) -> Float64[np.ndarray, " depth"]:
        """Probability that a path of the drafter is accepted up to each level of a tree."""
        reached = np.zeros(self.depth)
        reached[: len(self.rates)] = np.cumprod(self.rates)
        return reached

    def learn(self, drafted: int, by_drafter: int) -> None:
        """Updates the rates from a row of a step.

        Args:
          drafted: Levels that the drafter's nodes reach; 0 gives no information.
          by_drafter: Levels of the accepted path, from the root on, whose nodes are the drafter's.
        """
        for level in range(min(by_drafter + 1, drafted)):
            won = 1.0 if level < by_drafter else 0.0
            self._seen[level] += 1
            self.rates[level] += max(MEMORY, 1 / self._seen[level]) * (won - self.rates[level])

    @property
    def expected_tokens(self) -> float:
        """Expected tokens of a step of the drafter per request."""
        return 1 + float(self.survivals.sum())

    def expected_tokens_of_tree(
        self,
        trees: NgramTreeBatch,
        chances: Float64[np.ndarray, "B N"],
        ahead: Int64[np.ndarray, " B"],
    ) -> tuple[float, float, float]:
        """Returns the expected tokens of a step per request, averaged over a batch.

        Args:
          trees, chances: N-gram drafts, and the probability that a sequence continues up to each
            node.
          ahead: Tokens by which each sequence is expected to have grown by then.

        Returns:
          Tokens with the drafter alone, with merged drafts, and with n-gram drafts alone.
        """
        best = np.zeros(chances.shape)
        _best_by_level(trees, chances, best)
        most = chances.shape[1]
        levels = ahead[:, None] + 1 + np.arange(self.depth)
        within = np.take_along_axis(best, np.minimum(levels, most - 1), axis=1)
        within = np.where(levels < most, within, 0.0)
        copied, drafted = within.sum(axis=1), self.survivals
        joined = np.maximum(within, drafted).sum(axis=1)
        return self.expected_tokens, 1 + float(joined.mean()), 1 + float(copied.mean())


def drafter_levels(
    parents: Sequence[int], drafted: Sequence[bool], path: Sequence[int]
) -> tuple[int, int]:
    """Returns the levels of a tree that the drafter reached, and those it contributed to the
    accepted path.

    Args:
      parents, drafted: Parents of the nodes after the root, and True for nodes of the drafter.
      path: The accepted nodes.

    Returns:
      Levels that the drafter's nodes reach; number of nodes of the accepted path, from the root on,
      that are the drafter's.
    """
    levels = [0]
    for parent in parents:
        levels.append(levels[parent] + 1)
    own = [level for level, is_own in zip(levels[1:], drafted, strict=True) if is_own]
    by_drafter = 0
    for node in path:
        if not drafted[node - 1]:
            break
        by_drafter += 1
    return max(own, default=0), by_drafter
