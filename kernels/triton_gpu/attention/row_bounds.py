"""Attention and write bounds of each request (Triton).

The bounds are computed once for all layers. A tree window is a bit mask.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Int
from torch import Tensor

from kernels.tiles import BLOCKS
from shared.spec.attention_layer import BOUNDS, RowBounds

_BOUNDS = tl.constexpr(BOUNDS)


class TreeWindow(NamedTuple):
    """Tree windows of lanes as two 32-bit masks."""

    low: Any
    high: Any


def compute_row_bounds(
    row_starts: Int[Tensor, " B1"],
    places: Int[Tensor, " R"],
    first: Int[Tensor, " R"],
    until: Int[Tensor, " R"],
    is_real: Bool[Tensor, " R"],
    *,
    max_rows: int,
    k_heads: int,
) -> tuple[Int[Tensor, "B bounds"], Int[Tensor, "B counters"]]:
    """Same as `shared.spec.attention_layer.row_bounds`; also returns zeroed arrival counters.

    Args:
      row_starts, first, until, max_rows: See `attend`.
      places, is_real: See `place`.
      k_heads: Number of KV heads.
    """
    B = len(row_starts) - 1
    bounds = row_starts.new_empty((B, BOUNDS), dtype=torch.int32)
    arrivals = row_starts.new_empty((B, k_heads * BLOCKS), dtype=torch.int32)
    rows = (x.contiguous() for x in (row_starts, places, first, until, is_real))
    _row_bounds_kernel[(B,)](
        *rows,
        bounds,
        arrivals,
        rows=triton.next_power_of_2(max_rows),
        counters=arrivals.shape[1],
        lanes=triton.next_power_of_2(arrivals.shape[1]),
        num_warps=1,
    )
    return bounds, arrivals


@triton.jit
def _row_bounds_kernel(
    starts_at,
    places_at,
    first_at,
    until_at,
    real_at,
    bounds_at,
    arrivals_at,
    rows: tl.constexpr,
    counters: tl.constexpr,
    lanes: tl.constexpr,
):
    """One program per request."""
    request = tl.program_id(0)
    start, stop = tl.load(starts_at + request), tl.load(starts_at + request + 1)
    row = start + tl.arange(0, rows)
    is_row = row < stop
    most: tl.constexpr = 2**31 - 1
    first = tl.load(first_at + row, mask=is_row, other=most)
    until = tl.load(until_at + row, mask=is_row, other=0)
    place = tl.load(places_at + row, mask=is_row, other=0)
    is_real = tl.load(real_at + row, mask=is_row, other=0).to(tl.int32) != 0
    low = tl.min(tl.where(is_row, tl.minimum(first, until), most))
    is_any = tl.max(is_real.to(tl.int32)) > 0
    bounds = RowBounds(
        low=tl.where(start < stop, low, 0),
        seen_from=tl.min(first),
        seen_until=tl.max(until),
        new_from=tl.where(is_any, tl.min(tl.where(is_real, place, most)), low),
        new_until=tl.where(is_any, tl.max(tl.where(is_real, place + 1, 0)), 0),
    )
    _store_bounds(bounds_at + request * _BOUNDS, bounds)
    counter = tl.arange(0, lanes)
    tl.store(arrivals_at + request * counters + counter, 0 * counter, mask=counter < counters)


@triton.jit
def _store_bounds(at, bounds):
    tl.store(at, bounds.low)
    tl.store(at + 1, bounds.seen_from)
    tl.store(at + 2, bounds.seen_until)
    tl.store(at + 3, bounds.new_from)
    tl.store(at + 4, bounds.new_until)


@triton.jit
def bounds_of(bounds_at, request):
    """Returns the bounds that `compute_row_bounds` computed for a request."""
    at = bounds_at + request * _BOUNDS
    return RowBounds(
        low=tl.load(at),
        seen_from=tl.load(at + 1),
        seen_until=tl.load(at + 2),
        new_from=tl.load(at + 3),
        new_until=tl.load(at + 4),
    )


@triton.jit
def pack_window_bits(window_at, rows, nodes: tl.constexpr):
    """Packs the window of each lane into two 32-bit masks."""
    low = tl.zeros(rows.shape, tl.int32)
    high = low
    if nodes > 0:
        low = _pack_word(window_at, rows, 0, nodes)
    if nodes > 32:
        high = _pack_word(window_at, rows, 32, nodes)
    return TreeWindow(low=low, high=high)


@triton.jit
def _pack_word(window_at, rows, begin: tl.constexpr, nodes: tl.constexpr):
    bit = tl.arange(0, 32)
    at = window_at + rows.to(tl.int64)[:, None] * nodes + (begin + bit)[None, :]
    is_set = tl.load(at, mask=((begin + bit) < nodes)[None, :], other=0).to(tl.int32)
    return tl.sum(is_set << bit[None, :], axis=1).to(tl.int32)


@triton.jit
def path_places(window_at, until, begin, position, nodes: tl.constexpr):
    """Returns where a row of a tree reads some positions of plain decoding.

    The nodes that the row attends to are at consecutive positions in the order of the sums, as in
    plain decoding, for any order of the window: a node has the bits of plain decoding.

    Args:
      window_at: Window of the row.
      until, begin: KV position of the window, and position of the row's first visible node.
      position: Positions of plain decoding.
      nodes: Width of the window.

    Returns:
      Their KV positions, and which are of nodes; others are as they were.
    """
    node = tl.arange(0, triton.next_power_of_2(nodes))
    is_node = tl.load(window_at + node, mask=node < nodes, other=0).to(tl.int32)
    path_position = tl.where(is_node != 0, begin + tl.cumsum(is_node) - 1, -1)
    is_here = path_position[None, :] == position[:, None]
    number = tl.sum(tl.where(is_here, node[None, :] + 1, 0), axis=1)  # from 1; 0: none
    return tl.where(number > 0, until + number - 1, position), number > 0


@triton.jit
def in_range(position, first, until):
    """Returns the mask of positions between the bounds of each lane, [lanes, positions]."""
    return (position[None, :] >= first[:, None]) & (position[None, :] < until[:, None])


@triton.jit
def visible(position, first, until, window, nodes: tl.constexpr):
    """Returns the mask of positions that each lane attends to, [lanes, positions]."""
    seen = in_range(position, first, until)
    if nodes > 0:
        node = position[None, :] - until[:, None]
        seen |= is_in(window.low[:, None], window.high[:, None], node, nodes)
    return seen


@triton.jit
def is_in(low, high, node, nodes: tl.constexpr):
    """Returns whether `node` is in range and its bit is set."""
    bits = low
    if nodes > 32:
        bits = tl.where(node < 32, low, high)
    return (((bits >> (node & 31)) & 1) != 0) & (node >= 0) & (node < nodes)
