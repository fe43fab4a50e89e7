"""Best prefixes: grows the draft tree of a block head (Pallas, Triton backend).

Open prefixes are lanes of one warp, so a step is a few reductions over registers.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

NONE = float("-inf")


class Drafted(NamedTuple):
    """Candidates of the block, and the limits of each request."""

    newest: Any
    tokens: Any
    edges: Any
    lists: Any
    branch_calibration: Any
    max_drafts: Any
    can_draft: Any


class Grown(NamedTuple):
    """Trees."""

    tokens: Any
    parents: Any
    num_nodes: Any
    weights: Any


class PrefixSizes(NamedTuple):
    """N; S, P and K of the candidates."""

    nodes: int
    depth: int
    lists: int
    width: int


def grow(
    newest: Int[jax.Array, " B"],
    tokens: Int[jax.Array, "B S P K"],
    edges: Float[jax.Array, "B S P K"],
    lists: Int[jax.Array, "B S P K"] | None,
    branch_calibration: Float[jax.Array, "B S_max"],
    max_drafts: Int[jax.Array, " B"],
    can_draft: Bool[jax.Array, " B"],
    nodes: int,
    interpret: bool = False,
) -> tuple[
    Int[jax.Array, "B N"],
    Int[jax.Array, "B N"],
    Int[jax.Array, " B"],
    Float[jax.Array, "B N"],
]:
    """Implements `shared.spec.best_prefixes.grow`."""
    B, S, P, K = edges.shape
    of, node = jax.ShapeDtypeStruct, jax.ShapeDtypeStruct((B, nodes), jnp.int32)
    tokens = tokens.reshape(B, -1)
    (grown,) = pl.pallas_call(
        functools.partial(
            _grow_kernel,
            sizes=PrefixSizes(nodes=nodes, depth=S, lists=P, width=K),
            has_lists=lists is not None,
        ),
        grid=(B,),
        out_shape=(
            Grown(
                tokens=node,
                parents=node,
                num_nodes=of((B,), jnp.int32),
                weights=of((B, nodes), jnp.float32),
            ),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="best_prefixes",
    )(
        Drafted(
            newest=newest,
            tokens=tokens,
            edges=edges.reshape(B, -1),
            lists=tokens if lists is None else lists.reshape(B, -1),
            branch_calibration=branch_calibration,
            max_drafts=max_drafts,
            can_draft=can_draft.astype(jnp.int8),
        )
    )
    return grown.tokens, grown.parents, grown.num_nodes, grown.weights


def _grow_kernel(drafted, grown, *, sizes, has_lists):
    """One program per request; open prefixes are its lanes, and so are the nodes of the tree."""
    level, request = sizes.lists * sizes.width, pl.program_id(0)
    count, lane = sizes.depth * level, lax.iota(jnp.int32, pl.next_power_of_2(sizes.nodes))
    zeros, nothing = jnp.zeros(lane.shape, jnp.int32), jnp.zeros(lane.shape, jnp.float32)

    def weight_at(slot, above, off, is_any):
        """Computes the weight of a prefix from its parent's; minus infinity for none and NaN."""
        slot = jnp.minimum(slot, count - 1)
        known = drafted.branch_calibration.at[request, slot // level]
        known = pltriton.load(known, mask=is_any & (off > 0), other=0.0)
        edge = pltriton.load(drafted.edges.at[request, slot], mask=is_any, other=NONE)
        weight = above + (edge + known)
        return jnp.where(weight > NONE, weight, NONE)

    def pop(node, carry):
        key, above, parent, slot, off, number, slots, parents, weights = carry
        weight = jnp.max(key)
        is_open = weight > NONE
        is_best = (key == weight) & (key > NONE)
        is_at = is_best & (number == jnp.min(jnp.where(is_best, number, 2 * len(lane))))
        own = jnp.sum(jnp.where(is_at, slot, 0))
        of = jnp.sum(jnp.where(is_at, parent, 0))
        base = jnp.sum(jnp.where(is_at, above, 0.0))
        own_off = jnp.sum(jnp.where(is_at, off, 0))
        child_off = own_off | (own % sizes.width > 0).astype(jnp.int32)
        is_node = lane == node
        slots, parents = jnp.where(is_node, own, slots), jnp.where(is_node, of, parents)
        weights = jnp.where(is_node, weight, weights)
        beside, begin = own + 1, (own // level + 1) * level
        if has_lists:
            begin += sizes.width * pltriton.load(drafted.lists.at[request, own])
        sibling = weight_at(beside, base, own_off, is_open & (beside % sizes.width > 0))
        child = weight_at(begin, weight, child_off, is_open & (begin < count))
        key = jnp.where(is_node, child, jnp.where(is_at, sibling, key))
        slot = jnp.where(is_node, begin, jnp.where(is_at, beside, slot))
        off = jnp.where(is_node, child_off, off)
        number = jnp.where(is_node, 2 * node, jnp.where(is_at, 2 * node - 1, number))
        parent = jnp.where(is_node, node, parent)
        above = jnp.where(is_node, weight, above)
        return key, above, parent, slot, off, number, slots, parents, weights

    first = weight_at(jnp.int32(0), jnp.float32(0), jnp.int32(0), True)
    key = jnp.where(lane == 0, first, NONE)
    begun = (key, nothing, zeros, zeros, zeros, zeros, zeros, zeros, nothing)
    *_, slots, parents, weights = lax.fori_loop(1, sizes.nodes, pop, begun)
    most = jnp.clip(drafted.max_drafts[request], 0, sizes.nodes - 1)
    most = jnp.where(drafted.can_draft[request] != 0, most, 0)
    is_draft = (lane > 0) & (lane <= most) & (weights > NONE)
    token = pltriton.load(drafted.tokens.at[request, slots], mask=is_draft, other=0)
    token = jnp.where(lane == 0, drafted.newest[request], token)
    is_node, at = lane < sizes.nodes, jnp.minimum(lane, sizes.nodes)  # outside, for the interpreter
    pltriton.store(grown.tokens.at[request, at], token, mask=is_node)
    pltriton.store(grown.parents.at[request, at], jnp.where(is_draft, parents, 0), mask=is_node)
    pltriton.store(grown.weights.at[request, at], jnp.where(is_draft, weights, 0.0), mask=is_node)
    grown.num_nodes[request] = 1 + jnp.sum(is_draft.astype(jnp.int32))
