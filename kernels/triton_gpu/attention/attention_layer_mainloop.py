"""Main loop of `attention_layer`: online softmax over a share (Triton)."""

import triton
import triton.language as tl

from kernels.triton_gpu.attention.attention import (
    add_tile,
    add_whole,
    offsets,
    scores_of,
)
from kernels.triton_gpu.attention.head_dim_padding import columns_of, in_head
from kernels.triton_gpu.attention.online_softmax import (
    NEGATIVE,
    SoftmaxState,
    fold_split,
    no_split,
    no_sums,
)
from kernels.triton_gpu.attention.row_bounds import in_range, path_places
from kernels.triton_gpu.attention.split_kv import store_partial


@triton.jit
def sum_share(
    q,
    seen,
    new,
    lane_rows,
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
    tree = end
    if order.nodes > 0:
        tree = tl.minimum(tl.maximum(bounds.seen_until // tile, whole), end)
    for i in range(whole, tree):
        position, offset, number = offsets(seen.table, seen.columns, number, i, tile, heads)
        is_read = (position >= bounds.seen_from) & (position < bounds.seen_until)
        is_read &= ~_is_bad(position, new)
        is_seen = in_range(position, seen.first, seen.until)
        sums = _add_seen(q, seen, offset, is_read, is_seen, sums, D, order)
        sums, unit_sums = _close(i, end, sums, unit_sums, units, D, order, may_gather)
    if order.nodes > 0:
        for i in range(tree, end):
            for row in range(lane_rows.begin, lane_rows.end):
                sums = _add_path(q, seen, new, bounds, i, row, lane_rows, sums, heads, order)
            sums, unit_sums = _close(i, end, sums, unit_sums, units, D, order, may_gather)
    return unit_sums


@triton.jit
def _add_path(
    q, seen, new, bounds, i, row, lane_rows, sums, heads: tl.constexpr, order: tl.constexpr
):
    """Adds a tile of a tree's window to the lanes of one row; see `path_places`."""
    D: tl.constexpr = heads.D
    page: tl.constexpr = heads.page
    position = i * order.tile + tl.arange(0, order.tile)
    in_row = lane_rows.of_lane == row
    first = tl.max(tl.where(in_row, seen.first, 0))
    begin = tl.maximum(first, bounds.seen_until)
    window_at = seen.window + row * order.nodes
    at, is_node = path_places(window_at, bounds.seen_until, begin, position, order.nodes)
    is_seen = is_node | ((position >= first) & (position < bounds.seen_until))
    is_read = is_seen & ~_is_bad(at, new)
    number = tl.load(seen.table + at // page, mask=is_seen, other=0)
    offset = ((number.to(tl.int64) * page + at % page) * (heads.k_heads * D))[:, None]
    offset += columns_of(D)[None, :]
    is_seen = is_seen[None, :] & in_row[:, None]
    return _add_seen(q, seen, offset, is_read, is_seen, sums, D, order)


@triton.jit
def _is_bad(position, new):
    """Returns which positions are new and have a non-finite value."""
    if new.is_bad.shape[0] == 1:
        return tl.zeros(position.shape, tl.int1)
    is_one = (position[:, None] == new.places[None, :]) & new.is_bad[None, :]
    return tl.max(is_one.to(tl.int32), axis=1) != 0


@triton.jit
def _add_seen(q, seen, offset, is_read, is_seen, sums, D: tl.constexpr, order: tl.constexpr):
    """Adds a tile that is not fully visible to all lanes."""
    keep = in_head(is_read[:, None], D)
    k = tl.load(seen.k + offset, mask=keep, other=0.0)
    v = tl.load(seen.v + offset, mask=keep, other=0.0)
    scores = tl.where(is_seen, scores_of(q, k, seen.scale, order), NEGATIVE)
    highest = tl.maximum(sums.peak, tl.max(scores, axis=1))
    weights = tl.where(is_seen, tl.exp2(scores - highest[:, None]), 0.0).to(v.dtype)
    return add_tile(sums, highest, weights, v)


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
