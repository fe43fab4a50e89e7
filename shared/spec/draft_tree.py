"""Draft trees: shape, tree attention masks, growth of dynamic trees (EAGLE-2), and flat verify
rows.

A tree has N nodes. Node 0, the root, is the newest token. `parents[i] < i` for every other node and
`parents[0] = 0`. A chain is the tree with `parents[i] = i - 1`. A request with fewer than N nodes
has them first; the rest are padding (parent 0, token 0) and have no effect.

A dynamic tree grows level by level. Its candidates are numbered 1, 2, ... in the order of creation,
and 0 is the root. The first level has k candidates, each later one k * k. The k best of a level are
the frontier that the next level expands. The best N - 1 of all candidates are kept. A child's
weight is never above its parent's and the sort is stable, so the kept candidates always form a
tree, and ascending numbers put parents before children.

Source: EAGLE-2, Li et al. 2024, arXiv:2406.16858.
"""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Bool, Float, Int


@dataclass(frozen=True)
class TreeShape:
    """Sizes shared by all draft trees of a step; they select the compiled program.

    Attributes:
      nodes: N, nodes of a request's tree, including the root.
      depth: S, levels below the root.
      width: k, nodes that a level expands, and children of each.
      rows: R, flat verify rows of the whole batch (the verify budget).
      block: Positions past the length that a block drafter writes, if they may exceed the nodes of
        the tree; else 0. Required for a tree over a block, which `shared.spec.best_prefixes` grows.
      grown: Shape of the drafter's own tree if n-gram drafts are merged into it (plain if there is
        no drafter). N and S are then those of the merged tree, and k is the drafter's, or 1. None
        without merging.
      copied: M, nodes of the trees of n-gram drafts; see `shared.spec.merge_drafts`.

    Raises:
      ValueError: No tree has this shape, or there is no verify row.
    """

    nodes: int
    depth: int
    width: int
    rows: int
    block: int = 0
    grown: "TreeShape | None" = None
    copied: int = 0

    def __post_init__(self) -> None:
        if min(self.depth, self.width) < 0 or (self.depth == 0) != (self.width == 0):
            raise ValueError(f"depth and width must both be 0 or both be positive, got {self}")
        if not self.depth < self.nodes <= 1 + self.num_candidates:
            raise ValueError(
                f"nodes must be above depth and at most {1 + self.num_candidates}, got {self}"
            )
        if self.rows < 1:
            raise ValueError(f"rows must be positive, got {self}")
        if (self.grown is None) != (self.copied == 0):
            raise ValueError(f"grown and copied must be given together, got {self}")
        if self.grown is not None and (
            self.grown.width not in (0, self.width)
            or self.grown.depth > self.depth
            or self.grown.nodes > self.nodes
        ):
            raise ValueError(f"a merged tree must contain the drafter's tree, got {self}")

    @classmethod
    def chain(cls, depth: int, batch: int) -> "TreeShape":
        """Returns the shape of a chain of `depth` draft tokens, with verify rows for `batch`
        requests.
        """
        return cls(depth + 1, depth, min(depth, 1), batch * (depth + 1))

    @classmethod
    def plain(cls, batch: int) -> "TreeShape":
        """Returns the shape of plain decoding: the root alone."""
        return cls.chain(0, batch)

    @property
    def tree(self) -> tuple[int, int, int]:
        """Sizes of one request's tree, independent of the batch: nodes, depth and width."""
        return self.nodes, self.depth, self.width

    @property
    def drafter(self) -> "TreeShape":
        """Shape of the drafter's own tree.

        Merged draft tokens compete for verify rows, so their weights are computed (`rows` is 1).
        """
        return self if self.grown is None else replace(self.grown, rows=1)

    @property
    def num_candidates(self) -> int:
        """Number of candidates before the best are kept: k + (S - 1) k^2 of a dynamic tree, and all
        prefixes of a tree over a block.
        """
        if self.grown is not None:
            return self.grown.nodes - 1 + self.copied
        if self.block:
            return sum(self.width**level for level in range(1, self.depth + 1))
        return self.width + max(self.depth - 1, 0) * self.width**2

    @property
    def is_plain(self) -> bool:
        """True without draft tokens."""
        return self.nodes == 1

    def shares_rows(self, batch: int) -> bool:
        """Returns True if a batch has fewer verify rows than nodes; see `verify_rows`."""
        return self.rows < batch * self.nodes

    @property
    def max_tokens(self) -> int:
        """W, the maximum number of tokens that a step adds to a request."""
        return self.depth + 1

    @property
    def scratch(self) -> int:
        """Positions past the length that a step may write, in the target's or the draft KV."""
        if self.grown is not None:
            return max(self.nodes, self.grown.scratch)
        if self.block:
            return max(self.nodes, self.block)
        return max(self.nodes, self.width * (self.depth - 1) + 1)


