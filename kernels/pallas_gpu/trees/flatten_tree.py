"""Flattened draft trees: the nodes of all requests as consecutive rows (Pallas, Triton backend)."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Int

_PAIRS = 4096  # (row, request) pairs that a program compares


class Flat(NamedTuple):
    """Rows of flattened trees, consecutive per request; chains have no tree mask."""

    row_starts: Any
    request: Any
    node: Any
    is_real: Any
    positions: Any
    places: Any
    until: Any
    window: Any


def flat_nodes(
    parents: Int[jax.Array, "B N"],
    num_nodes: Int[jax.Array, " B"],
    lengths: Int[jax.Array, " B"],
    rows: int,
    is_chain: bool,
    interpret: bool = False,
) -> tuple[
    Int[jax.Array, " B1"],
    Int[jax.Array, " R"],
    Int[jax.Array, " R"],
    Bool[jax.Array, " R"],
    Int[jax.Array, " R"],
    Int[jax.Array, " R"],
    Int[jax.Array, " R"],
    Bool[jax.Array, "R seen"],
]:
    """Implements `shared.spec.attention.tree_rows`.

    Returns the first row of each request, and per row its request and node, whether it is valid,
    its position, its KV position and its visible range.
    """
    (B, N), lanes = parents.shape, pl.next_power_of_2(len(parents))
    block = max(1, min(32, _PAIRS // lanes))
    of = jax.ShapeDtypeStruct
    row = of((rows,), jnp.int32)
    (flat,) = pl.pallas_call(
        functools.partial(_flat_nodes_kernel, block=block),
        grid=(pl.cdiv(rows, block),),
        out_shape=(
            Flat(
                row_starts=of((B + 1,), jnp.int32),
                request=row,
                node=row,
                is_real=of((rows,), jnp.int8),
                positions=row,
                places=row,
                until=row,
                window=None if is_chain else of((rows, N), jnp.int8),
            ),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="flatten_tree",
    )(parents, num_nodes, lengths)
    sees = jnp.zeros((rows, 0), bool) if is_chain else flat.window.astype(bool)
    return tuple(flat._replace(is_real=flat.is_real.astype(bool), window=sees))


def _flat_nodes_kernel(parents_ref, num_nodes_ref, lengths_ref, flat, *, block):
    """One program per block of rows, which scans all requests."""
    (requests, nodes), rows = parents_ref.shape, flat.request.shape[0]
    lane = lax.iota(jnp.int32, pl.next_power_of_2(requests))
    row = pl.program_id(0) * block + lax.iota(jnp.int32, block)
    is_lane, is_row = lane < requests, row < rows
    at = num_nodes_ref.at[jnp.minimum(lane, requests - 1)]
    count = pltriton.load(at, mask=is_lane, other=0)
    ends = lax.cumsum(count, axis=0)

    @pl.when(pl.program_id(0) == 0)
    def _():
        flat.row_starts[0] = 0
        pltriton.store(flat.row_starts.at[jnp.minimum(1 + lane, requests + 1)], ends, mask=is_lane)

    is_before = (row[:, None] >= ends[None, :]) & is_lane[None, :]
    is_real = row < jnp.sum(count)
    request = jnp.where(is_real, is_before.astype(jnp.int32).sum(axis=1), 0)
    start = jnp.where(is_before, count[None, :], 0).sum(axis=1)
    node = jnp.where(is_real, row - start, 0)
    place = pltriton.load(lengths_ref.at[request]) + node
    at, depth, until = jnp.where(is_row, row, rows), node, place + 1  # outside: for the interpreter
    if flat.window is not None:
        column = lax.iota(jnp.int32, pl.next_power_of_2(nodes))

        def goes_on(carry):
            above, _, _, steps = carry
            return (jnp.max(above) > 0) & (steps < nodes)

        def climb(carry):
            above, seen, depth, steps = carry
            depth += (above > 0).astype(jnp.int32)
            above = pltriton.load(parents_ref.at[request, above], mask=above > 0, other=0)
            return above, seen | (above[:, None] == column[None, :]), depth, steps + 1

        start = node, node[:, None] == column[None, :], 0 * node, jnp.int32(0)
        _, seen, depth, _ = lax.while_loop(goes_on, climb, start)
        until = place - node
        keep = is_row[:, None] & (column < nodes)[None, :]
        seen_at = flat.window.at[at[:, None], jnp.minimum(column, nodes)[None, :]]
        pltriton.store(seen_at, (seen & is_real[:, None]).astype(jnp.int8), mask=keep)
    until = jnp.where(is_real, until, 0)
    fields = ((flat.request, request), (flat.node, node), (flat.places, place), (flat.until, until))
    for ref, x in (*fields, (flat.positions, place - node + depth)):
        pltriton.store(ref.at[at], x, mask=is_row)
    pltriton.store(flat.is_real.at[at], is_real.astype(jnp.int8), mask=is_row)
