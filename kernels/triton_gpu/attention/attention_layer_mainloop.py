"""Main loop of `attention_layer`: online softmax over a share (Triton)."""

from typing import Any, NamedTuple

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
from kernels.triton_gpu.attention.row_bounds import is_in as is_in_bits
from kernels.triton_gpu.attention.row_bounds import visible
from kernels.triton_gpu.attention.split_kv import store_partial


class NewRows(NamedTuple):
    """KV positions of a request's new rows, and a mask of the rows with a non-finite value.

    With a tree, `low` and `high` are the mask's bits, by node.
    """

    places: Any
    is_bad: Any
    low: Any
    high: Any


class LaneRows(NamedTuple):
    """Rows of a program: the row of each lane, their range, and the `first` of all rows."""

    of_lane: Any
    begin: Any
    end: Any
    first_of_rows: Any


class Units(NamedTuple):
    """Addresses of the partial results of a program.

    Attributes:
      parts: Partial results of all programs.
      place: Index of each lane in the first unit.
      is_lane: Mask of the lanes that are not spare.
      base: Number of the first unit.
      stride: Offset from one unit to the next.
      length: Positions of a unit.
      is_alone: Whether the program processes all units, and stores none.
    """

    parts: Any
    place: Any
    is_lane: Any
    base: Any
    stride: Any
    length: Any
    is_alone: Any


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
        is_in = (position >= bounds.seen_from) & (position < bounds.seen_until)
        is_bad = tl.zeros(position.shape, tl.int1)
        if order.nodes == 0:  # else the new positions are in the tree's tiles
            is_bad = _is_bad(position, new)
        is_seen = visible(position, seen.first, seen.until)
        sums = _add_seen(q, seen, offset, is_in, is_bad, is_seen, sums, D, order)
        sums, unit_sums = _close(i, end, sums, unit_sums, units, D, order, may_gather)
    if order.nodes > 0:
        num_rows = lane_rows.end - lane_rows.begin
        # Keys and values depend on the loads of their node and page: four stages.
        for step in tl.range(tree * num_rows, end * num_rows, num_stages=4):
            i, row = step // num_rows, step % num_rows
            sums = _add_path(
                q, seen, new, bounds, i, lane_rows.begin + row, lane_rows, sums, heads, order
            )
            if row == num_rows - 1:
                sums, unit_sums = _close(i, end, sums, unit_sums, units, D, order, may_gather)
    return unit_sums


@triton.jit
def _add_path(
    q, seen, new, bounds, i, row, lane_rows, sums, heads: tl.constexpr, order: tl.constexpr
):
    """Adds a tile of a tree's window to the lanes of one row.

    The nodes that the row attends to are at consecutive positions in the order of the sums, as in
    plain decoding, for any order of the window: a node has the bits of plain decoding.
    """
    D: tl.constexpr = heads.D
    page: tl.constexpr = heads.page
    position = i * order.tile + tl.arange(0, order.tile)
    place = position - bounds.seen_until
    in_window = (place >= 0) & (place < order.nodes)
    at = seen.window + row.to(tl.int64) * order.nodes + place
    node = tl.load(at, mask=in_window, other=order.nodes)
    is_path = node < order.nodes
    is_in = is_path | ((position >= tl.load(lane_rows.first_of_rows + row)) & (place < 0))
    is_bad = is_in_bits(new.low, new.high, node, order.nodes)
    position = tl.where(is_path, bounds.seen_until + node, position)
    number = tl.load(seen.table + position // page, mask=is_in, other=0)
    offset = ((number.to(tl.int64) * page + position % page) * (heads.k_heads * D))[:, None]
    offset += columns_of(D)[None, :]
    is_seen = is_in[None, :] & (lane_rows.of_lane == row)[:, None]
    return _add_seen(q, seen, offset, is_in, is_bad, is_seen, sums, D, order)


@triton.jit
def _is_bad(position, new):
    """Returns which positions are new and have a non-finite value."""
    if new.is_bad.shape[0] == 1:
        return tl.zeros(position.shape, tl.int1)
    is_one = (position[:, None] == new.places[None, :]) & new.is_bad[None, :]
    return tl.max(is_one.to(tl.int32), axis=1) != 0


@triton.jit
def _add_seen(q, seen, offset, is_in, is_bad, is_seen, sums, D: tl.constexpr, order: tl.constexpr):
    """Adds positions that are not visible to all lanes.

    0 x NaN is NaN: a non-finite new value is not read, and makes the weights NaN that are not 0.
    """
    keep = in_head((is_in & ~is_bad)[:, None], D)
    k = tl.load(seen.k + offset, mask=keep, other=0.0)
    v = tl.load(seen.v + offset, mask=keep, other=0.0)
    scores = tl.where(is_seen, scores_of(q, k, seen.scale, order), NEGATIVE)
    highest = tl.maximum(sums.peak, tl.max(scores, axis=1))
    weights = tl.where(is_bad[None, :], float("nan"), tl.exp2(scores - highest[:, None]))
    weights = tl.where(is_seen, weights, 0.0).to(v.dtype)
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
