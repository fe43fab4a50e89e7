"""Attention and write bounds of each request (Pallas, Triton backend).

The bounds are computed once for all layers. A tree window is a bit mask.
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


class TreeWindow(NamedTuple):
    """Tree windows of lanes as two 32-bit masks."""

    low: Any
    high: Any


def compute_row_bounds(
    row_starts: Int[jax.Array, " B1"],
    places: Int[jax.Array, " R"],
    first: Int[jax.Array, " R"],
    until: Int[jax.Array, " R"],
    is_real: Bool[jax.Array, " R"],
    *,
    max_rows: int,
    k_heads: int,
    interpret: bool = False,
) -> tuple[Int[jax.Array, "B bounds"], Int[jax.Array, "B counters"]]:
    """Same as `shared.spec.attention_layer.row_bounds`; also returns zeroed arrival counters.

    Args:
      row_starts, first, until, max_rows: See `attend`.
      places, is_real: See `place`.
      k_heads: Number of KV heads.
      interpret: Run on a CPU.
    """
    B = len(row_starts) - 1
    bounds, arrivals = pl.pallas_call(
        functools.partial(_row_bounds_kernel, rows=pl.next_power_of_2(max_rows)),
        grid=(B,),
        out_shape=[jax.ShapeDtypeStruct((B, n), jnp.int32) for n in (BOUNDS, k_heads * BLOCKS)],
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="row_bounds",
    )(row_starts, places, first, until, is_real.astype(jnp.int8))
    return bounds, arrivals


def _row_bounds_kernel(
    starts_ref, places_ref, first_ref, until_ref, real_ref, bounds_ref, arrivals_ref, *, rows
):
    """One program per request."""
    request = pl.program_id(0)
    start, stop = starts_ref[request], starts_ref[request + 1]
    row, most = start + lax.iota(jnp.int32, rows), 2**31 - 1
    is_row = row < stop
    # A row that is not read gets an index in bounds, for the interpreter.
    at = jnp.minimum(row, first_ref.shape[0] - 1)
    first = pltriton.load(first_ref.at[at], mask=is_row, other=most)
    until = pltriton.load(until_ref.at[at], mask=is_row, other=0)
    place = pltriton.load(places_ref.at[at], mask=is_row, other=0)
    is_real = pltriton.load(real_ref.at[at], mask=is_row, other=0) != 0
    low = jnp.min(jnp.where(is_row, jnp.minimum(first, until), most))
    is_any = jnp.max(is_real.astype(jnp.int32)) > 0
    bounds = RowBounds(
        low=jnp.where(start < stop, low, 0),
        seen_from=jnp.min(first),
        seen_until=jnp.max(until),
        new_from=jnp.where(is_any, jnp.min(jnp.where(is_real, place, most)), low),
        new_until=jnp.where(is_any, jnp.max(jnp.where(is_real, place + 1, 0)), 0),
    )
    for which, bound in enumerate(bounds):
        bounds_ref[request, which] = bound
    counters = arrivals_ref.shape[1]
    counter = lax.iota(jnp.int32, pl.next_power_of_2(counters))
    zeros = jnp.zeros_like(counter)
    pltriton.store(arrivals_ref.at[request, counter], zeros, mask=counter < counters)


def bounds_of(bounds_ref, request):
    """Returns the bounds that `compute_row_bounds` computed for a request."""
    return RowBounds(*(bounds_ref[request, which] for which in range(BOUNDS)))


def pack_window_bits(window_ref, rows, nodes):
    """Packs the window of each lane into two 32-bit masks."""
    nothing = jnp.zeros(rows.shape, jnp.int32)
    low = _pack_word(window_ref, rows, 0, nodes) if nodes > 0 else nothing
    high = _pack_word(window_ref, rows, 32, nodes) if nodes > 32 else nothing
    return TreeWindow(low=low, high=high)


def _pack_word(window_ref, rows, begin, nodes):
    bit = lax.iota(jnp.int32, 32)
    is_node = jnp.broadcast_to((begin + bit < nodes)[None, :], (len(rows), 32))
    at = window_ref.at[rows[:, None], jnp.minimum(begin + bit, nodes - 1)[None, :]]
    is_set = pltriton.load(at, mask=is_node, other=0).astype(jnp.int32)
    return jnp.sum(lax.shift_left(is_set, jnp.broadcast_to(bit[None, :], is_set.shape)), axis=1)


def nodes_of(window_ref, row, nodes):
    """Returns the window of a row as integers, padded to a power of two."""
    node = lax.iota(jnp.int32, pl.next_power_of_2(nodes))
    at = window_ref.at[row, jnp.minimum(node, nodes - 1)]
    return pltriton.load(at, mask=node < nodes, other=0).astype(jnp.int32)


def path_places(window_ref, row, until, begin, position, nodes):
    """Returns where a row of a tree reads some positions of plain decoding.

    The nodes that the row attends to are at consecutive positions in the order of the sums, as in
    plain decoding, for any order of the window: a node has the bits of plain decoding.

    Args:
      window_ref, row: Windows of all rows, and the row.
      until, begin: KV position of the window, and position of the row's first visible node.
      position: Positions of plain decoding.
      nodes: Width of the window.

    Returns:
      Their KV positions, and which are of nodes; others are as they were.
    """
    is_node = nodes_of(window_ref, row, nodes)
    node = lax.iota(jnp.int32, len(is_node))
    path_position = jnp.where(is_node != 0, begin + jnp.cumsum(is_node) - 1, -1)
    is_here = path_position[None, :] == position[:, None]
    number = jnp.sum(jnp.where(is_here, node[None, :] + 1, 0), axis=1)  # from 1; 0: none
    return jnp.where(number > 0, until + number - 1, position), number > 0


def in_range(position, first, until):
    """Returns the mask of positions between the bounds of each lane, [lanes, positions]."""
    return (position[None, :] >= first[:, None]) & (position[None, :] < until[:, None])


def visible(position, first, until, window, nodes):
    """Returns the mask of positions that each lane attends to, [lanes, positions]."""
    seen = in_range(position, first, until)
    if nodes > 0:
        node = position[None, :] - until[:, None]
        low, high = (jnp.broadcast_to(x[:, None], node.shape) for x in (window.low, window.high))
        seen |= is_in(low, high, node, nodes)
    return seen


def is_in(low, high, node, nodes):
    """Returns whether `node` is in range and its bit is set."""
    bits = jnp.where(node < 32, low, high) if nodes > 32 else low
    is_set = lax.shift_right_arithmetic(bits, node & 31) & 1
    return (is_set != 0) & (node >= 0) & (node < nodes)


def bits_of(is_one, node):
    """Packs the selected nodes into two 32-bit masks."""
    bit = jnp.where(is_one, lax.shift_left(jnp.int32(1), node & 31), 0)
    return tuple(jnp.sum(jnp.where(node >> 5 == high, bit, 0)) for high in (0, 1))
