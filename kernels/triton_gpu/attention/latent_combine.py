"""Partial results of `latent_attention`: the units of a request, and their combination (Triton).

A unit is a tile, or a span if a request has enough spans for its programs. Units are combined in
position order, tiles into spans and spans into the total, regardless of the program that computed
them.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.latent_tiles import COMBINED, COMBINED_COLUMNS, PROGRAMS_PER_SPAN
from kernels.triton_gpu.attention.attention import NEGATIVE
from kernels.triton_gpu.gemm.linear import launching

_COMBINED = tl.constexpr(COMBINED)
_PROGRAMS_PER_SPAN = tl.constexpr(PROGRAMS_PER_SPAN)


class LatentBounds(NamedTuple):
    """Positions [low, high) that a request or a program attends to, and its units.

    Attributes:
      tiles: Tiles of a unit.
      base, end: First unit, and the end.
    """

    low: Any
    high: Any
    tiles: Any
    base: Any
    end: Any


class LatentUnits(NamedTuple):
    """Addresses of the partial results of a program.

    Attributes:
      parts: Partial results of all programs.
      place, count: Index of the first lane in the first unit, and number of lanes.
      base: Number of the first unit.
      stride: Offset from one unit to the next.
      tiles: Tiles of a unit.
    """

    parts: Any
    place: Any
    count: Any
    base: Any
    stride: Any
    tiles: Any


@triton.jit
def request_units(
    rows,
    start,
    stop,
    columns,
    sizes: tl.constexpr,
    order: tl.constexpr,
    config: tl.constexpr,
):
    """Returns the bounds and units of a request with rows [start, stop)."""
    page: tl.constexpr = sizes.page
    span: tl.constexpr = order.span
    tile: tl.constexpr = order.tile
    nodes: tl.constexpr = order.nodes
    sharing: tl.constexpr = config.sharing
    max_rows: tl.constexpr = config.rows
    most: tl.constexpr = 2**31 - 1
    row = start + tl.arange(0, max_rows)
    first = tl.load(rows.first + row, mask=row < stop, other=most)
    until = tl.load(rows.until + row, mask=row < stop, other=most)
    low = tl.min(tl.minimum(first, until))
    until = tl.max(tl.where(row < stop, until, 0))
    high = tl.minimum(until + nodes, columns * page)
    spans = tl.cdiv(high, span) - low // span
    by_span = spans * _PROGRAMS_PER_SPAN >= sharing
    tiles = tl.where(by_span, span // tile, 1)
    base = low // (tiles * tile)
    end = tl.where(low < high, tl.cdiv(high, tiles * tile), base)
    return LatentBounds(low=low, high=high, tiles=tiles, base=base, end=end)


def combine(arguments: dict[str, Any], q: Tensor) -> None:
    """Combines the partial results of `attend_latent` and writes the outputs.

    Args:
      arguments: Arguments that both kernels have.
      q: Queries, on the device of the launch.
    """
    sizes, num_rows = arguments["sizes"], arguments["num_rows"]
    width = min(COMBINED_COLUMNS, triton.next_power_of_2(sizes.rank))
    _combine_kernel[(triton.cdiv(sizes.rank, width) * sizes.heads, num_rows)](
        **arguments,
        requests=triton.next_power_of_2(arguments["num_requests"]),
        width=width,
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
    is_launched: tl.constexpr,
):
    """One program per block of columns of a head, and row."""
    heads: tl.constexpr = sizes.heads
    rank: tl.constexpr = sizes.rank
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    blocks: tl.constexpr = triton.cdiv(rank, width)
    head, block, row = tl.program_id(0) // blocks, tl.program_id(0) % blocks, tl.program_id(1)
    column = block * width + tl.arange(0, width)
    place = row.to(tl.int64) * heads + head
    value, total = tl.zeros((width,), tl.float32), tl.zeros((), tl.float32)
    if row < tl.load(rows.starts + num_requests):
        number = tl.arange(0, requests)
        ends = tl.load(rows.starts + 1 + number, mask=number < num_requests, other=2**31 - 1)
        request = tl.sum((ends <= row).to(tl.int32))
        start, stop = tl.load(rows.starts + request), tl.load(rows.starts + request + 1)
        bounds = request_units(rows, start, stop, columns, sizes, order, config)
        value, total = _combined(parts, bounds, place, column, num_rows, sizes, order)
    out = value / tl.maximum(total, 1e-30)
    tl.store(out_at + place * rank + column, out.to(out_at.dtype.element_ty), mask=column < rank)


@triton.jit
def _combined(parts, bounds, place, column, num_rows, sizes: tl.constexpr, order: tl.constexpr):
    """Combines the units of a (row, head) pair: tiles into spans, spans into the total.

    Several units are loaded per step, so that a load does not wait for the previous one.
    """
    heads: tl.constexpr = sizes.heads
    rank: tl.constexpr = sizes.rank
    span: tl.constexpr = order.span
    tile: tl.constexpr = order.tile
    span_tiles: tl.constexpr = span // tile
    stride = num_rows * heads
    per_span = tl.where(bounds.tiles == 1, span_tiles, 1 << 20)
    none, zero = tl.full((), NEGATIVE, tl.float32), tl.zeros((), tl.float32)
    w_value, w_peak, w_total = tl.zeros(column.shape, tl.float32), none, zero
    for number in range(bounds.base // per_span, tl.cdiv(bounds.end, per_span)):
        value, peak, total = tl.zeros(column.shape, tl.float32), none, zero
        low = tl.maximum(number * per_span, bounds.base)
        high = tl.minimum((number + 1) * per_span, bounds.end)
        for several in range(low // _COMBINED, tl.cdiv(high, _COMBINED)):
            for member in tl.static_range(_COMBINED):
                unit = several * _COMBINED + member + tl.zeros((), tl.int32)
                is_one = (unit >= low) & (unit < high)
                at = tl.where(is_one, unit - bounds.base, 0) * stride + place
                keep = column < tl.where(is_one, rank, 0)
                more = tl.load(parts.sums + at * rank + column, mask=keep, other=0.0)
                more_peak = tl.where(is_one, tl.load(parts.peaks + at), none)
                more_total = tl.where(is_one, tl.load(parts.totals + at), zero)
                highest = tl.maximum(peak, more_peak)
                ours, theirs = tl.exp2(peak - highest), tl.exp2(more_peak - highest)
                value = fold(value, more, ours, theirs)
                total = fold(total, more_total, ours, theirs)
                peak = highest
        highest = tl.maximum(w_peak, peak)
        ours, theirs = tl.exp2(w_peak - highest), tl.exp2(peak - highest)
        w_value = fold(w_value, value, ours, theirs)
        w_total = fold(w_total, total, ours, theirs)
        w_peak = highest
    return w_value, w_total


@triton.jit
def fold(one, more, ours, theirs):
    """Adds two sums with their factors."""
    return one * ours + more * theirs
