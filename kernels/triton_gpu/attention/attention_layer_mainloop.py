"""Main loop of `attention_layer`: online softmax over a share (Triton)."""

import triton
import triton.language as tl

from kernels.triton_gpu.attention.attention import (
    add_tile,
    add_whole,
    offsets,
    scores_of,
)
from kernels.triton_gpu.attention.head_dim_padding import in_head
from kernels.triton_gpu.attention.online_softmax import (
    NEGATIVE,
    SoftmaxState,
    fold_split,
    no_split,
    no_sums,
)
from kernels.triton_gpu.attention.row_bounds import is_in, visible
from kernels.triton_gpu.attention.split_kv import store_partial


@triton.jit
def sum_share(
    q,
    seen,
    new,
    bounds,
    number,
    low,
    high,
    units,
    heads: tl.constexpr,
    order: tl.constexpr,
    may_gather: tl.constexpr,
):
    """Accumulates positions [low, high): tiles into splits, splits into units, which are stored.

    A unit is a split or a span. Returns the accumulator that is not stored. Positions that no row
    attends to are not read.
    """
    lanes: tl.constexpr = q.shape[0]
    D: tl.constexpr = heads.D
    tile: tl.constexpr = order.tile
    sums, unit_sums = no_split(lanes, D, order.ones), no_sums(lanes, D)
    begin = low // tile
    end = tl.where(low < high, tl.cdiv(high, tile), begin)
    # Tiles without new positions that are fully visible to all lanes need no mask.
    whole = tl.minimum(tl.minimum(tl.min(seen.until), bounds.new_from) // tile, end)
    whole = tl.where(tl.max(seen.first) <= begin * tile, tl.maximum(whole, begin), begin)
    for i in range(begin, whole):
        position, offset, number = offsets(seen.table, seen.columns, number, i, tile, heads)
        sums = add_whole(q, seen.k + offset, seen.v + offset, seen.scale, sums, D, order)
        sums, unit_sums = _close(i, end, sums, unit_sums, units, D, order, may_gather)
    for i in range(whole, end):
        position, offset, number = offsets(seen.table, seen.columns, number, i, tile, heads)
        is_read = (position >= bounds.seen_from) & (position < bounds.seen_until)
        if order.nodes > 0:
            node = position - bounds.seen_until
            is_read |= is_in(seen.window.any_low, seen.window.any_high, node, order.nodes)
        if new.is_bad.shape[0] > 1:
            is_one = (position[:, None] == new.places[None, :]) & new.is_bad[None, :]
            is_read &= tl.max(is_one.to(tl.int32), axis=1) == 0
        keep = in_head(is_read[:, None], D)
        k = tl.load(seen.k + offset, mask=keep, other=0.0)
        v = tl.load(seen.v + offset, mask=keep, other=0.0)
        scores = scores_of(q, k, seen.scale, order)
        is_seen = visible(position, seen.first, seen.until, seen.window, order.nodes)
        scores = tl.where(is_seen, scores, NEGATIVE)
        highest = tl.maximum(sums.peak, tl.max(scores, axis=1))
        weights = tl.where(is_seen, tl.exp2(scores - highest[:, None]), 0.0).to(v.dtype)
        sums = add_tile(sums, highest, weights, v)
        sums, unit_sums = _close(i, end, sums, unit_sums, units, D, order, may_gather)
    return unit_sums


@triton.jit
def _close(
    i, end, sums, unit_sums, units, D: tl.constexpr, order: tl.constexpr, may_gather: tl.constexpr
):
    """Merges a split into its unit after its last tile, and stores a unit after its last split."""
    lanes: tl.constexpr = sums.peak.shape[0]
    after, is_last = (i + 1) * order.tile, i + 1 == end
    if (after % order.split == 0) | is_last:
        at = (i * order.tile // units.length - units.base) * units.stride + units.place
        if may_gather:
            unit_sums = fold_split(unit_sums, sums)
            if ((after % units.length == 0) | is_last) & (not units.is_alone):
                store_partial(units.parts, at, unit_sums, units.is_lane, D)
                unit_sums = no_sums(lanes, D)
        else:
            total = tl.max(sums.total, axis=1)
            done = SoftmaxState(value=sums.value, peak=sums.peak, total=total)
            store_partial(units.parts, at, done, units.is_lane, D)
        sums = no_split(lanes, D, order.ones)
    return sums, unit_sums
