"""Attention of flat rows over paged KV, in Triton.

A program sums the positions of one block of rows of one request and one key head. Tiles, splits
and spans lie at fixed positions, so the order of a row's sums depends on nothing but where the row
stands: not on the batch, not on how many rows its request has. What must stay equal in the Pallas
twin is listed in `kernels/__init__.py`.
"""

import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import AttentionTiles
from kernels.triton_gpu.columns import columns_of, in_head, load_head, store_head
from kernels.triton_gpu.linear import launching

LOG2_E = tl.constexpr(1.4426950408889634)
NEGATIVE = tl.constexpr(-1e30)  # finite, since -inf minus -inf is NaN where a row sees nothing


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
    *,
    max_rows: int,
    span: int,
    split: int,
    tile: int,
    tiles: AttentionTiles,
) -> Float[Tensor, "R outputs_of_heads"]:
    """As `shared.spec.attention.attend`, for rows that lie together request by request.

    A block of rows is one program's, however long the context, so nothing is kept on the way.

    Args:
      q: Queries; D is one of `kernels.limits.HEAD_SIZES`.
      gate: The projection that the queries come from, if each has its gate there behind it.
      kv, layer: The pools of all layers, and which is read.
      page_table, first, until, window: As in the specification.
      row_starts: First flat row of each request, and the end; rows past it are padding.
      max_rows: Most rows that a request can have.
      span, split, tile: Positions of each: the order of the sums.
      tiles: How the work is cut otherwise.

    Raises:
      ValueError: The pools are not contiguous.
    """
    if not kv.is_contiguous():
        raise ValueError("the pools must be contiguous")
    q, page_table, first, until, window = (
        x.contiguous() for x in (q, page_table, first, until, window)
    )
    R, Hq, D = q.shape
    page, Hk = kv.shape[3:5]
    B, columns = page_table.shape
    out = q.new_empty((R, Hq * D))
    blocks = triton.cdiv(max_rows * (Hq // Hk), tiles.lanes)
    _attend_kernel[(blocks, Hk, B)](
        *(q, q if gate is None else gate, kv[layer, 0], kv[layer, 1], page_table),
        *(row_starts, first, until, window if window.shape[1] else until, out),
        *(R, B, columns, D**-0.5 * LOG2_E.value),
        q_heads=Hq,
        k_heads=Hk,
        D=D,
        gated=gate is not None,
        page=page,
        lanes=tiles.lanes,
        ones=tiles.ones,
        span=span,
        split=split,
        tile=tile,
        nodes=window.shape[1],
        unroll=min(tiles.unroll, split // tile),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launching(q),
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_requests", "columns"])
def _attend_kernel(
    q_at,
    gate_at,
    k_at,
    v_at,
    table_at,
    starts_at,
    first_at,
    until_at,
    window_at,
    out_at,
    num_rows,
    num_requests,
    columns,
    scale,
    q_heads: tl.constexpr,
    k_heads: tl.constexpr,
    D: tl.constexpr,
    gated: tl.constexpr,
    page: tl.constexpr,
    lanes: tl.constexpr,
    ones: tl.constexpr,
    span: tl.constexpr,
    split: tl.constexpr,
    tile: tl.constexpr,
    nodes: tl.constexpr,
    unroll: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of rows, key head and request."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    group: tl.constexpr = q_heads // k_heads
    # The last rows see the most: their programs, which take longest, begin first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, request = tl.program_id(1), tl.program_id(2)
    turn, turns = request * tl.num_programs(0) + block, num_requests * tl.num_programs(0)
    padding = tl.load(starts_at + num_requests)
    clear_padding(padding + turn, out_at, num_rows, turns, head, group, k_heads, D)
    start, stop = tl.load(starts_at + request), tl.load(starts_at + request + 1)
    if start + block * lanes // group >= stop:
        return
    lane = block * lanes + tl.arange(0, lanes)
    row, q_head = start + lane // group, head * group + lane % group
    own = tl.minimum(row, stop - 1)  # spare lanes repeat the last row and are not written
    first, until = tl.load(first_at + own), tl.load(until_at + own)
    low = tl.min(tl.minimum(first, until))
    high = tl.minimum(tl.max(until) + nodes, columns * page)
    place = own.to(tl.int64) * q_heads + q_head
    q = load_head(q_at + place[:, None] * D + columns_of(D)[None, :], D)
    sums, total = _sum_positions(
        q, k_at + head * D, v_at + head * D, table_at + request * columns, columns,
        window_at + own[:, None] * nodes, first, until, low, high, scale,
        D, k_heads, page, nodes, ones, span, split, tile, unroll,
    )  # fmt: skip
    gate_place = own.to(tl.int64) * ((2 * q_heads + 2 * k_heads) * D) + (2 * q_head + 1) * D
    finish(sums, total, gate_at, gate_place, out_at, place, row < stop, D, gated)


@triton.jit
def clear_padding(
    begin, out_at, num_rows, turns, head, group: tl.constexpr, k_heads: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Writes 0 for a key head's queries of every `turns`th row from `begin` on."""
    column = columns_of(D)
    zeros = tl.zeros(column.shape, out_at.dtype.element_ty)
    for row in range(begin, num_rows, turns):
        for member in tl.static_range(group):
            place = (row * k_heads + head.to(tl.int64)) * group + member
            store_head(out_at + place * D + column, zeros, D)


@triton.jit
def _sum_positions(
    q, k_at, v_at, table_at, columns, window_at, first, until, low, high, scale, D: tl.constexpr,
    k_heads: tl.constexpr, page: tl.constexpr, nodes: tl.constexpr, ones: tl.constexpr,
    span: tl.constexpr, split: tl.constexpr, tile: tl.constexpr, unroll: tl.constexpr,
):  # fmt: skip
    """Sums the positions from low to high: tiles to splits, splits to spans, and spans to a whole.

    Gives the values and the weights.
    """
    lanes: tl.constexpr = q.shape[0]
    tiles: tl.constexpr = split // tile
    splits: tl.constexpr = span // split
    whole_sums, whole_peak, whole_total = no_sums(lanes, D)
    begin = low // tile
    end = tl.where(low < high, tl.cdiv(high, tile), begin)
    # The splits that every row sees whole need no mask.
    whole = tl.minimum(tl.maximum(tl.cdiv(tl.max(first), split) * tiles, begin), end)
    partly = tl.minimum(tl.maximum(tl.min(until) // split * tiles, whole), end)
    # A loop of its own: what is summed over spans need not be at hand within one.
    for number in tl.range(low // span, tl.cdiv(high, span), num_stages=1):
        start, stop = number * splits * tiles, tl.minimum((number + 1) * splits * tiles, end)
        sums, peak, total = no_sums(lanes, D)
        sums, peak, total = _add_tiles(
            q, k_at, v_at, table_at, window_at, first, until, tl.maximum(start, begin),
            tl.minimum(whole, stop), end, high, scale, sums, peak, total,
            D, k_heads, page, nodes, ones, split, tile,
        )  # fmt: skip
        first_step = tl.cdiv(tl.maximum(start, whole), unroll)
        next_page = page_of(table_at, columns, first_step * unroll, page, tile)
        own, own_peak, own_total = _no_split(lanes, D, ones)
        for i in range(first_step, tl.minimum(partly, stop) // unroll):
            for j in tl.static_range(unroll):
                _, offset, next_page = offsets(
                    table_at, columns, next_page, i * unroll + j, D, k_heads, page, tile
                )
                own, own_peak, own_total = add_whole(
                    q, k_at + offset, v_at + offset, scale, own, own_peak, own_total, D, ones
                )
            # A step that is a split is known when it is compiled.
            is_end = True
            if unroll < tiles:
                is_end = (i + 1) * unroll % tiles == 0
            if is_end:
                sums, peak, total = fold(
                    sums, peak, total, own, own_peak, tl.max(own_total, axis=1)
                )
                own, own_peak, own_total = _no_split(lanes, D, ones)
        sums, peak, total = _add_tiles(
            q, k_at, v_at, table_at, window_at, first, until, tl.maximum(start, partly), stop, end,
            high, scale, sums, peak, total, D, k_heads, page, nodes, ones, split, tile,
        )  # fmt: skip
        whole_sums, whole_peak, whole_total = fold(
            whole_sums, whole_peak, whole_total, sums, peak, total
        )
    return whole_sums, whole_total


@triton.jit
def _add_tiles(
    q, k_at, v_at, table_at, window_at, first, until, begin, stop, end, high, scale, sums, peak,
    total, D: tl.constexpr, k_heads: tl.constexpr, page: tl.constexpr, nodes: tl.constexpr,
    ones: tl.constexpr, split: tl.constexpr, tile: tl.constexpr,
):  # fmt: skip
    """Adds tiles of which some row does not see all to the sums of a span, split by split."""
    lanes: tl.constexpr = q.shape[0]
    own, own_peak, own_total = _no_split(lanes, D, ones)
    for i in tl.range(begin, stop, num_stages=1):
        own, own_peak, own_total = _add_masked(
            q, k_at, v_at, table_at, window_at, first, until, i, high, scale,
            own, own_peak, own_total, D, k_heads, page, nodes, ones, tile,
        )  # fmt: skip
        if ((i + 1) * tile % split == 0) | (i + 1 == end):
            sums, peak, total = fold(sums, peak, total, own, own_peak, tl.max(own_total, axis=1))
            own, own_peak, own_total = _no_split(lanes, D, ones)
    return sums, peak, total


@triton.jit
def page_of(table_at, columns, i, page: tl.constexpr, tile: tl.constexpr):
    """The page in which a tile begins."""
    return tl.load(table_at + tl.minimum(i * tile // page, columns - 1))


@triton.jit
def offsets(
    table_at,
    columns,
    number,
    i,
    D: tl.constexpr,
    k_heads: tl.constexpr,
    page: tl.constexpr,
    tile: tl.constexpr,
):
    """A tile's positions and where they lie in a pool, and the page of the next tile.

    A page of whole tiles is asked for one tile ahead, so that its keys need not wait for it.
    """
    position = i * tile + tl.arange(0, tile)
    if page % tile == 0:
        pages = number
        number = page_of(table_at, columns, i + 1, page, tile)
    else:
        pages = tl.load(table_at + tl.minimum(position // page, columns - 1))
    offset = ((pages.to(tl.int64) * page + position % page) * (k_heads * D))[:, None]
    return position, offset + columns_of(D)[None, :], number


@triton.jit
def no_sums(lanes: tl.constexpr, D: tl.constexpr):
    """The sums over no position: values, highest score, weights."""
    peak = tl.full((lanes,), NEGATIVE, tl.float32)
    block: tl.constexpr = triton.next_power_of_2(D)
    return tl.zeros((lanes, block), tl.float32), peak, tl.zeros((lanes,), tl.float32)


@triton.jit
def _no_split(lanes: tl.constexpr, D: tl.constexpr, ones: tl.constexpr):
    """The same of a split, whose weights are in columns."""
    sums, peak, _ = no_sums(lanes, D)
    return sums, peak, tl.zeros((lanes, ones), tl.float32)


@triton.jit
def add_whole(q, k_at, v_at, scale, sums, peak, total, D: tl.constexpr, ones: tl.constexpr):
    """Adds a tile that every row sees whole."""
    k, v = load_head(k_at, D), load_head(v_at, D)
    # "ieee": float32 stays float32, no tf32
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    highest = tl.maximum(peak, tl.max(scores, axis=1))
    weights = tl.exp2(scores - highest[:, None]).to(v.dtype)
    return add_tile(sums, peak, total, highest, weights, v, ones)


@triton.jit
def _add_masked(
    q,
    k_at,
    v_at,
    table_at,
    window_at,
    first,
    until,
    i,
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
    tile: tl.constexpr,
):
    """Adds a tile of which some row does not see all."""
    position = i * tile + tl.arange(0, tile)
    inside = position < high
    number = tl.load(table_at + position // page, mask=inside, other=0)
    offset = ((number.to(tl.int64) * page + position % page) * (k_heads * D))[:, None]
    offset += columns_of(D)[None, :]
    keep = in_head(inside[:, None], D)
    highest, weights = peak, tl.zeros((peak.shape[0], tile), q.dtype)
    v = tl.zeros((tile, q.shape[1]), q.dtype)
    # Always so. What comes out of a branch has lost the narrow types that it was made of, by which
    # Triton would choose how the matrix unit reads it, and so the order of its sums.
    if i * tile < high:
        k = tl.load(k_at + offset, mask=keep, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (position[None, :] >= first[:, None]) & (position[None, :] < until[:, None])
        if nodes > 0:
            node = position[None, :] - until[:, None]
            in_window = (node >= 0) & (node < nodes)
            seen |= tl.load(window_at + node, mask=in_window, other=0).to(tl.int32) != 0
        scores = tl.where(seen, scores, NEGATIVE)
        highest = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.where(seen, tl.exp2(scores - highest[:, None]), 0.0).to(q.dtype)
        # 0 x NaN is NaN: such values are taken out, and given back to the rows that see them.
        v = tl.load(v_at + offset, mask=keep, other=0.0)
        spoiled = tl.max(tl.where(tl.abs(v) < float("inf"), 0, 1), axis=1)  # [tile]
        v = tl.where(spoiled[:, None] == 0, v, tl.zeros_like(v))
        harmed = tl.max(tl.where(seen, spoiled[None, :], 0), axis=1)  # [lanes]
        sums = tl.where(harmed[:, None] == 0, sums, float("nan"))
    return add_tile(sums, peak, total, highest, weights, v, ones)


@triton.jit
def add_tile(sums, peak, total, highest, weights, v, ones: tl.constexpr):
    """Adds the weighted values of a tile, and the weights."""
    decay = tl.exp2(peak - highest)[:, None]
    # The matrix unit adds in one order for any number of rows; a sum over lanes does not.
    units = tl.full((v.shape[0], ones), 1.0, v.dtype)
    total = total * decay + tl.dot(weights, units, input_precision="ieee")
    sums = sums * decay + tl.dot(weights, v, input_precision="ieee")
    return sums, highest, total


@triton.jit
def fold(sums, peak, total, more_sums, more_peak, more_total):
    """Adds the sums over some positions to those over the positions before."""
    highest = tl.maximum(peak, more_peak)
    ours, theirs = tl.exp2(peak - highest), tl.exp2(more_peak - highest)
    sums = sums * ours[:, None] + more_sums * theirs[:, None]
    return sums, highest, total * ours + more_total * theirs


@triton.jit
def finish(
    sums, total, gate_at, gate_place, out_at, place, is_lane, D: tl.constexpr, gated: tl.constexpr
):
    """Divides by the weights, and multiplies by the gate; writes the heads of some rows."""
    column, keep = columns_of(D)[None, :], in_head(is_lane[:, None], D)
    out = sums / tl.maximum(total, 1e-30)[:, None]
    if gated:
        gate = tl.load(gate_at + gate_place[:, None] + column, mask=keep, other=0.0)
        out = out / (1.0 + tl.exp2(gate.to(tl.float32) * -LOG2_E))
    tl.store(out_at + place[:, None] * D + column, out.to(out_at.dtype.element_ty), mask=keep)
