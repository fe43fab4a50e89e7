"""Acceptance of draft tokens by exact match, one program per request (Pallas, Triton backend)."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Int


def follow(
    tokens: Int[jax.Array, "B N"],
    parents: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    choices: Int[jax.Array, "B N"],
    row_of: Int[jax.Array, "B N"],
    is_finite: Bool[jax.Array, " R"],
    is_row: Bool[jax.Array, " B"],
    depth: int,
    interpret: bool = False,
) -> tuple[
    Int[jax.Array, "B W"],
    Int[jax.Array, " B"],
    Int[jax.Array, "B W"],
    Bool[jax.Array, " B"],
    Int[jax.Array, "B W"],
]:
    """Implements `shared.spec.acceptance.follow`; returns its fields."""
    B = len(tokens)
    shapes = ((B, depth + 1), (B,), (B, depth + 1), (B,), (B, depth + 1))
    path, counts, emitted, failed, rows = pl.pallas_call(
        functools.partial(_follow_kernel, depth=depth),
        grid=(B,),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="accept_path",
    )(
        *(tokens, parents, num_nodes, choices, row_of),
        *(flags.astype(jnp.int8) for flags in (is_finite, is_row)),
    )
    return path, counts, emitted, failed != 0, rows


def _follow_kernel(
    tokens_ref,
    parents_ref,
    num_nodes_ref,
    choices_ref,
    row_of_ref,
    is_finite_ref,
    is_row_ref,
    path_ref,
    counts_ref,
    emitted_ref,
    failed_ref,
    rows_ref,
    *,
    depth,
):
    """One program per request; nodes are its lanes."""
    request, nodes = pl.program_id(0), tokens_ref.shape[1]
    lanes, ways = pl.next_power_of_2(nodes), pl.next_power_of_2(depth + 1)
    lane, step = lax.iota(jnp.int32, lanes), lax.iota(jnp.int32, ways)
    at, is_node = jnp.minimum(lane, nodes - 1), lane < nodes

    def load(ref, other):
        return pltriton.load(ref.at[request, at], mask=is_node, other=other)

    token, parent = load(tokens_ref, -1), load(parents_ref, -1)
    choice, row = load(choices_ref, 0), load(row_of_ref, 0)
    is_bad = pltriton.load(is_finite_ref.at[row], mask=is_node, other=1) == 0
    is_draft = (lane > 0) & (lane < num_nodes_ref[request]) & is_node

    def go(level, carry):
        node, count, num_bad, path, emitted, rows = carry
        has_arrived, is_step = lane == node, step == level
        wanted = jnp.sum(jnp.where(has_arrived, choice, 0))
        num_bad += jnp.sum((has_arrived & is_bad).astype(jnp.int32))
        path = jnp.where(is_step, node, path)
        emitted = jnp.where(is_step, wanted, emitted)
        rows = jnp.where(is_step, jnp.sum(jnp.where(has_arrived, row, 0)), rows)
        is_next = is_draft & (parent == node) & (token == wanted)
        following = jnp.min(jnp.where(is_next, lane, lanes))
        is_found = (following < lanes) & (level < depth)
        node = jnp.where(is_found, following, node)
        return node, count + is_found.astype(jnp.int32), num_bad, path, emitted, rows

    nothing = jnp.zeros((ways,), jnp.int32)
    start = (jnp.int32(0), jnp.int32(1), jnp.int32(0), nothing, nothing, nothing)
    _, count, num_bad, path, emitted, rows = lax.fori_loop(0, depth + 1, go, start)
    is_row = is_row_ref[request] != 0
    count = jnp.where(is_row & (num_bad == 0), count, 0)
    counts_ref[request] = count
    failed_ref[request] = (is_row & (num_bad > 0)).astype(jnp.int32)
    emitted = jnp.where(step < count, emitted, 0)
    is_way, at = step <= depth, jnp.minimum(step, depth)
    for ref, x in ((path_ref, path), (emitted_ref, emitted), (rows_ref, rows)):
        # Lanes that store nothing get an index outside the array, which the interpreter requires.
        pltriton.store(ref.at[request, jnp.where(is_way, at, depth + 1)], x, mask=is_way)
