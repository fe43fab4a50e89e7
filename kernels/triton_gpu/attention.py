"""Attention of flat rows over paged KV, in Triton.

A program sums one split of the positions for one block of rows of one request and one key head; a
second kernel combines the splits of each row. Splits and tiles lie at fixed positions, so the order
of a row's sums depends on nothing but where the row stands: not on the batch, not on how many rows
its request has. What must stay equal in the Pallas twin is listed in `kernels/__init__.py`.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kernels.tiles import AttentionTiles

HEAD_SIZES = (16, 32, 64, 128, 256)
"""Powers of two, at least the fewest columns that a matrix unit takes."""

_LOG2_E = 1.4426950408889634
_NEGATIVE = tl.constexpr(-1e30)  # finite, since -inf minus -inf is NaN where a row sees nothing


def attend(
    q: Float[Tensor, "R Hq D"],
    k_pages: Float[Tensor, "P page Hk D"],
    v_pages: Float[Tensor, "P page Hk D"],
    page_table: Int[Tensor, "B table"],
    row_starts: Int[Tensor, " B1"],
    first: Int[Tensor, " R"],
    until: Int[Tensor, " R"],
    window: Bool[Tensor, "R N"],
    *,
    max_rows: int,
    split: int,
    tile: int,
    tiles: AttentionTiles,
    k_offset: int = 0,
    v_offset: int = 0,
) -> Float[Tensor, "R Hq D"]:
    """As `shared.spec.attention.attend`, for rows that lie together request by request.

    D is one of `HEAD_SIZES`. A layer's slice of a larger pool is read where it lies.

    Args:
      q, k_pages, v_pages, page_table, first, until, window: As in the specification.
      row_starts: First flat row of each request, and the end; rows past it are padding.
      max_rows: Most rows that a request can have.
      split, tile: Positions of a split and of a tile: the order of the sums.
      tiles: How the work is cut otherwise.
      k_offset, v_offset: Pages of the pool that lie before the layer's keys, and its values.

    Raises:
      ValueError: An argument but q is not contiguous.
    """
    if not all(x.is_contiguous() for x in (k_pages, v_pages, page_table, first, until, window)):
        raise ValueError("pages, page_table, first, until and window must be contiguous")
    R, Hq, D = q.shape
    page, Hk = k_pages.shape[1:3]
    B, columns = page_table.shape
    group, nodes, reach = Hq // Hk, window.shape[1], columns * page
    blocks, splits = triton.cdiv(max_rows * group, tiles.lanes), triton.cdiv(reach, split)
    sums = q.new_empty((splits, R, Hq, D), dtype=torch.float32)
    peaks, totals = q.new_empty((2, splits, R, Hq), dtype=torch.float32)
    _split_kernel[(splits * blocks, Hk, B)](
        *(q.contiguous(), k_pages[k_offset:], v_pages[v_offset:]),
        *(page_table, row_starts, first, until),
        window if nodes else until,  # a pointer, that nothing reads without nodes
        *(sums, peaks, totals, R, columns, D**-0.5 * _LOG2_E),
        q_heads=Hq,
        k_heads=Hk,
        D=D,
        page=page,
        lanes=tiles.lanes,
        ones=tiles.ones,
        blocks=blocks,
        split_length=split,
        tile=tile,
        nodes=nodes,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        enable_fp_fusion=False,  # XLA's Triton does not fuse: equal bits in Pallas
    )
    out = torch.empty((R, Hq, D), dtype=q.dtype, device=q.device)
    _combine_kernel[(R, Hq)](
        *(sums, peaks, totals, row_starts, first, until, out, B, R, reach),
        heads=Hq,
        D=D,
        split_length=split,
        nodes=nodes,
        num_warps=tiles.combine_warps,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _split_kernel(
    q_at,
    k_at,
    v_at,
    table_at,
    starts_at,
    first_at,
    until_at,
    window_at,
    sums_at,
    peaks_at,
    totals_at,
    num_rows,
    columns,
    scale,
    q_heads: tl.constexpr,
    k_heads: tl.constexpr,
    D: tl.constexpr,
    page: tl.constexpr,
    lanes: tl.constexpr,
    ones: tl.constexpr,
    blocks: tl.constexpr,
    split_length: tl.constexpr,
    tile: tl.constexpr,
    nodes: tl.constexpr,
):
    """One program per split, block of rows, key head and request; writes nothing for empty ones."""
    group: tl.constexpr = q_heads // k_heads
    split, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    head, request = tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(starts_at + request), tl.load(starts_at + request + 1)
    if start + block * lanes // group >= stop:
        return
    lane = block * lanes + tl.arange(0, lanes)
    row = start + lane // group
    q_head = head * group + lane % group
    column = tl.arange(0, D)[None, :]
    own = tl.minimum(row, stop - 1)  # spare lanes repeat the last row and are not written
    first, until = tl.load(first_at + own), tl.load(until_at + own)
    origin = split * split_length
    low = tl.maximum(tl.min(tl.minimum(first, until)), origin)
    high = tl.minimum(tl.minimum(tl.max(until) + nodes, columns * page), origin + split_length)
    if low >= high:
        return

    q = tl.load(q_at + (own.to(tl.int64) * q_heads + q_head)[:, None] * D + column)
    k_at += head * D + column
    v_at += head * D + column
    table_at += request * columns
    window_at += own[:, None] * nodes
    sums = tl.zeros((lanes, D), tl.float32)
    peak = tl.full((lanes,), _NEGATIVE, tl.float32)
    total = tl.zeros((lanes, ones), tl.float32)
    # The tiles that every row sees whole need no mask.
    begin, end = (low - origin) // tile, tl.cdiv(high - origin, tile)
    whole = tl.maximum(tl.max(first) - origin, 0)
    whole = tl.minimum(tl.maximum(tl.cdiv(whole, tile), begin), end)
    partly = tl.maximum(tl.min(until) - origin, 0) // tile
    partly = tl.minimum(tl.maximum(partly, whole), end)
    for i in tl.range(begin, whole, num_stages=1):
        position = origin + i * tile + tl.arange(0, tile)
        sums, peak, total = _add_tile(
            q, k_at, v_at, table_at, window_at, first, until, position, high, scale,
            sums, peak, total, D, k_heads, page, nodes, ones, True,
        )  # fmt: skip
    for i in range(whole, partly):
        position = origin + i * tile + tl.arange(0, tile)
        sums, peak, total = _add_tile(
            q, k_at, v_at, table_at, window_at, first, until, position, high, scale,
            sums, peak, total, D, k_heads, page, nodes, ones, False,
        )  # fmt: skip
    for i in tl.range(partly, end, num_stages=1):
        position = origin + i * tile + tl.arange(0, tile)
        sums, peak, total = _add_tile(
            q, k_at, v_at, table_at, window_at, first, until, position, high, scale,
            sums, peak, total, D, k_heads, page, nodes, ones, True,
        )  # fmt: skip

    place = (split * num_rows + row.to(tl.int64)) * q_heads + q_head
    tl.store(sums_at + place[:, None] * D + column, sums, mask=(row < stop)[:, None])
    tl.store(peaks_at + place, peak, mask=row < stop)
    tl.store(totals_at + place, tl.max(total, axis=1), mask=row < stop)


@triton.jit
def _add_tile(
    q,
    k_at,
    v_at,
    table_at,
    window_at,
    first,
    until,
    position,
    high,
    scale,
    sums,
    peak,
    total,
    D: tl.constexpr,
    k_heads: tl.constexpr,
    page: tl.constexpr,
    nodes: tl.constexpr,
    ones: tl.constexpr,
    is_masked: tl.constexpr,
):
    """Adds the positions of one tile to the sums of the weighted values and of the weights."""
    inside = position < high
    if is_masked:
        number = tl.load(table_at + position // page, mask=inside, other=0)
    else:
        number = tl.load(table_at + position // page)
    offset = ((number.to(tl.int64) * page + position % page) * (k_heads * D))[:, None]
    if is_masked:
        k = tl.load(k_at + offset, mask=inside[:, None], other=0.0)
        v = tl.load(v_at + offset, mask=inside[:, None], other=0.0)
    else:
        k = tl.load(k_at + offset)
        v = tl.load(v_at + offset)
    # "ieee": float32 stays float32, no tf32
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if is_masked:
        seen = (position[None, :] >= first[:, None]) & (position[None, :] < until[:, None])
        if nodes > 0:
            place = position[None, :] - until[:, None]
            in_window = (place >= 0) & (place < nodes)
            seen |= tl.load(window_at + place, mask=in_window, other=0).to(tl.int32) != 0
        scores = tl.where(seen, scores, _NEGATIVE)
        # 0 x NaN is NaN: such values are taken out, and given back to the rows that see them.
        spoiled = tl.max(tl.where(tl.abs(v) < float("inf"), 0, 1), axis=1)  # [tile]
        v = tl.where(spoiled[:, None] == 0, v, 0.0).to(v.dtype)
        harmed = tl.max(tl.where(seen, spoiled[None, :], 0), axis=1)  # [lanes]
        sums = tl.where(harmed[:, None] == 0, sums, float("nan"))
    highest = tl.maximum(peak, tl.max(scores, axis=1))
    decay = tl.exp2(peak - highest)[:, None]
    weights = tl.exp2(scores - highest[:, None])
    if is_masked:
        weights = tl.where(seen, weights, 0.0)
    weights = weights.to(v.dtype)
    # The matrix unit adds in one order for any number of rows; a sum over lanes does not.
    units = tl.full((position.shape[0], ones), 1.0, v.dtype)
    total = total * decay + tl.dot(weights, units, input_precision="ieee")
    sums = sums * decay + tl.dot(weights, v, input_precision="ieee")
    return sums, highest, total


@triton.jit
def _combine_kernel(
    sums_at,
    peaks_at,
    totals_at,
    starts_at,
    first_at,
    until_at,
    out_at,
    num_requests,
    num_rows,
    reach,
    heads: tl.constexpr,
    D: tl.constexpr,
    split_length: tl.constexpr,
    nodes: tl.constexpr,
):
    """One program per row and head: adds the splits that the row reaches, in order."""
    row, head = tl.program_id(0), tl.program_id(1)
    column = tl.arange(0, D)
    first, until = tl.load(first_at + row), tl.load(until_at + row)
    low = tl.minimum(first, until) // split_length
    high = tl.cdiv(tl.minimum(until + nodes, reach), split_length)
    if row >= tl.load(starts_at + num_requests):
        high = low
    sums = tl.zeros((D,), tl.float32)
    peak = tl.full((), _NEGATIVE, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for split in range(low, high):
        place = (split * num_rows + row.to(tl.int64)) * heads + head
        theirs = tl.load(peaks_at + place)
        highest = tl.maximum(peak, theirs)
        ours, theirs = tl.exp2(peak - highest), tl.exp2(theirs - highest)
        sums = sums * ours + tl.load(sums_at + place * D + column) * theirs
        total = total * ours + tl.load(totals_at + place) * theirs
        peak = highest
    out = sums / tl.maximum(total, 1e-30)
    place = (row.to(tl.int64) * heads + head) * D
    tl.store(out_at + place + column, out.to(out_at.dtype.element_ty))