def depths(parents: Int[np.ndarray, "B N"]) -> Int[np.ndarray, "B N"]:
    """Returns the distance of each node from the root; a padding node counts as a child of the
    root.
    """
    depth = np.zeros_like(parents)
    rows = np.arange(len(parents))
    for node in range(1, parents.shape[1]):
        depth[:, node] = depth[rows, parents[:, node]] + 1
    return depth


def ancestors(parents: Int[np.ndarray, "B N"]) -> Bool[np.ndarray, "B N N"]:
    """Returns the tree attention mask: entry [b, i, j] is True if j is i or an ancestor of i."""
    B, N = parents.shape
    is_ancestor = np.zeros((B, N, N), bool)
    is_ancestor[:, 0, 0] = True
    for node in range(1, N):
        is_ancestor[:, node] = is_ancestor[np.arange(B), parents[:, node]]
        is_ancestor[:, node, node] = True
    return is_ancestor


def best(weights: Float[np.ndarray, "B C"], count: int) -> Int[np.ndarray, "B count"]:
    """Returns the indices of the `count` largest weights, best first; ties go to the lower
    index.
    """
    return np.argsort(-weights, axis=1, kind="stable")[:, :count].astype(np.int32)


def children(
    frontier_numbers: Int[np.ndarray, "B k"],
    frontier_weights: Float[np.ndarray, "B k"],
    edge_weights: Float[np.ndarray, "B k k"],
) -> tuple[Int[np.ndarray, "B kk"], Float[np.ndarray, "B kk"]]:
    """Returns the parent numbers and path weights of one level's candidates.

    Args:
      frontier_numbers: Candidate numbers of the expanded nodes.
      frontier_weights: Their path weights: sums of log probabilities, at most 0.
      edge_weights: Log weights of the k children of each, best first, at most 0.

    Returns:
      For each of the k * k candidates, ordered by frontier node: the number of its parent, and its
      path weight.
    """
    B, k = frontier_numbers.shape
    weights = frontier_weights[:, :, None] + edge_weights
    return np.repeat(frontier_numbers, k, axis=1), weights.reshape(B, k * k)


def next_frontier(
    tokens: Int[np.ndarray, "B kk"],
    weights: Float[np.ndarray, "B kk"],
    first_number: int,
    width: int,
) -> tuple[
    Int[np.ndarray, "B k"],
    Float[np.ndarray, "B k"],
    Int[np.ndarray, "B k"],
    Int[np.ndarray, "B k"],
]:
    """Selects the `width` best of a level's k * k candidates.

    Args:
      tokens, weights: Candidates of the level, ordered by frontier node.
      first_number: Number of the first candidate; level s (from 1) starts at 1 + k + (s - 2) k^2.
      width: k.

    Returns:
      Token, path weight and candidate number of each node of the new frontier, best first, and the
      index of its parent in the old frontier.
    """
    chosen = best(weights, width)
    return (
        np.take_along_axis(tokens, chosen, axis=1),
        np.take_along_axis(weights, chosen, axis=1),
        first_number + chosen,
        chosen // width,
    )


@dataclass(frozen=True)
class Level:
    """Frontier of the next expansion.

    Attributes:
      tokens, weights: Token and path weight of each node.
      parents: Row of each node's parent in the previous expansion; in the first level, the request.
      numbers: Candidate numbers.
      paths: Draft tokens from below the root to the node itself, then padding.
      sees: Rows of the drafting window visible to each node, its own included.
    """

    tokens: Int[np.ndarray, "B k"]
    weights: Float[np.ndarray, "B k"]
    parents: Int[np.ndarray, "B k"]
    numbers: Int[np.ndarray, "B k"]
    paths: Int[np.ndarray, "B k path"]
    sees: Bool[np.ndarray, "B k window"]


def next_level(
    level: Level,
    tokens: Int[np.ndarray, "B k k"],
    edges: Float[np.ndarray, "B k k"],
    s: int,
    root_rows: int,
) -> tuple[Int[np.ndarray, "B kk"], Float[np.ndarray, "B kk"], Level]:
    """Processes the result of expansion `s` (from 1) and selects its k best nodes.

    Args:
      level: The expanded frontier.
      tokens, edges: The k children of each of its nodes, best first, and the log weights of their
        edges.
      s: Number of the expansion.
      root_rows: Rows of the window that belong to the root; those of expansion s begin `(s - 1) k`
        after them.

    Returns:
      The results of `children`, and the next frontier.
    """
    B, k = level.tokens.shape
    parents, weights = children(level.numbers, level.weights, edges)
    chosen, best_weights, numbers, parent = next_frontier(
        tokens.reshape(B, k * k), weights, 1 + k + (s - 1) * k * k, k
    )
    rows = np.arange(B)[:, None]
    is_self = np.arange(level.sees.shape[2]) == root_rows + s * k + np.arange(k)[:, None]
    following = Level(
        tokens=chosen,
        weights=best_weights,
        parents=rows * k + parent,
        numbers=numbers,
        paths=np.concatenate([level.paths[rows, parent][:, :, :s], chosen[:, :, None]], axis=2),
        sees=level.sees[rows, parent] | is_self,
    )
    return parents, weights, following


