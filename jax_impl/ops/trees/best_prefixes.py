"""Best prefixes: the draft tree of a block head; same as `shared.spec.best_prefixes`.

On a GPU a kernel grows the tree of each request; see `jax_impl.ops`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from jax_impl.ops import Kernels, kernel_or_reference
from jax_impl.ops.trees.draft_tree import Kept

NONE = -jnp.inf


def plain_grow(
    newest: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B S P K"],
    edges: Float[jax.Array, "B S P K"],
    lists: Int[jax.Array, "B S P K"] | None,
    branch_calibration: Float[jax.Array, "B S_max"],
    max_drafts: Int[jax.Array, " B"],
    can_draft: Bool[jax.Array, " B"],
    nodes: int,
) -> Kept:
    """Same as the specification; open prefixes are lanes."""
    B, S, P, K = edges.shape
    flat = jnp.where(edges > NONE, edges, NONE).reshape(B, -1)
    row, last = jnp.arange(B), S * P * K - 1
    none = jnp.zeros((B, nodes), jnp.int32)
    key = jnp.full((B, nodes), NONE, flat.dtype).at[:, 0].set(flat[:, 0])
    above, weights = jnp.zeros_like(key), jnp.zeros_like(key)

    def edge_weight(slot: Int[jax.Array, " B"], is_off: Bool[jax.Array, " B"]) -> jax.Array:
        slot = jnp.minimum(slot, last)
        return flat[row, slot] + jnp.where(is_off, branch_calibration[row, slot // (P * K)], 0)

    def pop(node: jax.Array, carry: tuple) -> tuple:
        key, above, parent, slot, is_off, number, slots, parents, weights = carry
        weight = key.max(axis=1)
        at = jnp.where(key == weight[:, None], number, 2 * nodes).argmin(axis=1)
        is_open, of, base, own = weight > NONE, parent[row, at], above[row, at], slot[row, at]
        own_off = is_off[row, at]
        child_off = own_off | (own % K > 0)
        slots, parents = slots.at[:, node].set(own), parents.at[:, node].set(of)
        weights = weights.at[:, node].set(weight)
        beside, begin = own + 1, (own // (P * K) + 1) * (P * K)
        if lists is not None:
            begin += K * lists.reshape(B, -1)[row, own]
        sibling = base + edge_weight(beside, own_off)
        child = weight + edge_weight(begin, child_off)
        key = key.at[row, at].set(jnp.where(is_open & (beside % K > 0), sibling, NONE))
        key = key.at[:, node].set(jnp.where(is_open & (begin <= last), child, NONE))
        slot = slot.at[row, at].set(beside).at[:, node].set(begin)
        number = number.at[row, at].set(2 * node - 1).at[:, node].set(2 * node)
        parent, above = parent.at[:, node].set(node), above.at[:, node].set(weight)
        is_off = is_off.at[:, node].set(child_off)
        return key, above, parent, slot, is_off, number, slots, parents, weights

    begun = (key, above, none, none, none > 0, none, none, none, weights)
    *_, slots, parents, weights = lax.fori_loop(1, nodes, pop, begun)
    count = jnp.where(can_draft, jnp.clip(max_drafts, 0, nodes - 1), 0)
    node = jnp.arange(nodes, dtype=jnp.int32)
    is_real = (node > 0) & (node <= count[:, None]) & (weights > NONE)
    found = jnp.take_along_axis(tokens.reshape(B, -1), slots, axis=1)
    return (
        jnp.where(is_real, found, 0).at[:, 0].set(newest),
        jnp.where(is_real, parents, 0),
        1 + is_real.sum(axis=1, dtype=jnp.int32),
        jnp.where(is_real, weights, 0),
    )


def kernel_grow(
    kernels: Kernels,
    newest: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B S P K"],
    edges: Float[jax.Array, "B S P K"],
    lists: Int[jax.Array, "B S P K"] | None,
    branch_calibration: Float[jax.Array, "B S_max"],
    max_drafts: Int[jax.Array, " B"],
    can_draft: Bool[jax.Array, " B"],
    nodes: int,
) -> Kept:
    return kernels.best_prefixes.grow(
        newest, tokens, edges, lists, branch_calibration, max_drafts, can_draft, nodes
    )


grow = kernel_or_reference(kernel_grow, plain_grow)
