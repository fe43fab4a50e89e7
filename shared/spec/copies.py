"""Drafts from two sources in one tree: what a drafter grew, joined with copies of seen text.

The host brings, with its plan, a tree of copies for each request: how the text may go on, as far as
it was known when the step was planned. Steps were in flight then, so the text has gone on since.
The copies are *aligned* on the device: of the copies that stand where the newest token stands, the
first that carries the same token takes its place, and what lies below it are drafts. Nothing is
asked of the tokens between, so a copy goes on behind a word that was replaced by another.

A copy whose path from the root has the tokens of a drafted node is that node, and so siblings carry
different tokens. A node is as likely as the likelier of its sources says. Below a node that both
have, either source goes on from what the other says of it. By the match rule the text is the same
whatever the copies are. A rule that judges sampled drafts would lose its law, as in
`shared.spec.verify_rows`: which copies are verified depends on the tokens that were drawn.

Candidates are numbered as those of `shared.spec.draft_tree`: first the drafted nodes, then the
copies. A parent comes before its children and is at least as likely.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from shared.spec import draft_tree, verify_rows


@dataclass(frozen=True)
class Copies:
    """Trees of seen text.

    Attributes:
      tokens, parents, num_nodes: The trees; node 0 stands for the last token that was known.
      weights: For each node the logarithm of the probability that the text goes on as far as it,
        finite and at most its parent's.
      at: The position of node 0.
    """

    tokens: Int[np.ndarray, "B M"]
    parents: Int[np.ndarray, "B M"]
    num_nodes: Int[np.ndarray, " B"]
    weights: Float[np.ndarray, "B M"]
    at: Int[np.ndarray, " B"]


@dataclass(frozen=True)
class Grown:
    """The trees that a drafter grew; `weights` as of `verify_rows.rank_weights`."""

    tokens: Int[np.ndarray, "B D"]
    parents: Int[np.ndarray, "B D"]
    num_nodes: Int[np.ndarray, " B"]
    weights: Float[np.ndarray, "B D"]


@dataclass(frozen=True)
class Joined:
    """Trees of drafted and copied nodes.

    Attributes:
      tokens, parents, num_nodes: The trees.
      drafted: Which nodes the drafter grew; none of the roots.
      copied: Which node of the copies each is; 0 of one that is none.
    """

    tokens: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    num_nodes: Int[np.ndarray, " B"]
    drafted: Bool[np.ndarray, "B N"]
    copied: Int[np.ndarray, "B N"]


def aligned(
    copies: Copies, newest: Int[np.ndarray, " B"], lengths: Int[np.ndarray, " B"]
) -> Int[np.ndarray, " B"]:
    """The node of each tree of copies that stands for the newest token.

    Args:
      newest, lengths: The newest token of each request, and its position.

    Returns:
      The first node at that position with that token; node 0 stands for its own position whatever
      it carries. Of a tree without such a node the number of its nodes, M.
    """
    M = copies.tokens.shape[1]
    ahead, depths = lengths - copies.at, draft_tree.depths(copies.parents)
    found = (depths == ahead[:, None]) & (np.arange(M) < copies.num_nodes[:, None])
    found &= (copies.tokens == newest[:, None]) | (np.arange(M) == 0)
    return np.where(found.any(axis=1), found.argmax(axis=1), M).astype(np.int32)


def join(
    grown: Grown,
    copies: Copies,
    lengths: Int[np.ndarray, " B"],
    max_drafts: Int[np.ndarray, " B"],
    nodes: int,
    depth: int,
    rows: int,
) -> Joined:
    """Joins copies with what was drafted, and keeps the best nodes of both.

    Args:
      grown: Node 0 carries the newest token; a node whose weight is minus infinity counts as not
        drafted.
      copies: Of the same requests.
      lengths: The positions of the newest tokens.
      max_drafts: Most nodes beside the root that a request may have.
      nodes: N, most nodes of a tree.
      depth: Levels below the root; no copy stands deeper.
      rows: Verify rows of all trees, shared as in `verify_rows.share`.
    """
    B, D = grown.tokens.shape
    M = copies.tokens.shape[1]
    roots = aligned(copies, grown.tokens[:, 0], lengths)
    tokens, parents = np.zeros((2, B, D + M), np.int32)  # by number; 0 is the root
    weights = np.full((B, D + M), -np.inf, np.float32)
    drafted, copied = np.zeros((B, D + M), bool), np.zeros((B, D + M), np.int32)
    tokens[:, :D], parents[:, :D] = grown.tokens, grown.parents
    tokens[:, D:] = copies.tokens
    for b in range(B):
        drafted[b, :D] = (np.arange(D) < grown.num_nodes[b]) & (grown.weights[b] > -np.inf)
        drafted[b, 0] = False
        number_of = _numbers(grown, copies, drafted[b, :D], b, int(roots[b]), depth)
        is_copy = [node for node in number_of if node != roots[b]]
        copied[b, [number_of[node] for node in is_copy]] = is_copy
        for node in is_copy:
            if number_of[node] >= D:
                parents[b, number_of[node]] = number_of[copies.parents[b, node]]
        weights[b] = _weights(grown, copies, drafted[b], copied[b], parents[b], b, int(roots[b]))
    is_candidate = np.isfinite(weights[:, 1:])
    most = np.minimum(max_drafts, is_candidate.sum(axis=1))
    numbers = np.tile(np.arange(1, D + M, dtype=np.int32), (B, 1))
    kept = draft_tree.keep_best(
        np.zeros(B, np.int32), numbers, weights[:, 1:], parents[:, 1:], most, most > 0, nodes
    )
    chosen, joined_parents, num_nodes = verify_rows.share(*kept, rows)
    at = np.arange(B)[:, None], chosen
    is_draft = chosen > 0
    return Joined(
        tokens=np.where(is_draft | (np.arange(nodes) == 0), tokens[at], 0).astype(np.int32),
        parents=joined_parents,
        num_nodes=num_nodes,
        drafted=is_draft & drafted[at],
        copied=np.where(is_draft, copied[at], 0).astype(np.int32),
    )


def _numbers(
    grown: Grown, copies: Copies, drafted: Bool[np.ndarray, " D"], b: int, root: int, depth: int
) -> dict[int, int]:
    """The candidate that each node at or below the aligned one is, at most `depth` levels down."""
    D, M = grown.tokens.shape[1], copies.tokens.shape[1]
    if root == M:
        return {}
    number_of, level_of = {root: 0}, {root: 0}
    for node in range(root + 1, int(copies.num_nodes[b])):
        parent = int(copies.parents[b, node])
        if parent not in number_of or level_of[parent] == depth:
            continue
        level_of[node] = level_of[parent] + 1
        same = drafted & (grown.parents[b] == number_of[parent])
        same &= grown.tokens[b] == copies.tokens[b, node]
        number_of[node] = int(same.argmax()) if same.any() else D + node
    return number_of


def _weights(
    grown: Grown,
    copies: Copies,
    drafted: Bool[np.ndarray, " numbers"],
    copied: Int[np.ndarray, " numbers"],
    parents: Int[np.ndarray, " numbers"],
    b: int,
    root: int,
) -> Float[np.ndarray, " numbers"]:
    """The weight of each candidate; minus infinity where there is none.

    A source's own weight is raised by the most that the other source's is above it at any node that
    both have, on the way there.
    """
    weights = np.full(len(parents), -np.inf, np.float32)
    by_drafter, by_copies = np.zeros((2, len(parents)), np.float32)  # the raise at each node
    for number in range(1, len(parents)):
        above, node = parents[number], copied[number]
        raised = [by_drafter[above], by_copies[above]]
        own_draft = grown.weights[b, number] if drafted[number] else None
        own_copy = copies.weights[b, node] - copies.weights[b, root] if node else None
        if own_draft is not None and own_copy is not None:
            raised[0] = max(raised[0], own_copy - own_draft)
            raised[1] = max(raised[1], own_draft - own_copy)
        by_drafter[number], by_copies[number] = raised
        if own_draft is not None:
            weights[number] = own_draft + raised[0]
        if own_copy is not None:
            weights[number] = max(weights[number], own_copy + raised[1])
    return weights
