"""Paged attention of flat rows with online softmax over GQA groups (Triton).

A program processes one block of rows of one request and one KV head. Tiles, splits and spans begin
at fixed positions, so the reduction order of a row depends on its position alone: results are
batch-invariant and independent of the number of rows of the request. `kernels/__init__.py` lists
what must equal the Pallas twin.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import AttentionTiles
from kernels.triton_gpu.attention.attention_layer_sm90 import takes
from kernels.triton_gpu.attention.attention_sm90 import attention_sm90
from kernels.triton_gpu.attention.head_dim_padding import (
    columns_of,
    in_head,
    load_head,
    store_head,
)
from kernels.triton_gpu.attention.online_softmax import (
    LOG2_E,
    NEGATIVE,
    SoftmaxState,
    fold,
    fold_split,
    no_split,
    no_sums,
    softcap_of,
    with_sink,
)
from kernels.triton_gpu.attention.qk_norm_rope_kv_write import HeadSizes, Pool
from kernels.triton_gpu.gemm.activation import soft_capped
from kernels.triton_gpu.gemm.linear import launching

CAPPED_LANES = 16
"""Lanes of a program with a soft cap: its powers need registers, too."""


class Order(NamedTuple):
    """Compile-time settings of the reduction.

    Attributes:
      span, split, tile: Positions of each.
      ones: Columns of 1 in the product that sums the weights.
      nodes: Width of the tree window.
      softcap: Soft cap of the scores, times log2(e); 0: none.
      has_sinks: Whether query heads have sinks.
    """

    span: int
    split: int
    tile: int
    ones: int
    nodes: int
    softcap: float
    has_sinks: bool


class QueryRows(NamedTuple):
    """First row of each request, and mask bounds of each row."""

    starts: Any
    first: Any
    until: Any
    window: Any


class VisibleRange(NamedTuple):
    """KV positions that the lanes of a program attend to.

    Attributes:
      k, v: Pools of the layer, at the program's KV head.
      table, columns: Page table of the request, and its columns.
      window: Address of each lane's tree mask; in `attention_layer` of all tree paths.
      first, until: Visible positions of each lane before the window.
      scale: Multiplier of the scores, times log2(e).
    """

    k: Any
    v: Any
    table: Any
    columns: Any
    window: Any
    first: Any
    until: Any
    scale: Any


def attend(
    q: Float[Tensor, "R Hq D"],
    gate: Float[Tensor, "R outputs"] | None,
    kv: Float[Tensor, "L 2 P page Hk D"],
    layer: int,
    page_table: Int[Tensor, "B table"],
    row_starts: Int[Tensor, " B1"],
    first: Int[Tensor, " R"],
    until: Int[Tensor, " R"],
    window: Bool[Tensor, "R N"],
    sinks: Float[Tensor, " Hq"] | None = None,
    *,
    max_rows: int,
    span: int,
    split: int,
    tile: int,
    scale: float,
    softcap: float | None = None,
    tiles: AttentionTiles,
) -> Float[Tensor, "R outputs_of_heads"]:
    """Same as `shared.spec.attention.attend`, for flat rows grouped by request.

    A program processes a block of rows over the whole context, so no partial results are stored.

    Args:
      q: Queries; D is one of `kernels.kernel_limits.HEAD_SIZES`.
      gate: QKV projection, in which each query head is followed by its gate; None without gates.
      kv, layer: KV pools of all layers, and the index of the layer to read.
      page_table, first, until, window, sinks, softcap: See the specification.
      row_starts: First flat row of each request, and the end; later rows are padding.
      max_rows: Maximum rows of a request.
      span, split, tile: Positions of each; they fix the reduction order.
      scale: Multiplier of the scores.
      tiles: Tile config.

    Raises:
      ValueError: The pools are not contiguous.
    """
    if not kv.is_contiguous():
        raise ValueError("the pools must be contiguous")
    is_wide = tiles.described and softcap is None and not window.shape[1]
    if is_wide and takes(kv, tile):
        rows = (page_table, row_starts, first, until)
        order = {"max_rows": max_rows, "span": span, "split": split, "scale": scale}
        return attention_sm90(q, gate, kv, layer, *rows, sinks, **order, tiles=tiles)
    q, table, first, until, window = (x.contiguous() for x in (q, page_table, first, until, window))
    (R, Hq, D), (page, Hk), (B, columns) = q.shape, kv.shape[3:5], table.shape
    out, nodes = q.new_empty((R, Hq * D)), window.shape[1]
    lanes, unroll = tiles.lanes, min(tiles.unroll, split // tile)
    if softcap is not None:
        lanes, unroll = CAPPED_LANES, 1
    blocks = triton.cdiv(max_rows * (Hq // Hk), lanes)
    _attend_kernel[(Hk, blocks, B)](
        *(q, q if gate is None else gate, q if sinks is None else sinks, out),
        Pool(k=kv[layer, 0], v=kv[layer, 1], table=table),
        QueryRows(starts=row_starts, first=first, until=until, window=window if nodes else until),
        num_rows=R,
        num_requests=B,
        columns=columns,
        scale=scale * LOG2_E.value,
        heads=HeadSizes(
            q_heads=Hq,
            k_heads=Hk,
            D=D,
            page=page,
            gated=gate is not None,
            line=0 if gate is None else gate.shape[1],
        ),
        order=Order(
            span=span,
            split=split,
            tile=tile,
            ones=tiles.ones,
            nodes=nodes,
            softcap=softcap_of(softcap),
            has_sinks=sinks is not None,
        ),
        lanes=lanes,
        unroll=unroll,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launching(q),
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_requests", "columns"])
def _attend_kernel(
    q_at,
    gate_at,
    sinks_at,
    out_at,
    pool,
    rows,
    num_rows,
    num_requests,
    columns,
    scale,
    heads: tl.constexpr,
    order: tl.constexpr,
    lanes: tl.constexpr,
    unroll: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per KV head, block of rows and request."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    q_heads: tl.constexpr = heads.q_heads
    k_heads: tl.constexpr = heads.k_heads
    D: tl.constexpr = heads.D
    group: tl.constexpr = q_heads // k_heads
    # The last rows attend to most positions: their programs, the longest, start first for all
    # heads.
    blocks = tl.num_programs(1)
    head, block, request = tl.program_id(0), blocks - 1 - tl.program_id(1), tl.program_id(2)
    index, stride = request * blocks + block, num_requests * blocks
    padding = tl.load(rows.starts + num_requests)
    clear_padding(padding + index, out_at, num_rows, stride, head, group, k_heads, D)
    start, stop = tl.load(rows.starts + request), tl.load(rows.starts + request + 1)
    if start + block * lanes // group >= stop:
        return
    lane = block * lanes + tl.arange(0, lanes)
    row, q_head = start + lane // group, head * group + lane % group
    lane_row = tl.minimum(row, stop - 1)  # spare lanes repeat the last row and are not written
    first, until = tl.load(rows.first + lane_row), tl.load(rows.until + lane_row)
    low = tl.min(tl.minimum(first, until))
    high = tl.minimum(tl.max(until) + order.nodes, columns * heads.page)
    place = lane_row.to(tl.int64) * q_heads + q_head
    q = load_head(q_at + place[:, None] * D + columns_of(D)[None, :], D)
    seen = VisibleRange(
        k=pool.k + head * D,
        v=pool.v + head * D,
        table=pool.table + request * columns,
        columns=columns,
        window=rows.window + lane_row[:, None] * order.nodes,
        first=first,
        until=until,
        scale=scale,
    )
    sums = _sum_positions(q, seen, low, high, heads, order, unroll)
    if order.has_sinks:
        sums = with_sink(sums, sinks_at, place, q_heads)
    gate_place = lane_row.to(tl.int64) * heads.line + (2 * q_head + 1) * D
    finish(sums, gate_at, gate_place, out_at, place, row < stop, D, heads.gated)


@triton.jit
def clear_padding(
    begin,
    out_at,
    num_rows,
    stride,
    head,
    group: tl.constexpr,
    k_heads: tl.constexpr,
    D: tl.constexpr,
):
    """Writes zeros to a KV head's outputs in every `stride`-th row from `begin` on."""
    column = columns_of(D)
    zeros = tl.zeros(column.shape, out_at.dtype.element_ty)
    for row in range(begin, num_rows, stride):
        for member in tl.static_range(group):
            place = (row * k_heads + head.to(tl.int64)) * group + member
            store_head(out_at + place * D + column, zeros, D)


