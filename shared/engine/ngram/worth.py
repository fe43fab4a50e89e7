"""What the drafts of two sources were worth lately, and so whether copies pay beside a drafter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64, Int64

from shared.engine.compiled import compiled
from shared.engine.ngram.tree import Trees

MEMORY = 1 / 64
"""The part of what is known of a depth that a draft of it replaces."""

PRIOR_RATE = 0.7
"""How often a draft is accepted where its parent is, before anything was seen."""


@compiled
def _best_by_level(
    trees: Trees, chances: Float64[np.ndarray, "B N"], best: Float64[np.ndarray, "B N"]
) -> None:
    """Fills the best chance of each level; zeros beyond the last."""
    levels = np.zeros(chances.shape[1], np.int64)
    for row in range(len(chances)):
        for node in range(int(trees.num_nodes[row])):
            levels[node] = levels[trees.parents[row, node]] + 1 if node else 0
            best[row, levels[node]] = max(best[row, levels[node]], chances[row, node])


FEW = 2.0
"""Drafts of a depth for which what is believed of it counts, where it is held for old."""


class Worth:
    """How far the drafter's paths were accepted lately.

    Args:
      drafted_depth: Levels that the drafter drafts.
      depth: Levels of a tree.

    Attributes:
      depth: As above.
      rates: How often the drafter's draft of each level is accepted where its parent is.
    """

    def __init__(self, drafted_depth: int, depth: int) -> None:
        self.rates = np.full(drafted_depth, PRIOR_RATE)
        self._seen = np.full(drafted_depth, 1 / MEMORY)
        self.depth = depth

    def doubt(self) -> None:
        """Holds what is known of the drafter for old: a few drafts may say the contrary."""
        self.rates[:], self._seen[:] = np.maximum(self.rates, PRIOR_RATE), FEW

    @property
    def survivals(self) -> Float64[np.ndarray, " depth"]:
        """How often a path of the drafter is accepted as far as each level of a tree."""
        reached = np.zeros(self.depth)
        reached[: len(self.rates)] = np.cumprod(self.rates)
        return reached

    def learn(self, drafted: int, by_drafter: int) -> None:
        """Learns from a row of a step.

        Args:
          drafted: Levels that the drafter's nodes reach; 0 shows nothing of it.
          by_drafter: Levels of the accepted path whose nodes are the drafter's, from the root on.
        """
        for level in range(min(by_drafter + 1, drafted)):
            won = 1.0 if level < by_drafter else 0.0
            self._seen[level] += 1
            self.rates[level] += max(MEMORY, 1 / self._seen[level]) * (won - self.rates[level])

    @property
    def alone(self) -> float:
        """Tokens that a step of the drafter gives a request."""
        return 1 + float(self.survivals.sum())

    def tokens_of(
        self, trees: Trees, chances: Float64[np.ndarray, "B N"], ahead: Int64[np.ndarray, " B"]
    ) -> tuple[float, float, float]:
        """Tokens that a step is expected to give a request, on average over a batch.

        Args:
          trees, chances: The copies, and how often a text goes on as far as each.
          ahead: Tokens by which each text is expected to have gone on by then.

        Returns:
          Of the drafter's own step, of one of both sources, and of copies alone.
        """
        best = np.zeros(chances.shape)
        _best_by_level(trees, chances, best)
        most = chances.shape[1]
        levels = ahead[:, None] + 1 + np.arange(self.depth)
        within = np.take_along_axis(best, np.minimum(levels, most - 1), axis=1)
        within = np.where(levels < most, within, 0.0)
        copied, drafted = within.sum(axis=1), self.survivals
        joined = np.maximum(within, drafted).sum(axis=1)
        return self.alone, 1 + float(joined.mean()), 1 + float(copied.mean())


def drafter_levels(
    parents: Sequence[int], drafted: Sequence[bool], path: Sequence[int]
) -> tuple[int, int]:
    """What a tree shows of the drafter.

    Args:
      parents, drafted: Of the nodes behind the root, and whether the drafter grew each.
      path: The accepted nodes.

    Returns:
      Levels that the drafter's nodes reach, and how many of the accepted path's, from the root on,
      are its own.
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
