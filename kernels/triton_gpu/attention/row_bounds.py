"""Attention and write bounds of each request, and tree paths of its rows (Triton).

They are computed once for all layers.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Int
from torch import Tensor

from kernels.tiles import BLOCKS
from shared.spec.attention_layer import BOUNDS, RowBounds

_BOUNDS = tl.constexpr(BOUNDS)


def compute_row_bounds(
    row_starts: Int[Tensor, " B1"],
    places: Int[Tensor, " R"],
    first: Int[Tensor, " R"],
    until: Int[Tensor, " R"],
    window: Bool[Tensor, "R N"],
    is_real: Bool[Tensor, " R"],
    *,
    max_rows: int,
    k_heads: int,
) -> tuple[Int[Tensor, "B bounds"], Int[Tensor, "B counters"], Int[Tensor, "R N"]]:
    """Same as `row_bounds` and `tree_paths` of `shared.spec.attention_layer`.

    Also returns zeroed arrival counters. Paths of padding are undefined.

    Args:
      row_starts, first, until, window, max_rows: See `attend`.
      places, is_real: See `place`.
      k_heads: Number of KV heads.
    """
    B, nodes = len(row_starts) - 1, window.shape[1]
    bounds = row_starts.new_empty((B, BOUNDS), dtype=torch.int32)
    arrivals = row_starts.new_empty((B, k_heads * BLOCKS), dtype=torch.int32)
    paths = row_starts.new_empty(window.shape, dtype=torch.int32)
    given = (row_starts, places, first, until, window if nodes else is_real, is_real)
    _row_bounds_kernel[(B, max_rows if nodes else 1)](
        *(x.contiguous() for x in given),
        bounds,
        arrivals,
        paths,
        rows=triton.next_power_of_2(max_rows),
        nodes=nodes,
        counters=arrivals.shape[1],
        lanes=triton.next_power_of_2(arrivals.shape[1]),
        num_warps=4 if nodes else 1,
    )
    return bounds, arrivals, paths


@triton.jit
def _row_bounds_kernel(
    starts_at,
    places_at,
    first_at,
    until_at,
    window_at,
    real_at,
    bounds_at,
    arrivals_at,
    paths_at,
    rows: tl.constexpr,
    nodes: tl.constexpr,
    counters: tl.constexpr,
    lanes: tl.constexpr,
):
    """One program per request; with a window, per request and row."""
    request, index = tl.program_id(0), tl.program_id(1)
    start, stop = tl.load(starts_at + request), tl.load(starts_at + request + 1)
    if nodes > 0:
        if start + index < stop:
            _store_path(first_at, until_at, window_at, paths_at, start + index, nodes)
        if index > 0:
            return
    row = start + tl.arange(0, rows)
    is_row = row < stop
    most: tl.constexpr = 2**31 - 1
    first = tl.load(first_at + row, mask=is_row, other=most)
    until = tl.load(until_at + row, mask=is_row, other=0)
    place = tl.load(places_at + row, mask=is_row, other=0)
    is_real = tl.load(real_at + row, mask=is_row, other=0).to(tl.int32) != 0
    low = tl.min(tl.where(is_row, tl.minimum(first, until), most))
    path_until = until
    if nodes > 0:
        node = tl.arange(0, triton.next_power_of_2(nodes))[None, :]
        keep = is_row[:, None] & (node < nodes)
        is_node = tl.load(window_at + row[:, None] * nodes + node, mask=keep, other=0)
        num_nodes = tl.sum(is_node.to(tl.int32), axis=1)
        path_until = tl.where(num_nodes > 0, tl.maximum(first, until) + num_nodes, until)
    is_any = tl.max(is_real.to(tl.int32)) > 0
    bounds = RowBounds(
        low=tl.where(start < stop, low, 0),
        seen_from=tl.min(first),
        seen_until=tl.max(until),
        new_from=tl.where(is_any, tl.min(tl.where(is_real, place, most)), low),
        new_until=tl.where(is_any, tl.max(tl.where(is_real, place + 1, 0)), 0),
        path_until=tl.max(path_until),
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
    tl.store(at + 5, bounds.path_until)


@triton.jit
def _store_path(first_at, until_at, window_at, paths_at, row, nodes: tl.constexpr):
    node = tl.arange(0, triton.next_power_of_2(nodes))
    entry, at = tl.minimum(node, nodes - 1), row.to(tl.int64) * nodes  # spare lanes repeat the last
    is_node = tl.load(window_at + at + entry, mask=node < nodes, other=0).to(tl.int32)
    begin = tl.maximum(tl.load(first_at + row) - tl.load(until_at + row), 0)
    rank = begin + tl.cumsum(is_node) - 1
    is_here = (rank[None, :] == entry[:, None]) & (is_node[None, :] != 0)
    tl.store(paths_at + at + entry, tl.min(tl.where(is_here, node[None, :], nodes), axis=1))


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
        path_until=tl.load(at + 5),
    )


@triton.jit
def visible(position, first, until):
    """Returns the mask of positions that each lane attends to, [lanes, positions]."""
    return (position[None, :] >= first[:, None]) & (position[None, :] < until[:, None])


@triton.jit
def bits_of(is_one, node):
    """Packs the selected nodes into two 32-bit masks."""
    bit = tl.where(is_one, 1 << (node & 31), 0)
    return tl.sum(tl.where(node >> 5 == 0, bit, 0)), tl.sum(tl.where(node >> 5 == 1, bit, 0))


@triton.jit
def is_in(low, high, node, nodes: tl.constexpr):
    """Returns whether `node` is in range and its bit is set."""
    bits = low
    if nodes > 32:
        bits = tl.where(node < 32, low, high)
    return (((bits >> (node & 31)) & 1) != 0) & (node >= 0) & (node < nodes)
