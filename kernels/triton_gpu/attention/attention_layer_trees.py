"""Split-KV attention of draft trees in `attention_layer`, after `place` (Triton).

The context before a tree is the same for all its nodes, and each node has its own path in the
window. So programs of many (query head, node) pairs attend to the context, and programs of a few
nodes to the window and the split in which it begins. The last program of a block of nodes combines
the partial results. Tiles, splits, spans and their order equal those of `attention_layer`, so
results are bitwise equal.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import TREE_LANES, DecodeAttentionTiles
from kernels.tree_blocks import TreeBlocks
from kernels.triton_gpu.attention.attention import (
    Order,
    VisibleRange,
    clear_padding,
    finish,
    offsets,
    page_of,
)
from kernels.triton_gpu.attention.attention_layer_mainloop import (
    LaneRows,
    LayerRequests,
    LayerRows,
    NewRows,
    Units,
    add_paths,
    add_seen,
    close,
    paths_of,
)
from kernels.triton_gpu.attention.head_dim_padding import columns_of, load_head
from kernels.triton_gpu.attention.online_softmax import (
    LOG2_E,
    no_split,
    no_sums,
    softcap_of,
    with_sink,
)
from kernels.triton_gpu.attention.qk_norm_rope_kv_write import HeadSizes, Pool, is_bad_line
from kernels.triton_gpu.attention.row_bounds import bits_of, bounds_of, visible
from kernels.triton_gpu.attention.split_kv import SplitPartials, combine
from kernels.triton_gpu.gemm.linear import launching

_LANES = tl.constexpr(TREE_LANES)


class TreeConfig(NamedTuple):
    """Tile config of the kernel.

    Attributes:
      rows, blocks, lanes, wide, wide_blocks: See `TreeBlocks`.
      unroll: Units combined per loop step.
      new_rows: Maximum rows of a request, rounded up to a power of two.
      counters: Arrival counters of a request.
      may_span: Whether partial results may be per span.
      path_rows, path_stages: Rows and pipeline stages of a step over the window.
    """

    rows: int
    blocks: int
    lanes: int
    wide: int
    wide_blocks: int
    unroll: int
    new_rows: int
    counters: int
    may_span: bool
    path_rows: int
    path_stages: int


class Share(NamedTuple):
    """Positions [low, high) of a program, and its rows.

    Attributes:
      head: KV head.
      start, stop: Rows of the request.
      begin: First row of the program.
      low, high: Positions.
      base: Number of the first unit of the request.
      unit: Positions of a unit.
      stride: Offset from one unit to the next.
    """

    head: Any
    start: Any
    stop: Any
    begin: Any
    low: Any
    high: Any
    base: Any
    unit: Any
    stride: Any


def attention_layer_trees(
    q: Float[Tensor, "R Hq D"],
    gate: Float[Tensor, "R outputs"] | None,
    kv: Float[Tensor, "L 2 P page Hk D"],
    layer: int,
    page_table: Int[Tensor, "B table"],
    requests: LayerRequests,
    rows: LayerRows,
    sinks: Float[Tensor, " Hq"] | None,
    *,
    blocks: TreeBlocks,
    max_rows: int,
    span: int,
    split: int,
    tile: int,
    max_parts: int,
    scale: float,
    softcap: float | None,
    tiles: DecodeAttentionTiles,
) -> Float[Tensor, "R outputs_of_heads"]:
    """Same as `attention_layer.attention_layer` after `place`, for rows of trees.

    Args:
      q: Queries from `place`, which has also written the new keys and values.
      gate: QKV projection, in which each query head is followed by its gate; None without gates.
      kv, layer, page_table, sinks: See `attention_layer`.
      requests, rows: Bounds of requests and rows, contiguous.
      blocks: Blocks of the programs.
      max_rows, span, split, tile, max_parts, scale, softcap, tiles: See `attention_layer`.
    """
    (R, Hq, D), (page, Hk), (B, columns) = q.shape, kv.shape[3:5], page_table.shape
    splits = triton.cdiv(columns * page, split)
    parts = max(min(splits, max_parts), triton.cdiv(columns * page, span))
    sums = q.new_empty((parts, R, Hq, D), dtype=torch.float32)
    peaks, totals = q.new_empty((2, parts, R, Hq), dtype=torch.float32)
    out = q.new_empty((R, Hq * D))
    programs = min(tiles.programs, triton.cdiv(splits, tiles.splits))
    order = Order(
        span=span,
        split=split,
        tile=tile,
        ones=tiles.ones,
        nodes=rows.paths.shape[1],
        softcap=softcap_of(softcap),
        has_sinks=sinks is not None,
    )
    _attention_layer_trees_kernel[(Hk * (blocks.blocks + blocks.wide_blocks * programs), B)](
        q.contiguous(),
        q if gate is None else gate,
        q if sinks is None else sinks,
        out,
        Pool(k=kv[layer, 0], v=kv[layer, 1], table=page_table),
        requests,
        rows,
        SplitPartials(sums=sums, peaks=peaks, totals=totals),
        num_rows=R,
        num_requests=B,
        columns=columns,
        programs=programs,
        scale=scale * LOG2_E.value,
        max_parts=max_parts,
        heads=HeadSizes(
            q_heads=Hq,
            k_heads=Hk,
            D=D,
            page=page,
            gated=gate is not None,
            line=0 if gate is None else gate.shape[1],
        ),
        order=order,
        wide_order=order._replace(nodes=0, ones=16 if blocks.lanes >= 64 else 2 * blocks.lanes),
        config=TreeConfig(
            **blocks._asdict(),
            unroll=max(1, min(4, 128 * 4 // triton.next_power_of_2(D))),
            new_rows=triton.next_power_of_2(max_rows),
            counters=requests.arrivals.shape[1],
            may_span=splits > max_parts,
            path_rows=tiles.path_rows,
            path_stages=tiles.path_stages,
        ),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers or None,
        **launching(q),
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_requests", "columns", "programs", "max_parts"])
def _attention_layer_trees_kernel(
    q_at,
    gate_at,
    sinks_at,
    out_at,
    pool,
    requests,
    rows,
    parts,
    num_rows,
    num_requests,
    columns,
    programs,
    scale,
    max_parts,
    heads: tl.constexpr,
    order: tl.constexpr,
    wide_order: tl.constexpr,
    config: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per request, KV head, and block of the window, or block and share of the context.

    Programs of the window, the longest, start first.
    """
    q_heads: tl.constexpr = heads.q_heads
    k_heads: tl.constexpr = heads.k_heads
    D: tl.constexpr = heads.D
    split: tl.constexpr = order.split
    group: tl.constexpr = q_heads // k_heads
    windows: tl.constexpr = config.blocks * k_heads
    per_share: tl.constexpr = config.wide_blocks * k_heads
    request = tl.program_id(1)
    is_window = tl.program_id(0) < windows
    index = tl.program_id(0) - tl.where(is_window, 0, windows)
    number = tl.where(is_window, 0, index // per_share)
    blocks = tl.where(is_window, config.blocks, config.wide_blocks)
    head, block = index % (blocks * k_heads) // blocks, index % blocks
    start, stop = tl.load(rows.starts + request), tl.load(rows.starts + request + 1)
    num_real = tl.load(rows.starts + num_requests)
    bounds = bounds_of(requests.bounds, request)
    high = tl.minimum(bounds.path_until, columns * heads.page)
    by_span, unit = False, split
    if config.may_span:
        by_span = tl.cdiv(high, split) - bounds.low // split > max_parts
        unit = tl.where(by_span, order.span, split)
    base = bounds.low // unit
    window_unit = tl.maximum(tl.minimum(bounds.seen_until, high) // unit, base)
    each = tl.maximum(tl.cdiv(window_unit - base, programs), 1)
    num_shares = tl.cdiv(window_unit - base, each)
    first_block = tl.where(is_window, block, block * config.wide)
    begin = start + first_block * config.rows
    has_work = (begin < stop) & (is_window | (number < num_shares))
    clears = is_window & (block == 0)
    if not (has_work | clears):
        return
    if clears:
        if is_launched:
            gdc_wait()
        clear_padding(num_real + request, out_at, num_rows, num_requests, head, group, k_heads, D)
    if not has_work:
        return
    from_unit = tl.where(is_window, window_unit, base + number * each)
    until = tl.minimum(window_unit, from_unit + each) * unit
    share = Share(
        head=head,
        start=start,
        stop=stop,
        begin=begin,
        low=tl.maximum(bounds.low, from_unit * unit),
        high=tl.where(is_window, high, until),
        base=base,
        unit=unit,
        stride=num_rows * q_heads,
    )
    own_pool = Pool(k=pool.k, v=pool.v, table=pool.table + request * columns)
    if is_window:
        _sum_block(
            q_at,
            own_pool,
            rows,
            bounds,
            share,
            parts,
            columns,
            scale,
            heads,
            order,
            config,
            num_rows=config.rows,
            lanes=_LANES,
            is_launched=is_launched,
        )
    else:
        _sum_block(
            q_at,
            own_pool,
            rows,
            bounds,
            share,
            parts,
            columns,
            scale,
            heads,
            wide_order,
            config,
            num_rows=config.wide * config.rows,
            lanes=config.lanes,
            is_launched=is_launched,
        )
    tl.debug_barrier()
    num_blocks = tl.where(is_window, 1, config.wide)
    member = tl.arange(0, triton.next_power_of_2(config.wide))
    is_mine = (member < num_blocks) & (begin + member * config.rows < stop)
    counter = requests.arrivals + request * config.counters + head * config.blocks
    counter += first_block + member
    arrived = tl.atomic_add(counter, 1 + 0 * member, mask=is_mine, sem="acq_rel")
    is_last = is_mine & (arrived == num_shares)  # shares of the context, and the window
    tl.store(counter, 0 * member, mask=is_last)
    last = tl.sum(tl.where(is_last, 1 << member, 0))
    stop_unit = tl.where(bounds.low < high, tl.cdiv(high, unit), base)
    per_span = tl.where(by_span, 1 << 20, order.span // split)
    for i in tl.range(0, num_blocks, num_stages=1):
        if (last >> i) & 1 != 0:
            row, is_lane, q_head = _pairs(
                begin + i * config.rows, stop, head, group, config.rows, _LANES
            )
            place = row.to(tl.int64) * q_heads + q_head
            sums = combine(
                parts, place, base, stop_unit, per_span, share.stride, _LANES, D, config.unroll
            )
            if order.has_sinks:
                sums = with_sink(sums, sinks_at, place, q_heads)
            gate_place = row.to(tl.int64) * heads.line + (2 * q_head + 1) * D
            finish(sums, gate_at, gate_place, out_at, place, is_lane, D, heads.gated)


@triton.jit
def _pairs(begin, stop, head, group: tl.constexpr, num_rows: tl.constexpr, lanes: tl.constexpr):
    """Returns the row of each lane, whether the lane is not spare, and its query head."""
    lane = tl.arange(0, lanes)
    row = begin + lane // group
    is_lane = (lane < num_rows * group) & (row < stop)
    row = tl.minimum(row, tl.minimum(begin + num_rows, stop) - 1)  # spare lanes are not written
    return row, is_lane, head * group + lane % group


@triton.jit
def _sum_block(
    q_at,
    own_pool,
    rows,
    bounds,
    share,
    parts,
    columns,
    scale,
    heads: tl.constexpr,
    order: tl.constexpr,
    config: tl.constexpr,
    num_rows: tl.constexpr,
    lanes: tl.constexpr,
    is_launched: tl.constexpr,
):
    """Stores the partial results of a share's positions, for some nodes.

    Without nodes in `order`, the positions are before the tree.
    """
    k_heads: tl.constexpr = heads.k_heads
    D: tl.constexpr = heads.D
    tile: tl.constexpr = order.tile
    group: tl.constexpr = heads.q_heads // k_heads
    row, is_lane, q_head = _pairs(share.begin, share.stop, share.head, group, num_rows, lanes)
    place = row.to(tl.int64) * heads.q_heads + q_head
    first, until = tl.load(rows.first + row), tl.load(rows.until + row)
    seen = VisibleRange(
        k=own_pool.k + share.head * D,
        v=own_pool.v + share.head * D,
        table=own_pool.table,
        columns=columns,
        window=rows.paths,
        first=first,
        until=until,
        scale=scale,
    )
    lane_rows = LaneRows(
        of_lane=row,
        begin=share.begin,
        end=tl.minimum(share.begin + num_rows, share.stop),
        first_of_rows=rows.first,
    )
    begin, end = share.low // tile, tl.cdiv(share.high, tile)
    if share.low >= share.high:
        end = begin
    number = page_of(own_pool.table, columns, begin, heads.page, tile)
    at_once: tl.constexpr = config.path_rows
    if order.nodes > 0:
        new = share.start + tl.arange(0, config.new_rows)
        is_new = new < share.stop
        new_place = tl.load(rows.places + new, mask=is_new, other=0)
        is_new &= tl.load(rows.is_real + new, mask=is_new, other=0).to(tl.int32) != 0
        page = tl.load(own_pool.table + new_place // heads.page, mask=is_new, other=0)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    q = load_head(q_at + place[:, None] * D + columns_of(D)[None, :], D)
    if order.nodes > 0:
        at = page.to(tl.int64) * heads.page + new_place % heads.page
        is_bad_row = is_bad_line(own_pool.v, (at * k_heads + share.head) * D, is_new, D)
        low_bits, high_bits = bits_of(is_bad_row, new_place - bounds.seen_until)
    units = Units(
        parts=parts,
        place=place,
        is_lane=is_lane,
        base=share.base,
        stride=share.stride,
        length=share.unit,
        is_alone=False,
    )
    sums, unit_sums = no_split(lanes, D, order.ones), no_sums(lanes, D)
    if order.nodes == 0:
        for i in range(begin, end):
            position, offset, number = offsets(own_pool.table, columns, number, i, tile, heads)
            is_in = (position >= bounds.seen_from) & (position < bounds.seen_until)
            is_bad = tl.zeros(position.shape, tl.int1)
            is_seen = visible(position, first, until)
            sums = add_seen(q, seen, offset, is_in, is_bad, is_seen, sums, D, order)
            sums, unit_sums = close(i, end, sums, unit_sums, units, D, order, config.may_span)
    else:
        new_rows = NewRows(places=new_place, is_bad=is_bad_row, low=low_bits, high=high_bits)
        steps = tl.cdiv(lane_rows.end - lane_rows.begin, at_once)
        for step in tl.range(begin * steps, end * steps, num_stages=config.path_stages):
            i, from_row = step // steps, share.begin + step % steps * at_once
            paths = paths_of(seen, bounds, i, from_row, lane_rows, end, heads, order, at_once)
            sums = add_paths(q, seen, new_rows, paths, lane_rows, sums, heads, order, at_once)
            if (step + 1) % steps == 0:
                sums, unit_sums = close(i, end, sums, unit_sums, units, D, order, config.may_span)
