"""Merging of draft trees: adds n-gram drafts from the host to the tree of a model-based drafter.

The plan contains a tree of n-gram drafts for each request, built from the tokens known when the
step was planned. Steps were in flight then, so the request has grown since. The n-gram drafts are
*aligned* on the device: of the nodes at the newest token's position, the first with the same token
becomes the root, and the nodes below it are draft tokens. Tokens between the two positions are not
compared, so alignment survives a substituted token.

A node whose path from the root has the tokens of a drafted node is merged with it, so siblings have
different tokens. A merged node has the higher probability of its two sources. Below it, each source
continues from the other source's probability if that is higher. With exact-match acceptance the
output does not depend on n-gram drafts. Rejection sampling is not supported, as in
`shared.spec.verify_budget`: the selection of verified nodes depends on the sampled draft tokens.

Candidates are numbered as in `shared.spec.draft_tree`: first the drafted nodes, then the n-gram
nodes. A parent comes before its children and is at least as likely.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from shared.spec import draft_tree, verify_budget


@dataclass(frozen=True)
class NgramTrees:
    """Trees of n-gram drafts.

    Attributes:
      tokens, parents, num_nodes: The trees; node 0 is the last token known to the host.
      weights: Log probability that the output continues up to each node; finite and at most the
        parent's.
      at: Position of node 0.
    """

    tokens: Int[np.ndarray, "B M"]
    parents: Int[np.ndarray, "B M"]
    num_nodes: Int[np.ndarray, " B"]
    weights: Float[np.ndarray, "B M"]
    at: Int[np.ndarray, " B"]


@dataclass(frozen=True)
class DraftedTrees:
    """Trees of a model-based drafter; for `weights` see `verify_budget.log_acceptance`."""

    tokens: Int[np.ndarray, "B D"]
    parents: Int[np.ndarray, "B D"]
    num_nodes: Int[np.ndarray, " B"]
    weights: Float[np.ndarray, "B D"]


@dataclass(frozen=True)
class MergedTrees:
    """Merged trees of drafted and n-gram nodes.

    Attributes:
      tokens, parents, num_nodes: The trees.
      drafted: True for nodes of the drafter; False for roots.
      copied: Index of each node in the n-gram tree; 0 if it is not in it.
    """

    tokens: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    num_nodes: Int[np.ndarray, " B"]
    drafted: Bool[np.ndarray, "B N"]
    copied: Int[np.ndarray, "B N"]


def align_to_newest(
    copies: NgramTrees, newest: Int[np.ndarray, " B"], lengths: Int[np.ndarray, " B"]
) -> Int[np.ndarray, " B"]:
    """Returns the node of each n-gram tree that corresponds to the newest token.

    Args:
      copies: Trees of n-gram drafts.
      newest, lengths: Newest token of each request, and its position.

    Returns:
      The first node at that position with that token. Node 0 matches its own position whatever its
      token. M, the number of nodes, for a tree without such a node.
    """
    M = copies.tokens.shape[1]
    ahead, depths = lengths - copies.at, draft_tree.depths(copies.parents)
    is_match = (depths == ahead[:, None]) & (np.arange(M) < copies.num_nodes[:, None])
    is_match &= (copies.tokens == newest[:, None]) | (np.arange(M) == 0)
    return np.where(is_match.any(axis=1), is_match.argmax(axis=1), M).astype(np.int32)


def merge(
    grown: DraftedTrees,
    copies: NgramTrees,
    lengths: Int[np.ndarray, " B"],
    max_drafts: Int[np.ndarray, " B"],
    nodes: int,
    depth: int,
    rows: int,
) -> MergedTrees:
    """Merges n-gram drafts into the drafted trees and selects the best nodes of both.

    Args:
      grown: Drafted trees; node 0 is the newest token. Nodes of weight minus infinity are ignored.
      copies: N-gram drafts of the same requests.
      lengths: Positions of the newest tokens.
      max_drafts: Maximum number of nodes per request, without the root.
      nodes: N, maximum nodes of a tree.
      depth: Maximum depth of n-gram nodes below the root.
      rows: Verify budget of all trees, see `verify_budget.prune_to_budget`.
    """
    B, D = grown.tokens.shape
    M = copies.tokens.shape[1]
    roots = align_to_newest(copies, grown.tokens[:, 0], lengths)
    tokens, parents = np.zeros((2, B, D + M), np.int32)  # by candidate number; 0 is the root
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
    best, best_parents, num_best, best_weights = draft_tree.keep_best(
        np.zeros(B, np.int32), numbers, weights[:, 1:], parents[:, 1:], most, most > 0, nodes
    )
    chosen, joined_parents, num_nodes = verify_budget.prune_to_budget(
        best, best_parents, num_best, best_weights, rows
    )
    at = np.arange(B)[:, None], chosen
    is_draft = chosen > 0
    return MergedTrees(
        tokens=np.where(is_draft | (np.arange(nodes) == 0), tokens[at], 0).astype(np.int32),
        parents=joined_parents,
        num_nodes=num_nodes,
        drafted=is_draft & drafted[at],
        copied=np.where(is_draft, copied[at], 0).astype(np.int32),
    )


def _numbers(
    grown: DraftedTrees,
    copies: NgramTrees,
    drafted: Bool[np.ndarray, " D"],
    b: int,
    root: int,
    depth: int,
) -> dict[int, int]:
    """Returns the candidate number of each n-gram node at or below the aligned one, down to `depth`
    levels.
    """
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
    grown: DraftedTrees,
    copies: NgramTrees,
    drafted: Bool[np.ndarray, " numbers"],
    copied: Int[np.ndarray, " numbers"],
    parents: Int[np.ndarray, " numbers"],
    b: int,
    root: int,
) -> Float[np.ndarray, " numbers"]:
    """Returns the weight of each candidate; minus infinity for none.

    A source's weight is raised by the largest excess of the other source's weight at a merged node
    on the path.
    """
    weights = np.full(len(parents), -np.inf, np.float32)
    by_drafter, by_copies = np.zeros((2, len(parents)), np.float32)  # increase at each node
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
