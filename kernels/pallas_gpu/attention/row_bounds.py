"""Attention and write bounds of each request, and tree paths of its rows (Pallas, Triton backend).

They are computed once for all layers.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Int

from kernels.tiles import BLOCKS
from shared.spec.attention_layer import BOUNDS, RowBounds


def compute_row_bounds(
    row_starts: Int[jax.Array, " B1"],
    places: Int[jax.Array, " R"],
    first: Int[jax.Array, " R"],
    until: Int[jax.Array, " R"],
    window: Bool[jax.Array, "R N"],
    is_real: Bool[jax.Array, " R"],
    *,
    max_rows: int,
    k_heads: int,
    interpret: bool = False,
) -> tuple[Int[jax.Array, "B bounds"], Int[jax.Array, "B counters"], Int[jax.Array, "R N"]]:
    """Same as `row_bounds` and `tree_paths` of `shared.spec.attention_layer`.

    Also returns zeroed arrival counters. Paths of padding are undefined.

    Args:
      row_starts, first, until, window, max_rows: See `attend`.
      places, is_real: See `place`.
      k_heads: Number of KV heads.
      interpret: Run on a CPU.
    """
    B, nodes, mask = len(row_starts) - 1, window.shape[1], window_operand(window)
    shapes = ((B, BOUNDS), (B, k_heads * BLOCKS), mask.shape)
    bounds, arrivals, paths = pl.pallas_call(
        functools.partial(_row_bounds_kernel, rows=pl.next_power_of_2(max_rows), nodes=nodes),
        grid=(B, max_rows if nodes else 1),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes],
        compiler_params=pltriton.CompilerParams(num_warps=4 if nodes else 1, num_stages=1),
        interpret=interpret,
        name="row_bounds",
    )(row_starts, _RowRefs(places, first, until, mask, is_real.astype(jnp.int8)))
    return bounds, arrivals, paths if nodes else jnp.zeros(window.shape, jnp.int32)


def window_operand(window: Bool[jax.Array, "R N"]) -> Int[jax.Array, "some N1"]:
    """Converts tree masks to the int8 operand of a kernel; empty arrays are not supported."""
    return window.astype(jnp.int8) if window.shape[1] else jnp.zeros((1, 1), jnp.int8)


class _RowRefs(NamedTuple):
    """References of what `compute_row_bounds` reads of each row."""

    places: Any
    first: Any
    until: Any
    window: Any
    is_real: Any


def _row_bounds_kernel(starts_ref, given, bounds_ref, arrivals_ref, paths_ref, *, rows, nodes):
    """One program per request; with a window, per request and row."""
    request, index = pl.program_id(0), pl.program_id(1)
    start, stop = starts_ref[request], starts_ref[request + 1]
    if nodes:
        pl.when(start + index < stop)(lambda: _store_path(given, paths_ref, start + index))

    @pl.when(index == 0)
    def store_bounds():
        bounds = _bounds_of_rows(given, start, stop, rows, nodes)
        for which, bound in enumerate(bounds):
            bounds_ref[request, which] = bound
        counters = arrivals_ref.shape[1]
        counter = lax.iota(jnp.int32, pl.next_power_of_2(counters))
        zeros = jnp.zeros_like(counter)
        pltriton.store(arrivals_ref.at[request, counter], zeros, mask=counter < counters)


def _store_path(given, paths_ref, row):
    nodes = given.window.shape[1]
    node = lax.iota(jnp.int32, pl.next_power_of_2(nodes))
    entry = jnp.minimum(node, nodes - 1)  # spare lanes repeat the last entry
    at = given.window.at[row, entry]
    is_node = pltriton.load(at, mask=node < nodes, other=0).astype(jnp.int32)
    begin = jnp.maximum(given.first[row] - given.until[row], 0)
    rank = begin + jnp.cumsum(is_node) - 1
    is_here = (rank[None, :] == entry[:, None]) & (is_node[None, :] != 0)
    path = jnp.min(jnp.where(is_here, node[None, :], nodes), axis=1)
    pltriton.store(paths_ref.at[row, entry], path)


def _bounds_of_rows(given, start, stop, rows, nodes):
    row, most = start + lax.iota(jnp.int32, rows), 2**31 - 1
    is_row = row < stop
    # A row that is not read gets an index in bounds, for the interpreter.
    at = jnp.minimum(row, given.first.shape[0] - 1)
    first = pltriton.load(given.first.at[at], mask=is_row, other=most)
    until = pltriton.load(given.until.at[at], mask=is_row, other=0)
    place = pltriton.load(given.places.at[at], mask=is_row, other=0)
    is_real = pltriton.load(given.is_real.at[at], mask=is_row, other=0) != 0
    low = jnp.min(jnp.where(is_row, jnp.minimum(first, until), most))
    path_until = until
    if nodes:
        node = lax.iota(jnp.int32, pl.next_power_of_2(nodes))[None, :]
        keep = is_row[:, None] & (node < nodes)
        of_nodes = given.window.at[at[:, None], jnp.minimum(node, nodes - 1)]
        num_nodes = pltriton.load(of_nodes, mask=keep, other=0).astype(jnp.int32).sum(axis=1)
        path_until = jnp.where(num_nodes > 0, jnp.maximum(first, until) + num_nodes, until)
    is_any = jnp.max(is_real.astype(jnp.int32)) > 0
    return RowBounds(
        low=jnp.where(start < stop, low, 0),
        seen_from=jnp.min(first),
        seen_until=jnp.max(until),
        new_from=jnp.where(is_any, jnp.min(jnp.where(is_real, place, most)), low),
        new_until=jnp.where(is_any, jnp.max(jnp.where(is_real, place + 1, 0)), 0),
        path_until=jnp.max(path_until),
    )


def bounds_of(bounds_ref, request):
    """Returns the bounds that `compute_row_bounds` computed for a request."""
    return RowBounds(*(bounds_ref[request, which] for which in range(BOUNDS)))


def visible(position, first, until):
    """Returns the mask of positions that each lane attends to, [lanes, positions]."""
    return (position[None, :] >= first[:, None]) & (position[None, :] < until[:, None])


def is_in(low, high, node, nodes):
    """Returns whether `node` is in range and its bit is set."""
    bits = jnp.where(node < 32, low, high) if nodes > 32 else low
    is_set = lax.shift_right_arithmetic(bits, node & 31) & 1
    return (is_set != 0) & (node >= 0) & (node < nodes)


def bits_of(is_one, node):
    """Packs the selected nodes into two 32-bit masks."""
    bit = jnp.where(is_one, lax.shift_left(jnp.int32(1), node & 31), 0)
    return tuple(jnp.sum(jnp.where(node >> 5 == high, bit, 0)) for high in (0, 1))
