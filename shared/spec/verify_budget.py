"""Verify budget: selection of the draft nodes to verify if a batch has more nodes than verify rows.

Every request's root has a row; the best draft nodes of the whole batch share the others. A node's
rank weight combines the path weight from its drafter with the calibration that the host has
measured for the request. With exact-match acceptance the output does not depend on the selection,
so other requests affect only a request's speed. Rejection sampling is not supported: the selection
would depend on the sampled draft tokens and would change the output distribution.
"""

import numpy as np
from jaxtyping import Float, Int

from shared.spec import draft_tree


def chain_weights(edges: Float[np.ndarray, "B S"]) -> Float[np.ndarray, "B N"]:
    """Returns the path weights of a chain's nodes (0 for the root) from the log weights of its
    edges.

    They are accumulated in the order of the path, like those of a tree's levels.
    """
    return np.pad(np.cumsum(edges, axis=1, dtype=np.float32), ((0, 0), (1, 0)))


def log_acceptance(
    parents: Int[np.ndarray, "B N"],
    weights: Float[np.ndarray, "B N"],
    calibration: Float[np.ndarray, "B S_max"],
) -> Float[np.ndarray, "B N"]:
    """Returns the log of each node's estimated acceptance probability, which orders the nodes of a
    batch.

    A node's weight is at most its parent's, whatever the calibration of their depths, so the best
    nodes of a batch always form trees. A NaN weight becomes minus infinity, so that a failed row
    does not take verify rows from others.

    Args:
      parents: The trees.
      weights: Path weights from `draft_tree.keep_best`, at most 0; arbitrary for padding.
      calibration: See `shared.spec.sampling.Sampling`.

    Returns:
      0 for roots, at most 0 below them; arbitrary for padding.
    """
    rows, depths = np.arange(len(parents)), draft_tree.depths(parents)
    least = np.zeros_like(weights)
    for node in range(1, parents.shape[1]):
        node_weights = weights[:, node] + calibration[rows, depths[:, node] - 1]
        at_most = np.minimum(node_weights, least[rows, parents[:, node]])
        least[:, node] = np.where(node_weights > -np.inf, at_most, np.float32(-np.inf))
    return least


def prune_to_budget(
    tokens: Int[np.ndarray, "B N"],
    parents: Int[np.ndarray, "B N"],
    num_nodes: Int[np.ndarray, " B"],
    rank_weights: Float[np.ndarray, "B N"],
    rows: int,
) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
    """Prunes the trees of a batch to its verify budget.

    Args:
      tokens, parents, num_nodes: The drafted trees.
      rank_weights: Result of `log_acceptance`; ties go to the first request, then to the first
        node.
      rows: Verify rows of all trees, at least one per tree.

    Returns:
      The remaining nodes in their order: tokens, parents, and their number.
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
