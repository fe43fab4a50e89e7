"""Which drafts of a batch are verified where there are fewer verify rows than nodes.

Every request's root has a row; the best drafts of the whole batch have the others. How good a
draft is, its rank weight says: the path weight that its drafter gave it, and what the host has seen
of the request. By the match rule the text is the same whichever are verified, so neighbours change
a request's speed and nothing else. A rule that judges sampled drafts would lose its law: whether a
draft is verified would depend on the token that was drawn.
"""

import numpy as np
from jaxtyping import Float, Int

from shared.spec import draft_tree


def chain_weights(edges: Float[np.ndarray, "B S"]) -> Float[np.ndarray, "B N"]:
    """The path weights of a chain's nodes, 0 of the root, from the log weights of its edges.

    They are added in the order of the path, as those of a tree's levels are.
    """
    return np.pad(np.cumsum(edges, axis=1, dtype=np.float32), ((0, 0), (1, 0)))


def rank_weights(
    parents: Int[np.ndarray, "B N"],
    weights: Float[np.ndarray, "B N"],
    calibration: Float[np.ndarray, "B S_max"],
) -> Float[np.ndarray, "B N"]:
    """How likely each node is accepted, as a logarithm, by which nodes of a batch compare.

    A path cannot be accepted further than a part of it: a node's is at most its parent's, whatever
    the calibration of their depths is, so the best nodes of a batch are trees. A weight that is no
    number is minus infinity: a row that failed must not take its neighbours' verify rows.

    Args:
      weights: Path weights as of `draft_tree.keep_best`, at most 0; of padding anything.
      calibration: See `shared.spec.sampling.Sampling`.

    Returns:
      0 at the roots, below them at most 0; of padding anything.
    """
    rows, depths = np.arange(len(parents)), draft_tree.depths(parents)
    least = np.zeros_like(weights)
    for node in range(1, parents.shape[1]):
        node_weights = weights[:, node] + calibration[rows, depths[:, node] - 1]
        at_most = np.minimum(node_weights, least[rows, parents[:, node]])
        least[:, node] = np.where(node_weights > -np.inf, at_most, np.float32(-np.inf))
    return least


def share(
    tokens: Int[np.ndarray, "B N"],
    parents: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    rank_weights: Float[np.ndarray, "B N"],
    rows: int,
) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
    """Cuts the trees of a batch to what its verify rows hold.

    Args:
      tokens, parents, num_nodes: The trees that were drafted.
      rank_weights: See above; of equals the first request's goes first, and in it the first node.
      rows: Verify rows of all trees, at least one each.

    Returns:
      The nodes that stay, in their order: tokens, parents, and how many there are.
    """
    (B, N), node = tokens.shape, np.arange(tokens.shape[1])
    drafts = np.flatnonzero((node > 0) & (node < num_nodes[:, None]))
    order = np.argsort(-rank_weights.reshape(-1)[drafts], kind="stable")
    kept = np.tile(node == 0, (B, 1))
    kept.reshape(-1)[drafts[order[: rows - B]]] = True
    place_of = np.cumsum(kept, axis=1) - 1
    shared = np.zeros((2, B, N), np.int32)
    request, old = np.nonzero(kept)
    new = place_of[request, old]
    shared[0, request, new] = tokens[request, old]
    shared[1, request, new] = place_of[request, parents[request, old]]
    return shared[0], shared[1], kept.sum(axis=1).astype(np.int32)