@triton.jit
def _sum_positions(
    q, seen, low, high, heads: tl.constexpr, order: tl.constexpr, unroll: tl.constexpr
):
    """Accumulates positions [low, high): tiles into splits, splits into spans, spans in total."""
    lanes: tl.constexpr = q.shape[0]
    D: tl.constexpr = heads.D
    tile: tl.constexpr = order.tile
    tiles: tl.constexpr = order.split // tile
    each: tl.constexpr = order.span // tile
    whole_sums = no_sums(lanes, D)
    begin = low // tile
    end = tl.where(low < high, tl.cdiv(high, tile), begin)
    # Splits that are fully visible to all rows need no mask.
    whole = tl.cdiv(tl.max(seen.first), order.split) * tiles
    whole = tl.minimum(tl.maximum(whole, begin), end)
    partly = tl.minimum(tl.maximum(tl.min(seen.until) // order.split * tiles, whole), end)
    # Separate loop: within a span the total over spans is not used and may leave the registers.
    for number in tl.range(low // order.span, tl.cdiv(high, order.span), num_stages=1):
        start, stop = number * each, tl.minimum((number + 1) * each, end)
        sums = no_sums(lanes, D)
        first, until = tl.maximum(start, begin), tl.minimum(whole, stop)
        sums = _add_tiles(q, seen, first, until, end, high, sums, heads, order)
        first_step = tl.cdiv(tl.maximum(start, whole), unroll)
        page = page_of(seen.table, seen.columns, first_step * unroll, heads.page, tile)
        split_sums = no_split(lanes, D, order.ones)
        for i in range(first_step, tl.minimum(partly, stop) // unroll):
            for j in tl.static_range(unroll):
                _, offset, page = offsets(
                    seen.table, seen.columns, page, i * unroll + j, tile, heads
                )
                split_sums = add_whole(
                    q, seen.k + offset, seen.v + offset, seen.scale, split_sums, D, order
                )
            # Known at compile time, if a loop step is a whole split.
            is_end = True
            if unroll < tiles:
                is_end = (i + 1) * unroll % tiles == 0
            if is_end:
                sums = fold_split(sums, split_sums)
                split_sums = no_split(lanes, D, order.ones)
        first = tl.maximum(start, partly)
        sums = _add_tiles(q, seen, first, stop, end, high, sums, heads, order)
        whole_sums = fold(whole_sums, sums)
    return whole_sums


@triton.jit
def _add_tiles(q, seen, begin, stop, end, high, sums, heads: tl.constexpr, order: tl.constexpr):
    """Adds tiles that are not fully visible to all rows to a span, split by split."""
    lanes: tl.constexpr = q.shape[0]
    split_sums = no_split(lanes, heads.D, order.ones)
    for i in tl.range(begin, stop, num_stages=1):
        split_sums = _add_masked(q, seen, i, high, split_sums, heads, order)
        if ((i + 1) * order.tile % order.split == 0) | (i + 1 == end):
            sums = fold_split(sums, split_sums)
            split_sums = no_split(lanes, heads.D, order.ones)
    return sums


@triton.jit
def page_of(table_at, columns, i, page: tl.constexpr, tile: tl.constexpr):
    """Returns the page in which tile `i` begins."""
    return tl.load(table_at + tl.minimum(i * tile // page, columns - 1))


@triton.jit
def offsets(table_at, columns, number, i, tile: tl.constexpr, heads: tl.constexpr):
    """Returns the positions of a tile, their pool offsets, and the page of the next tile.

    If pages consist of whole tiles, the page is loaded one tile ahead, so key loads do not wait.
    """
    D: tl.constexpr = heads.D
    page: tl.constexpr = heads.page
    position = i * tile + tl.arange(0, tile)
    if page % tile == 0:
        pages = number
        number = page_of(table_at, columns, i + 1, page, tile)
    else:
        pages = tl.load(table_at + tl.minimum(position // page, columns - 1))
    offset = ((pages.to(tl.int64) * page + position % page) * (heads.k_heads * D))[:, None]
    return position, offset + columns_of(D)[None, :], number


@triton.jit
def add_whole(q, k_at, v_at, scale, sums, D: tl.constexpr, order: tl.constexpr):
    """Adds a tile that is fully visible to all rows."""
    k, v = load_head(k_at, D), load_head(v_at, D)
    scores = scores_of(q, k, scale, order)
    highest = tl.maximum(sums.peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - highest[:, None]).to(v.dtype)
    return add_tile(sums, highest, weights, v)


@triton.jit
def scores_of(q, k, scale, order: tl.constexpr):
    """Computes the scores of a tile, as exponents of 2: times scale and log2(e), soft-capped."""
    # "ieee": float32 stays float32, no tf32
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if order.softcap > 0:
        scores = soft_capped(scores, order.softcap)
    return scores


@triton.jit
def _add_masked(q, seen, i, high, sums, heads: tl.constexpr, order: tl.constexpr):
    """Adds a tile that is not fully visible to all rows."""
    D: tl.constexpr = heads.D
    page: tl.constexpr = heads.page
    tile: tl.constexpr = order.tile
    position = i * tile + tl.arange(0, tile)
    inside = position < high
    number = tl.load(seen.table + position // page, mask=inside, other=0)
    offset = ((number.to(tl.int64) * page + position % page) * (heads.k_heads * D))[:, None]
    offset += columns_of(D)[None, :]
    keep, values = in_head(inside[:, None], D), sums.value
    highest, weights = sums.peak, tl.zeros((sums.peak.shape[0], tile), q.dtype)
    v = tl.zeros((tile, q.shape[1]), q.dtype)
    # Always true. A value that leaves a branch has lost the narrow type of its inputs, from which
    # Triton would select its layout for the tensor cores and so the order of its sums.
    if i * tile < high:
        k = tl.load(seen.k + offset, mask=keep, other=0.0)
        scores = scores_of(q, k, seen.scale, order)
        sees = position[None, :] >= seen.first[:, None]
        sees &= position[None, :] < seen.until[:, None]
        if order.nodes > 0:
            node = position[None, :] - seen.until[:, None]
            in_window = (node >= 0) & (node < order.nodes)
            sees |= tl.load(seen.window + node, mask=in_window, other=0).to(tl.int32) != 0
        scores = tl.where(sees, scores, NEGATIVE)
        highest = tl.maximum(sums.peak, tl.max(scores, axis=1))
        weights = tl.where(sees, tl.exp2(scores - highest[:, None]), 0.0).to(q.dtype)
        # 0 x NaN is NaN: non-finite values are set to 0, and the rows that attend to them get NaN.
        v = tl.load(seen.v + offset, mask=keep, other=0.0)
        is_nonfinite = tl.max(tl.where(tl.abs(v) < float("inf"), 0, 1), axis=1)  # [tile]
        v = tl.where(is_nonfinite[:, None] == 0, v, tl.zeros_like(v))
        gets_nan = tl.max(tl.where(sees, is_nonfinite[None, :], 0), axis=1)  # [lanes]
        values = tl.where(gets_nan[:, None] == 0, values, float("nan"))
    sums = SoftmaxState(value=values, peak=sums.peak, total=sums.total)
    return add_tile(sums, highest, weights, v)


@triton.jit
def add_tile(sums, highest, weights, v):
    """Adds the weighted values and the weights of a tile to the accumulator."""
    decay = tl.exp2(sums.peak - highest)[:, None]
    # Tensor cores sum in one order for any number of rows; a reduction over threads does not.
    units = tl.full((v.shape[0], sums.total.shape[1]), 1.0, v.dtype)
    total = sums.total * decay + tl.dot(weights, units, input_precision="ieee")
    values = sums.value * decay + tl.dot(weights, v, input_precision="ieee")
    return SoftmaxState(value=values, peak=highest, total=total)


@triton.jit
def finish(sums, gate_at, gate_place, out_at, place, is_lane, D: tl.constexpr, gated: tl.constexpr):
    """Divides by the total weight, applies the sigmoid gate and writes the outputs of some rows."""
    column, keep = columns_of(D)[None, :], in_head(is_lane[:, None], D)
    out = sums.value / tl.maximum(sums.total, 1e-30)[:, None]
    if gated:
        gate = tl.load(gate_at + gate_place[:, None] + column, mask=keep, other=0.0)
        out = out / (1.0 + tl.exp2(gate.to(tl.float32) * -LOG2_E))
    tl.store(out_at + place[:, None] * D + column, out.to(out_at.dtype.element_ty), mask=keep)
