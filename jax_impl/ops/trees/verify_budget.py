"""Verify budget: prunes the trees of a batch; same as `shared.spec.verify_budget`.

On a GPU both operations are kernels; see `jax_impl.ops`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.ops import Kernels, kernel_or_reference
from jax_impl.ops.trees import draft_tree


def chain_weights(edges: Float[jax.Array, "B S"]) -> Float[jax.Array, "B N"]:
    """Sums log edge weights to the path weights of a chain's nodes, root first."""
    sums = [jnp.zeros_like(edges[:, 0])]
    for place in range(edges.shape[1]):  # `cumsum` would add in another order
        sums.append(sums[-1] + edges[:, place])
    return jnp.stack(sums, axis=1)


def plain_log_acceptance(
    parents: Int[jax.Array, "B N"],
    weights: Float[jax.Array, "B N"],
    calibration: Float[jax.Array, "B S_max"],
) -> Float[jax.Array, "B N"]:
    """Estimates the log acceptance probability of each node, at most that of its parent."""
    ancestors = draft_tree.ancestors(parents)
    level = ancestors.sum(axis=2, dtype=jnp.int32) - 2  # calibration index, not read for the root
    node_weights = weights + jnp.take_along_axis(calibration, jnp.maximum(level, 0), axis=1)
    node_weights = jnp.where(node_weights > -jnp.inf, node_weights, -jnp.inf)
    is_above = ancestors & (jnp.arange(parents.shape[1]) > 0)
    return jnp.where(is_above, node_weights[:, None, :], 0).min(axis=2)


def kernel_log_acceptance(
    kernels: Kernels,
    parents: Int[jax.Array, "B N"],
    weights: Float[jax.Array, "B N"],
    calibration: Float[jax.Array, "B S_max"],
) -> Float[jax.Array, "B N"]:
    return kernels.verify_budget.log_acceptance(parents, weights, calibration)


log_acceptance = kernel_or_reference(kernel_log_acceptance, plain_log_acceptance)


def plain_prune_to_budget(
    tokens: Int[jax.Array, "B N"],
    parents: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    rank_weights: Float[jax.Array, "B N"],
    rows: int,
) -> tuple[Int[jax.Array, "B N"], Int[jax.Array, "B N"], Int[jax.Array, " B"]]:
    """Prunes the trees of a batch to its best drafts; returns tokens, parents and node counts."""
    (B, N), node = tokens.shape, jnp.arange(tokens.shape[1], dtype=jnp.int32)
    is_draft = (node > 0) & (node < num_nodes[:, None])
    weight, number = rank_weights.reshape(-1), jnp.arange(B * N, dtype=jnp.int32)
    is_before = (weight == weight[:, None]) & (number < number[:, None])
    is_before |= weight > weight[:, None]
    before = (is_before & is_draft.reshape(-1)).sum(axis=1, dtype=jnp.int32).reshape(B, N)
    kept = (is_draft & (before < rows - B)) | (node == 0)
    place_of = jnp.cumsum(kept, axis=1, dtype=jnp.int32) - 1
    is_at = kept[:, None, :] & (place_of[:, None, :] == node[:, None])  # by new and old place
    new_parents = jnp.take_along_axis(place_of, parents, axis=1)
    return (
        jnp.where(is_at, tokens[:, None, :], 0).sum(axis=2, dtype=jnp.int32),
        jnp.where(is_at, new_parents[:, None, :], 0).sum(axis=2, dtype=jnp.int32),
        kept.sum(axis=1, dtype=jnp.int32),
    )


def kernel_prune_to_budget(
    kernels: Kernels,
    tokens: Int[jax.Array, "B N"],
    parents: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    rank_weights: Float[jax.Array, "B N"],
    rows: int,
) -> tuple[Int[jax.Array, "B N"], Int[jax.Array, "B N"], Int[jax.Array, " B"]]:
    return kernels.verify_budget.prune_to_budget(tokens, parents, num_nodes, rank_weights, rows)


prune_to_budget = kernel_or_reference(kernel_prune_to_budget, plain_prune_to_budget)
