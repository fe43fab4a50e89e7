"""Estimated acceptance probability of nodes in n-gram draft trees.

Nodes have a kind (`tree.KINDS`): by the length of their match, its frequency, and the number of
earlier siblings. The rate of a kind is the fraction of its nodes that were right, given that their
parent was, over all requests. It is measured with the tokens that followed, so unverified nodes
count too, and no trial steps are needed.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from shared.engine.jit import compiled
from shared.engine.ngram.tree import COUNTS, ELDERS, KINDS, MATCHES, NgramTreeBatch, roots_of

MEMORY = 32.0
"""Steps with a kind of node over which its rate is averaged exponentially."""

PRIOR_TRIES = 1.0

MOST_RATE = 0.995


@compiled
def _score(
    trees: NgramTreeBatch,
    row_of: Int64[np.ndarray, " B"],
    texts: Int32[np.ndarray, "B W"],
    counts: Int32[np.ndarray, " B"],
    tried: Float64[np.ndarray, " kinds"],
    won: Float64[np.ndarray, " kinds"],
) -> None:
    """Walks each sequence down its tree, and counts children met and children right by kind."""
    now = np.zeros((2, len(tried)))
    for i in range(len(row_of)):
        row, node = row_of[i], 0
        for place in range(counts[i]):
            next_node = 0
            for child in range(node + 1, trees.num_nodes[row]):
                if trees.parents[row, child] != node:
                    continue
                kind = trees.evidence[row, child]
                now[0, kind] += 1
                if trees.tokens[row, child] == texts[i, place]:
                    now[1, kind] += 1
                    next_node = child
            if next_node == 0:
                break
            node = next_node
    for kind in range(len(tried)):
        if now[0, kind] > 0:
            tried[kind] = (1 - 1 / MEMORY) * tried[kind] + now[0, kind]
            won[kind] = (1 - 1 / MEMORY) * won[kind] + now[1, kind]


@compiled
def _weigh(
    trees: NgramTreeBatch,
    rates: Float64[np.ndarray, " kinds"],
    most: Int64[np.ndarray, " B"],
    weights: Float64[np.ndarray, "B N"],
) -> None:
    """Fills the acceptance probability of each node; 0 for padding and nodes that a row cannot
    use.
    """
    depth = np.zeros(weights.shape[1], np.int64)
    for row in range(len(most)):
        weights[row, 0] = 1.0
        for node in range(1, trees.num_nodes[row]):
            parent = trees.parents[row, node]
            depth[node] = depth[parent] + 1
            if depth[node] <= most[row]:
                weights[row, node] = weights[row, parent] * rates[trees.evidence[row, node]]


@compiled
def _take(
    order: Int64[np.ndarray, " nodes"],
    weights: Float64[np.ndarray, "B N"],
    nodes: int,
    budget: int,
    taken: Bool[np.ndarray, "B N"],
) -> float:
    """Marks the best nodes, at most `nodes` per row with its root; returns the sum of their
    weights.

    A node is never better than its parent and comes after it, so the result is a tree.
    """
    B, N = weights.shape
    sizes, total, left = np.ones(B, np.int64), 0.0, budget
    for place in order:
        row, node = place // N, place % N
        if left == 0 or weights[row, node] <= 0:
            break
        if node and sizes[row] < nodes:
            taken[row, node] = True
            sizes[row] += 1
            left -= 1
            total += weights[row, node]
    return float(total)


@compiled
def _cut(trees: NgramTreeBatch, taken: Bool[np.ndarray, "B N"], kept: NgramTreeBatch) -> None:
    """Copies the marked nodes, in their order."""
    for row in range(len(taken)):
        place, size = np.zeros(taken.shape[1], np.int64), 1
        for node in range(1, trees.num_nodes[row]):
            if taken[row, node]:
                place[node] = size
                kept.tokens[row, size] = trees.tokens[row, node]
                kept.parents[row, size] = place[trees.parents[row, node]]
                kept.evidence[row, size] = trees.evidence[row, node]
                size += 1
        kept.num_nodes[row] = size


@compiled
def select_nodes(
    trees: NgramTreeBatch,
    weights: Float64[np.ndarray, "B N"],
    nodes: Int64[np.ndarray, " sizes"],
    budgets: Int64[np.ndarray, " sizes"],
    costs: Float64[np.ndarray, " sizes"],
    gains: Float64[np.ndarray, " sizes"],
    kept: NgramTreeBatch,
) -> int:
    """Selects the size of a step with the most tokens per cost, and prunes the trees to it.

    Args:
      trees: The trees.
      weights: Acceptance probability of each node.
      nodes, budgets: Maximum nodes of a row with its root, and of all rows without roots, by size.
      costs: Cost of a step, by size.
      gains: Filled: expected accepted draft tokens, by size.
      kept: Trees with roots only; filled with the best nodes of the selected size.

    Returns:
      The index of the size.
    """
    order = np.argsort(-weights.ravel(), kind="mergesort")
    taken = np.zeros((len(nodes), *weights.shape), np.bool_)
    best, fastest = 0, 0.0
    for size in range(len(nodes)):
        gains[size] = _take(order, weights, nodes[size], budgets[size], taken[size])
        speed = (len(weights) + gains[size]) / costs[size]
        if speed > fastest:
            best, fastest = size, speed
    _cut(trees, taken[best], kept)
    return best


class NodeAcceptance:
    """Acceptance rate of each kind of node.

    Attributes:
      rates: Fraction of nodes of each kind that are right, given that their parent is.
    """

    def __init__(self) -> None:
        elders = np.arange(KINDS) % ELDERS
        length = np.arange(KINDS) // (COUNTS * ELDERS)
        # Prior: a longer match is right more often, a later sibling less often.
        self._prior = (0.3 + 0.6 * length / (MATCHES - 1)) * 0.3**elders
        self.tried, self._won = np.zeros((2, KINDS))
        self.rates = self._prior

    def warm_up(self) -> None:
        """Compiles the loops in advance."""
        other, roots = NodeAcceptance(), roots_of(1, 1)
        zero, one = np.zeros(1, np.int64), np.ones(1)
        other.learn(roots, zero, roots.tokens, roots.num_nodes)
        weights = other.weights(roots, zero)
        select_nodes(roots, weights, zero + 1, zero, one, np.zeros(1), roots_of(1, 1))

    def learn(
        self,
        trees: NgramTreeBatch,
        row_of: Int64[np.ndarray, " B"],
        texts: Int32[np.ndarray, "B W"],
        counts: Int32[np.ndarray, " B"],
    ) -> None:
        """Updates the rates from tokens that followed the trees.

        Args:
          trees: The trees.
          row_of: Tree of each sequence.
          texts, counts: Tokens that followed, and their number.
        """
        _score(trees, row_of, texts, counts, self.tried, self._won)
        won = self._won + PRIOR_TRIES * self._prior
        self.rates = np.minimum(won / (self.tried + PRIOR_TRIES), MOST_RATE)

    def weights(
        self, trees: NgramTreeBatch, most: Int64[np.ndarray, " B"]
    ) -> Float64[np.ndarray, "B N"]:
        """Returns the probability that each node is accepted, with all its ancestors.

        Args:
          trees: The trees.
          most: Maximum useful draft tokens on a path, per row.
        """
        expected = np.zeros(trees.tokens.shape)
        _weigh(trees, self.rates, most, expected)
        return expected
