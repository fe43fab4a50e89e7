"""Verify budget: allocates the verify rows of a batch to draft tokens (Pallas, Triton backend).

Draft tokens are ranked by counting the better ones, so no lane waits for another, as in a sort.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

_AT_ONCE = 64  # draft tokens compared per step


def log_acceptance(
    parents: Int[jax.Array, "B N"],
    weights: Float[jax.Array, "B N"],
    calibration: Float[jax.Array, "B S_max"],
    interpret: bool = False,
) -> Float[jax.Array, "B N"]:
    """Implements `shared.spec.verify_budget.log_acceptance`."""
    return pl.pallas_call(
        _rank_weights_kernel,
        grid=(len(parents),),
        out_shape=jax.ShapeDtypeStruct(weights.shape, jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="log_acceptance",
    )(parents, weights, calibration)


def _rank_weights_kernel(parents_ref, weights_ref, calibration_ref, min_ref):
    """One program per request; nodes are its lanes, and each climbs to the root twice."""
    request, nodes = pl.program_id(0), parents_ref.shape[1]
    node = lax.iota(jnp.int32, pl.next_power_of_2(nodes))
    start_node = jnp.where(node < nodes, node, 0)

    def is_below(carry):
        above, _, steps = carry
        return (jnp.max(above) > 0) & (steps < nodes)

    def climb(carry):
        above, depth, steps = carry
        depth += (above > 0).astype(jnp.int32)
        above = pltriton.load(parents_ref.at[request, above], mask=above > 0, other=0)
        return above, depth, steps + 1

    _, depth, _ = lax.while_loop(is_below, climb, (start_node, 0 * start_node, jnp.int32(0)))

    def is_on_path(carry):
        _, depth, _ = carry
        return jnp.max(depth) > 0

    def weigh(carry):
        above, depth, least = carry
        is_on, level = depth > 0, jnp.maximum(depth - 1, 0)
        weight = pltriton.load(weights_ref.at[request, above], mask=is_on, other=0.0)
        weight += pltriton.load(calibration_ref.at[request, level], mask=is_on, other=0.0)
        weight = jnp.where(weight > -jnp.inf, weight, -jnp.inf)
        least = jnp.where(is_on & (weight < least), weight, least)
        above = pltriton.load(parents_ref.at[request, above], mask=is_on, other=0)
        return above, depth - 1, least

    start = start_node, depth, jnp.zeros(start_node.shape, jnp.float32)
    *_, least = lax.while_loop(is_on_path, weigh, start)
    at = jnp.minimum(node, nodes)  # outside the array, for the interpreter
    pltriton.store(min_ref.at[request, at], least, mask=node < nodes)


def prune_to_budget(
    tokens: Int[jax.Array, "B N"],
    parents: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    rank_weights: Float[jax.Array, "B N"],
    rows: int,
    interpret: bool = False,
) -> tuple[Int[jax.Array, "B N"], Int[jax.Array, "B N"], Int[jax.Array, " B"]]:
    """Implements `shared.spec.verify_budget.prune_to_budget`."""
    B, N = tokens.shape
    outputs = pl.pallas_call(
        functools.partial(_prune_to_budget_kernel, budget=rows - B),
        grid=(B,),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((B, N), (B, N), (B,))],
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="prune_to_budget",
    )(tokens, parents, num_nodes, rank_weights)
    return tuple(outputs)


def _prune_to_budget_kernel(
    tokens_ref,
    parents_ref,
    num_nodes_ref,
    weights_ref,
    kept_tokens_ref,
    kept_parents_ref,
    kept_nodes_ref,
    *,
    budget,
):
    """One program per request; nodes are its lanes."""
    request, (requests, nodes) = pl.program_id(0), tokens_ref.shape
    node, count = lax.iota(jnp.int32, pl.next_power_of_2(nodes)), requests * nodes
    is_node, at = node < nodes, request * nodes + node
    held = jnp.minimum(node, nodes - 1)
    weight = pltriton.load(weights_ref.at[request, held], mask=is_node, other=0.0)

    def add(chunk, before):
        other = chunk * _AT_ONCE + lax.iota(jnp.int32, _AT_ONCE)
        is_in, of = other < count, jnp.minimum(other // nodes, requests - 1)
        other_weights = pltriton.load(weights_ref.at[of, other % nodes], mask=is_in, other=0.0)
        number = pltriton.load(num_nodes_ref.at[of], mask=is_in, other=0)
        is_draft = (other % nodes > 0) & (other % nodes < number)
        is_equal = (other_weights[None, :] == weight[:, None]) & (other[None, :] < at[:, None])
        is_before = (other_weights[None, :] > weight[:, None]) | is_equal
        return before + (is_before & is_draft[None, :]).astype(jnp.int32).sum(axis=1)

    before = lax.fori_loop(0, pl.cdiv(count, _AT_ONCE), add, 0 * node)
    is_draft = (node > 0) & (node < num_nodes_ref[request])
    keep = (is_draft & (before < budget)) | (node == 0)
    token = pltriton.load(tokens_ref.at[request, held], mask=keep, other=0)
    parent = pltriton.load(parents_ref.at[request, held], mask=keep, other=0)
    kept = keep.astype(jnp.int32).sum()
    is_rest = is_node & (node >= kept)
    # Lanes that store nothing get an index outside the array, which the interpreter requires.
    place = jnp.where(keep, _kept_before(keep, node, node), nodes)
    rest = jnp.where(is_rest, node, nodes)
    for ref, x in ((kept_tokens_ref, token), (kept_parents_ref, _kept_before(keep, node, parent))):
        pltriton.store(ref.at[request, place], x, mask=keep)
        pltriton.store(ref.at[request, rest], 0 * node, mask=is_rest)
    kept_nodes_ref[request] = kept


def _kept_before(keep, node, bound):
    """Counts the kept nodes before each bound."""
    return (keep[None, :] & (node[None, :] < bound[:, None])).astype(jnp.int32).sum(axis=1)
