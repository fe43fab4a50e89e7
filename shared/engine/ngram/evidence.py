"""What a node of a tree from seen text is worth: how often nodes of its kind were right before.

The kind of a node is what speaks for it: the length of the match, how often it was seen, and the
children before it (`tree.KINDS`). Its rate is counted over all requests, wherever its parent was
right, and by the text that followed: also of nodes that no step verified. So there is nothing to
try out.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int32, Int64

from shared.engine.compiled import compiled
from shared.engine.ngram.tree import COUNTS, ELDERS, KINDS, MATCHES, Trees

MEMORY = 32.0
"""Steps in which a kind was tried that count: of more, the older ones fade."""

PRIOR_TRIES = 1.0


@compiled
def _score(
    trees: Trees,
    row_of: Int64[np.ndarray, " B"],
    texts: Int32[np.ndarray, "B W"],
    counts: Int32[np.ndarray, " B"],
    tried: Float64[np.ndarray, " kinds"],
    won: Float64[np.ndarray, " kinds"],
) -> None:
    """Goes down each tree as its text went on, and counts the children that it passes."""
    now = np.zeros((2, len(tried)))
    for i in range(len(row_of)):
        row, node = row_of[i], 0
        for place in range(counts[i]):
            found = 0
            for child in range(node + 1, trees.num_nodes[row]):
                if trees.parents[row, child] != node:
                    continue
                kind = trees.evidence[row, child]
                now[0, kind] += 1
                if trees.tokens[row, child] == texts[i, place]:
                    now[1, kind] += 1
                    found = child
            if found == 0:
                break
            node = found
    for kind in range(len(tried)):
        if now[0, kind] > 0:
            tried[kind] = (1 - 1 / MEMORY) * tried[kind] + now[0, kind]
            won[kind] = (1 - 1 / MEMORY) * won[kind] + now[1, kind]


@compiled
def _weigh(
    trees: Trees,
    rates: Float64[np.ndarray, " kinds"],
    most: Int64[np.ndarray, " B"],
    weights: Float64[np.ndarray, "B N"],
) -> None:
    """The chance that each node is accepted; 0 of padding, and below what its row has use for."""
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
    """Marks the best nodes, at most `nodes` of a row with its root; the sum of their weights.

    A node is never better than its parent and comes after it, so what is taken is a tree.
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
def _cut(trees: Trees, taken: Bool[np.ndarray, "B N"], found: Trees) -> None:
    """Copies the nodes that were taken, in their order."""
    for row in range(len(taken)):
        place, size = np.zeros(taken.shape[1], np.int64), 1
        for node in range(1, trees.num_nodes[row]):
            if taken[row, node]:
                place[node] = size
                found.tokens[row, size] = trees.tokens[row, node]
                found.parents[row, size] = place[trees.parents[row, node]]
                found.evidence[row, size] = trees.evidence[row, node]
                size += 1
        found.num_nodes[row] = size


class Evidence:
    """The rates of all kinds of nodes."""

    def __init__(self) -> None:
        elders = np.arange(KINDS) % ELDERS
        length = np.arange(KINDS) // (COUNTS * ELDERS)
        # Believed at first: a longer match is right more often, a later child less.
        self._prior = (0.3 + 0.6 * length / (MATCHES - 1)) * 0.3**elders
        self._tried, self._won = np.zeros((2, KINDS))

    def warm_up(self) -> None:
        """Compiles what weighs trees, takes of them and learns, so that no step waits for it."""
        none, roots = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
        trees, rows = Trees(none, none, roots, none), np.zeros(1, np.int64)
        self.learn(trees, rows, none, none[0])
        selection = Selection(trees, self.weights(trees, rows))
        selection.cut(selection.take(1, 0)[1], 1)

    @property
    def rates(self) -> Float64[np.ndarray, " kinds"]:
        """How often a node of each kind is right where its parent is."""
        won = self._won + PRIOR_TRIES * self._prior
        return np.minimum(won / (self._tried + PRIOR_TRIES), 0.995)

    def learn(
        self,
        trees: Trees,
        row_of: Int64[np.ndarray, " B"],
        texts: Int32[np.ndarray, "B W"],
        counts: Int32[np.ndarray, " B"],
    ) -> None:
        """How texts went on after trees were made for them.

        Args:
          row_of: The tree of each text.
          texts, counts: The tokens that followed, and how many.
        """
        _score(trees, row_of, texts, counts, self._tried, self._won)

    def weights(self, trees: Trees, most: Int64[np.ndarray, " B"]) -> Float64[np.ndarray, "B N"]:
        """The chance that each node is accepted, with all above it.

        Args:
          most: Drafts on a path that each row has use for.
        """
        found = np.zeros(trees.tokens.shape)
        _weigh(trees, self.rates, most, found)
        return found


class Selection:
    """Which nodes of a batch a step verifies, for each size that it may have.

    Args:
      weights: Of each node, the chance that it is accepted.
    """

    def __init__(self, trees: Trees, weights: Float64[np.ndarray, "B N"]) -> None:
        self._trees, self._weights = trees, weights
        self._order = np.argsort(-weights, axis=None, kind="stable")

    def take(self, nodes: int, budget: int) -> tuple[float, Bool[np.ndarray, "B N"]]:
        """The best nodes.

        Args:
          nodes: Most of a row, with its root.
          budget: Most of all rows, roots apart.

        Returns:
          Tokens that a step gives on average beside the target's own, and which nodes they are.
        """
        taken = np.zeros(self._weights.shape, bool)
        return _take(self._order, self._weights, nodes, budget, taken), taken

    def cut(self, taken: Bool[np.ndarray, "B N"], nodes: int) -> Trees:
        """Trees of `nodes` places with the nodes that were taken."""
        B = len(taken)
        zeros = (np.zeros((B, nodes), np.int32) for _ in range(3))
        tokens, parents, evidence = zeros
        found = Trees(tokens, parents, np.ones(B, np.int32), evidence)
        _cut(self._trees, taken, found)
        return found