def keep_best(
    newest: Int[np.ndarray, " B"],
    tokens: Int[np.ndarray, "B C"],
    weights: Float[np.ndarray, "B C"],
    parents: Int[np.ndarray, "B C"],
    max_drafts: Int[np.ndarray, " B"],
    has_relay: Bool[np.ndarray, " B"],
    nodes: int,
) -> tuple[
    Int[np.ndarray, "B N"],
    Int[np.ndarray, "B N"],
    Int[np.ndarray, " B"],
    Float[np.ndarray, "B N"],
]:
    """Builds each request's tree from its best candidates.

    Args:
      newest: Token of the root.
      tokens, weights, parents: All candidates from number 1 on: token, path weight, parent's
        number.
      max_drafts: Maximum number of nodes per request, without the root.
      has_relay: True if the candidates are valid; other requests get their root only.
      nodes: N.

    Returns:
      Tokens and parents of the nodes, the number of real nodes, and their path weights (0 for the
      root and padding).
    """
    B, C = tokens.shape
    num_drafts = np.where(has_relay, np.clip(max_drafts, 0, min(nodes - 1, C)), 0)
    ranked = best(weights, C)
    kept = np.zeros((B, C), bool)
    np.put_along_axis(kept, ranked, np.arange(C)[None, :] < num_drafts[:, None], axis=1)
    node_of = np.concatenate([np.zeros((B, 1), int), np.cumsum(kept, axis=1)], axis=1)  # by number
    order = np.argsort(~kept, axis=1, kind="stable")[:, : nodes - 1]  # the kept, ascending
    is_real = np.arange(nodes - 1)[None, :] < num_drafts[:, None]
    kept_tokens = np.where(is_real, np.take_along_axis(tokens, order, axis=1), 0)
    kept_parents = np.take_along_axis(parents, order, axis=1)
    kept_parents = np.where(is_real, np.take_along_axis(node_of, kept_parents, axis=1), 0)
    kept_weights = np.where(is_real, np.take_along_axis(weights, order, axis=1), np.float32(0))
    return (
        np.concatenate([newest[:, None], kept_tokens], axis=1).astype(np.int32),
        np.concatenate([np.zeros((B, 1), int), kept_parents], axis=1).astype(np.int32),
        (1 + num_drafts).astype(np.int32),
        np.pad(kept_weights, ((0, 0), (1, 0))),
    )


def chains(
    drafts: Int[np.ndarray, "B S"],
    newest: Int[np.ndarray, " B"],
    max_drafts: Int[np.ndarray, " B"],
    can_draft: Bool[np.ndarray, " B"],
) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
    """Builds a chain of the first `max_drafts` draft tokens below each root; only the root if
    `can_draft` is False.
    """
    S = drafts.shape[1]
    num_drafts = np.where(can_draft, np.clip(max_drafts, 0, S), 0)
    is_real = np.arange(S) < num_drafts[:, None]
    parents = np.where(is_real, np.arange(S), 0)
    return (
        np.concatenate([newest[:, None], np.where(is_real, drafts, 0)], axis=1).astype(np.int32),
        np.concatenate([np.zeros_like(parents[:, :1]), parents], axis=1).astype(np.int32),
        (1 + num_drafts).astype(np.int32),
    )


def flatten(
    num_nodes: Int[np.ndarray, " B"], rows: int
) -> tuple[
    Int[np.ndarray, " B+1"], Int[np.ndarray, " R"], Int[np.ndarray, " R"], Bool[np.ndarray, " R"]
]:
    """Concatenates the real nodes of all requests into R verify rows.

    Args:
      num_nodes: Real nodes of each request; their sum is at most `rows`.
      rows: R.

    Returns:
      `row_starts` [B + 1], the running sum of `num_nodes`; the request and the node of each row;
      and True for real rows. Padding rows return request 0 and node 0, and the caller must redirect
      their writes to reserved entries.
    """
    row_starts = np.concatenate([[0], np.cumsum(num_nodes)]).astype(np.int32)
    row = np.arange(rows)
    is_real = row < row_starts[-1]
    request = np.where(is_real, np.searchsorted(row_starts[1:], row, side="right"), 0)
    node = np.where(is_real, row - row_starts[request], 0)
    return row_starts, request.astype(np.int32), node.astype(np.int32), is_real


def flat_rows(
    row_starts: Int[np.ndarray, " starts"], num_nodes: Int[np.ndarray, " B"], nodes: int
) -> Int[np.ndarray, "B N"]:
    """Returns the flat row of each node; a padding node returns its request's root."""
    node = np.arange(nodes)[None, :]
    return row_starts[:-1, None] + np.where(node < num_nodes[:, None], node, 0).astype(np.int32)
