"""Partial results of `latent_attention`: one per split, and their combination (Triton).

Splits are combined in position order, regardless of the program that computed them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.latent_tiles import COMBINED, COMBINED_COLUMNS, COMBINED_HEADS
from kernels.triton_gpu.attention.online_softmax import (
    NEGATIVE,
)
from kernels.triton_gpu.gemm.linear import launching


class LatentBounds(NamedTuple):
    """Positions [low, high) that a request or a program attends to, its first split, and the end of
    its splits.
    """

    low: Any
    high: Any
    base: Any
    end: Any


class LatentSplits(NamedTuple):
    """Addresses of the partial results of a program.

    Attributes:
      parts: Partial results of all programs.
      place, count: Index of the first lane, and number of lanes.
      base: First split of the request, which is stored first.
      stride: Lanes of a split.
    """

    parts: Any
    place: Any
    count: Any
    base: Any
    stride: Any


@triton.jit
def split_tiles(i, order: tl.constexpr):
    """Returns the tiles of the split that contains tile `i`."""
    return tl.where(i * order.tile < order.near, order.split, order.far_split) // order.tile


@triton.jit
def split_of(i, order: tl.constexpr):
    """Returns the split that contains tile `i`."""
    near: tl.constexpr = order.near // order.tile
    far: tl.constexpr = order.far_split // order.tile
    more = tl.maximum(i - near, 0) // far
    return tl.minimum(i, near) // (order.split // order.tile) + more


@triton.jit
def request_splits(
    rows,
    start,
    stop,
    columns,
    sizes: tl.constexpr,
    order: tl.constexpr,
    config: tl.constexpr,
):
    """Returns the bounds of a request with rows [start, stop)."""
    page: tl.constexpr = sizes.page
    tile: tl.constexpr = order.tile
    nodes: tl.constexpr = order.nodes
    max_rows: tl.constexpr = config.rows
    most: tl.constexpr = 2**31 - 1
    row = start + tl.arange(0, max_rows)
    first = tl.load(rows.first + row, mask=row < stop, other=most)
    until = tl.load(rows.until + row, mask=row < stop, other=most)
    low = tl.min(tl.minimum(first, until))
    until = tl.max(tl.where(row < stop, until, 0))
    high = tl.minimum(until + nodes, columns * page)
    base = split_of(low // tile, order)
    end = tl.where(low < high, split_of(tl.cdiv(high, tile) - 1, order) + 1, base)
    return LatentBounds(low=low, high=high, base=base, end=end)


@triton.jit
def tile_range(bounds, share, order: tl.constexpr, config: tl.constexpr):
    """Returns the first tile of a program, and the end: the splits that begin in its share."""
    tile: tl.constexpr = order.tile
    begin = bounds.low // tile
    end = tl.where(bounds.low < bounds.high, tl.cdiv(bounds.high, tile), begin)
    each = tl.cdiv(end - begin, config.sharing)
    first = _split_end(begin + share * each, order)
    until = _split_end(begin + (share + 1) * each, order)
    return tl.where(share == 0, begin, tl.minimum(first, end)), tl.minimum(until, end)


@triton.jit
def _split_end(i, order: tl.constexpr):
    """Returns the first tile from `i` on with which a split begins."""
    tiles = split_tiles(i, order)
    return tl.cdiv(i, tiles) * tiles


def combine(arguments: dict[str, Any], q: Tensor) -> None:
    """Combines the partial results of `attend_latent` and writes the outputs.

    Args:
      arguments: Arguments that both kernels have.
      q: Queries, on the device of the launch.
    """
    sizes, num_rows = arguments["sizes"], arguments["num_rows"]
    # The interpreter takes time for each program, and for splits past the end.
    width = COMBINED_COLUMNS if q.is_cuda else triton.next_power_of_2(sizes.rank)
    blocks = triton.cdiv(sizes.rank, width)
    _combine_kernel[(blocks, triton.cdiv(sizes.heads, COMBINED_HEADS), num_rows)](
        **arguments,
        requests=triton.next_power_of_2(arguments["num_requests"]),
        width=width,
        lanes=COMBINED_HEADS,
        unroll=COMBINED if q.is_cuda else 2,
        num_warps=1,
        num_stages=1,
        **launching(q),
    )


@triton.jit(do_not_specialize=["num_rows", "num_requests", "columns"])
def _combine_kernel(
    parts,
    rows,
    out_at,
    num_rows,
    num_requests,
    columns,
    sizes: tl.constexpr,
    order: tl.constexpr,
    config: tl.constexpr,
    requests: tl.constexpr,
    width: tl.constexpr,
    lanes: tl.constexpr,
    unroll: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of columns, block of heads, and row."""
    heads: tl.constexpr = sizes.heads
    rank: tl.constexpr = sizes.rank
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(2)
    column = (tl.program_id(0) * width + tl.arange(0, width))[:, None]
    head = tl.program_id(1) * lanes + tl.arange(0, lanes)
    is_head = head < heads
    lane = row * heads + tl.where(is_head, head, 0)
    keep = (column < rank) & is_head[None, :]
    value, total = tl.zeros((width, lanes), tl.float32), tl.zeros((lanes,), tl.float32)
    if row < tl.load(rows.starts + num_requests):
        number = tl.arange(0, requests)
        ends = tl.load(rows.starts + 1 + number, mask=number < num_requests, other=2**31 - 1)
        request = tl.sum((ends <= row).to(tl.int32))
        start, stop = tl.load(rows.starts + request), tl.load(rows.starts + request + 1)
        bounds = request_splits(rows, start, stop, columns, sizes, order, config)
        count, stride = bounds.end - bounds.base, num_rows * heads
        value, total = _combined(parts, count, column, lane, keep, stride, sizes, unroll)
    out = value / tl.maximum(total, 1e-30)[None, :]
    at = lane[None, :].to(tl.int64) * rank + column
    tl.store(out_at + at, out.to(out_at.dtype.element_ty), mask=keep)


@triton.jit
def _combined(parts, count, column, lane, keep, stride, sizes: tl.constexpr, unroll: tl.constexpr):
    """Combines the splits of some (row, head) pairs.

    Several splits are loaded per step, so that a load does not wait for the previous one.
    """
    rank: tl.constexpr = sizes.rank
    value, total = tl.zeros(keep.shape, tl.float32), tl.zeros(lane.shape, tl.float32)
    peak = tl.full(lane.shape, NEGATIVE, tl.float32)
    for step in range(0, tl.cdiv(count, unroll)):
        for member in tl.static_range(unroll):
            number = step * unroll + member + tl.zeros((), tl.int32)
            is_one = number < count
            number = tl.where(is_one, number, 0).to(tl.int64)
            at = (number * rank + column) * stride + lane[None, :]
            is_kept = keep & (column < tl.where(is_one, rank, 0))
            more = tl.load(parts.sums + at, mask=is_kept, other=0.0)
            at = number * stride + lane
            more_peak = tl.where(is_one, tl.load(parts.peaks + at), NEGATIVE)
            more_total = tl.where(is_one, tl.load(parts.totals + at), 0.0)
            highest = tl.maximum(peak, more_peak)
            ours, theirs = tl.exp2(peak - highest), tl.exp2(more_peak - highest)
            value = fold(value, more, ours[None, :], theirs[None, :])
            total = fold(total, more_total, ours, theirs)
            peak = highest
    return value, total


@triton.jit
def fold(one, more, ours, theirs):
    """Adds two sums with their factors."""
    return one * ours + more * theirs
