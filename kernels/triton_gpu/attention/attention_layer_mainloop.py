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


class LayerRequests(NamedTuple):
    """Bounds of each request, and arrival counters of its programs."""

    bounds: Any
    arrivals: Any


class LayerRows(NamedTuple):
    """First row of each request, and the write position and bounds of each row."""

    starts: Any
    places: Any
    is_real: Any
    first: Any
    until: Any
    paths: Any


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


class WindowPaths(NamedTuple):
    """Positions of a step over a tree's window.

    Attributes:
      row: Row of each position, or of all.
      node: Node of each position; any other number for none.
      is_in: Whether the row attends to the position.
      at: Position in the pool.
    """

    row: Any
    node: Any
    is_in: Any
    at: Any


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
    at_once: tl.constexpr,
    path_stages: tl.constexpr,
):
    """Accumulates positions [low, high): tiles into splits, splits into units, which are stored.

    A unit is a split or a span. Returns the accumulator that is not stored. Positions that no row
    attends to are not read. A step over a tree's window has `at_once` rows.
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
        sums, unit_sums = close(i, end, sums, unit_sums, units, D, order, may_gather)
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
        sums = add_seen(q, seen, offset, is_in, is_bad, is_seen, sums, D, order)
        sums, unit_sums = close(i, end, sums, unit_sums, units, D, order, may_gather)
    if order.nodes > 0:
        steps = tl.cdiv(lane_rows.end - lane_rows.begin, at_once)
        # Keys and values depend on the loads of their node and page.
        for step in tl.range(tree * steps, end * steps, num_stages=path_stages):
            i, row = step // steps, lane_rows.begin + step % steps * at_once
            paths = paths_of(seen, bounds, i, row, lane_rows, end, heads, order, at_once)
            sums = add_paths(q, seen, new, paths, lane_rows, sums, heads, order, at_once)
            if (step + 1) % steps == 0:
                sums, unit_sums = close(i, end, sums, unit_sums, units, D, order, may_gather)
    return unit_sums


@triton.jit
def paths_of(
    seen,
    bounds,
    i,
    row,
    lane_rows,
    end,
    heads: tl.constexpr,
    order: tl.constexpr,
    at_once: tl.constexpr,
):
    """Returns the nodes and pool positions of a tile of a tree's window, of rows from `row` on.

    The nodes that a row attends to are at consecutive positions in the order of the sums, as in
    plain decoding, for any order of the window: a node has the bits of plain decoding. Positions of
    several rows follow each other.
    """
    page: tl.constexpr = heads.page
    member = tl.arange(0, at_once * order.tile)
    position = i * order.tile + member % order.tile
    place = position - bounds.seen_until
    is_before = (place < 0) & (position < end * order.tile)
    in_window = (place >= 0) & (place < order.nodes) & (position < end * order.tile)
    if at_once > 1:
        row += member // order.tile
        in_window, is_before = in_window & (row < lane_rows.end), is_before & (row < lane_rows.end)
        row = tl.minimum(row, lane_rows.end - 1)
    at = seen.window + row.to(tl.int64) * order.nodes + place
    node = tl.load(at, mask=in_window, other=order.nodes)
    is_path = node < order.nodes
    is_in = is_path | ((position >= tl.load(lane_rows.first_of_rows + row)) & is_before)
    position = tl.where(is_path, bounds.seen_until + node, position)
    number = tl.load(seen.table + position // page, mask=is_in, other=0)
    return WindowPaths(
        row=row, node=node, is_in=is_in, at=number.to(tl.int64) * page + position % page
    )


@triton.jit
def add_paths(
    q,
    seen,
    new,
    paths,
    lane_rows,
    sums,
    heads: tl.constexpr,
    order: tl.constexpr,
    at_once: tl.constexpr,
):
    """Adds a tile of a tree's window to the lanes of its rows; positions of others weigh 0."""
    if at_once > 1:
        is_own = lane_rows.of_lane[:, None] == paths.row[None, :]
    else:
        is_own = (lane_rows.of_lane == paths.row)[:, None]
    is_bad = is_in_bits(new.low, new.high, paths.node, order.nodes)
    offset = (paths.at * (heads.k_heads * heads.D))[:, None] + columns_of(heads.D)[None, :]
    is_seen = paths.is_in[None, :] & is_own
    return add_seen(q, seen, offset, paths.is_in, is_bad, is_seen, sums, heads.D, order)


@triton.jit
def _is_bad(position, new):
    """Returns which positions are new and have a non-finite value."""
    if new.is_bad.shape[0] == 1:
        return tl.zeros(position.shape, tl.int1)
    is_one = (position[:, None] == new.places[None, :]) & new.is_bad[None, :]
    return tl.max(is_one.to(tl.int32), axis=1) != 0


@triton.jit
def add_seen(q, seen, offset, is_in, is_bad, is_seen, sums, D: tl.constexpr, order: tl.constexpr):
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
def close(
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
