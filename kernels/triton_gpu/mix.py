"""An attention layer between its two products, in one Triton kernel, where rows are few.

The programs of a request and key head share its positions. Each writes the new keys and values of
its own positions before it reads them; the last to arrive combines what all have summed. The order
of the sums is that of `attend`, so a row has the same bits however many rows and programs there
are. What tells the rows' positions is read before the kernel before has ended, which must not have
written it.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import MixTiles
from kernels.triton_gpu.attention import (
    LOG2_E,
    NEGATIVE,
    Sums,
    add_tile,
    add_whole,
    clear_padding,
    finish,
    fold_split,
    no_split,
    no_sums,
    offsets,
    page_of,
)
from kernels.triton_gpu.columns import columns_of, in_head, load_head
from kernels.triton_gpu.heads import Heads, Pool, Turning, fetch, projected_of, turn, write_pair
from kernels.triton_gpu.linear import launching
from kernels.triton_gpu.parts import combine, store_unit
from kernels.triton_gpu.reach import bounds_of, is_in, pack, sees


def mix(
    projected: Float[Tensor, "R outputs"],
    q_norm: Float[Tensor, " D"] | None,
    k_norm: Float[Tensor, " D"] | None,
    cos: Float[Tensor, "R half"],
    sin: Float[Tensor, "R half"],
    kv: Float[Tensor, "L 2 P page Hk D"],
    layer: int,
    bounds: Int[Tensor, "B bounds"],
    arrivals: Int[Tensor, "B counters"],
    page_table: Int[Tensor, "B table"],
    row_starts: Int[Tensor, " B1"],
    places: Int[Tensor, " R"],
    first: Int[Tensor, " R"],
    until: Int[Tensor, " R"],
    window: Bool[Tensor, "R N"],
    is_real: Bool[Tensor, " R"],
    q: Float[Tensor, "R Hq D"] | None = None,
    *,
    gated: bool,
    eps: float,
    digits: int,
    max_rows: int,
    span: int,
    split: int,
    tile: int,
    most_parts: int,
    tiles: MixTiles,
) -> Float[Tensor, "R outputs_of_heads"]:
    """As `shared.spec.mix.mix`, for rows that lie together request by request.

    Args:
      projected, q_norm, k_norm, cos, sin, kv, layer, page_table, places, is_real: See `place`.
      gated, eps, digits: The same.
      q: Of `place`, which has written the new keys and values too; None: that is done here.
      bounds, arrivals: Of `reach`; the second is zeros again afterwards.
      row_starts, first, until, window, max_rows, span, split, tile: See `attend`. Where there is a
        window, all rows of a request have the same `until`.
      most_parts: Most splits of a row whose sums are kept; those of longer ones, by span.
      tiles: How the work is cut otherwise.

    Raises:
      ValueError: The pools are not contiguous.
    """
    if not kv.is_contiguous():
        raise ValueError("the pools must be contiguous")
    read = (projected, cos, sin, page_table, row_starts, places, first, until, window, is_real)
    projected, cos, sin, page_table, row_starts, places, *read = (x.contiguous() for x in read)
    first, until, window, is_real = read
    R, (page, Hk, D) = len(projected), kv.shape[3:]
    B, columns = page_table.shape
    Hq = (projected.shape[1] // D - 2 * Hk) // (1 + gated)
    pairs = max_rows * (Hq // Hk)
    lanes = min(tiles.lanes, max(16, triton.next_power_of_2(pairs)))
    blocks = triton.cdiv(pairs, lanes)
    splits = triton.cdiv(columns * page, split)
    parts = max(min(splits, most_parts), triton.cdiv(columns * page, span))
    sums = projected.new_empty((parts, R, Hq, D), dtype=torch.float32)
    peaks, totals = projected.new_empty((2, parts, R, Hq), dtype=torch.float32)
    out = projected.new_empty((R, Hq * D))
    programs = min(tiles.programs, triton.cdiv(splits, tiles.splits))
    _mix_kernel[(blocks * Hk, B, programs)](
        projected_of(projected, q_norm, k_norm, cos, sin, eps),
        Pool(k=kv[layer, 0], v=kv[layer, 1], table=page_table),
        *(bounds, arrivals, row_starts, places),
        *(
            first,
            until,
            window if window.shape[1] else until,
            is_real,
            projected if q is None else q,
            sums,
            peaks,
            totals,
            out,
        ),
        *(R, B, columns, D**-0.5 * LOG2_E.value, most_parts),
        heads=Heads(q_heads=Hq, k_heads=Hk, D=D, page=page, gated=gated),
        turning=Turning(half=cos.shape[1], has_norms=k_norm is not None, digits=digits),
        is_placed=q is not None,
        lanes=lanes,
        blocks=blocks,
        new_rows=triton.next_power_of_2(max_rows),
        ones=tiles.ones,
        splits=tiles.splits,
        unroll=max(1, min(8, 16 * 128 * 8 // (lanes * triton.next_power_of_2(D)))),
        span=span,
        split=split,
        tile=tile,
        nodes=window.shape[1],
        may_span=splits > most_parts,
        num_counters=arrivals.shape[1],
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers or None,
        **launching(projected),
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_requests", "columns", "most_parts"])
def _mix_kernel(
    projected,
    pool,
    bounds_at,
    arrivals_at,
    starts_at,
    places_at,
    first_at,
    until_at,
    window_at,
    real_at,
    q_at,
    sums_at,
    peaks_at,
    totals_at,
    out_at,
    num_rows,
    num_requests,
    columns,
    scale,
    most_parts,
    heads: tl.constexpr,
    turning: tl.constexpr,
    is_placed: tl.constexpr,
    lanes: tl.constexpr,
    blocks: tl.constexpr,
    new_rows: tl.constexpr,
    ones: tl.constexpr,
    splits: tl.constexpr,
    unroll: tl.constexpr,
    span: tl.constexpr,
    split: tl.constexpr,
    tile: tl.constexpr,
    nodes: tl.constexpr,
    may_span: tl.constexpr,
    num_counters: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of lanes of a key head, request, and share of the positions."""
    q_heads: tl.constexpr = heads.q_heads
    k_heads: tl.constexpr = heads.k_heads
    D: tl.constexpr = heads.D
    gated: tl.constexpr = heads.gated
    page: tl.constexpr = heads.page
    group: tl.constexpr = q_heads // k_heads
    width: tl.constexpr = (q_heads * (1 + gated) + 2 * k_heads) * D
    head, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    request, share = tl.program_id(1), tl.program_id(2)
    bounds = bounds_of(bounds_at, request)
    start, stop = tl.load(starts_at + request), tl.load(starts_at + request + 1)
    num_real = tl.load(starts_at + num_requests)
    high = tl.minimum(bounds.seen_until + nodes, columns * page)
    by_span, unit = False, split
    if may_span:
        by_span = tl.cdiv(high, split) - bounds.low // split > most_parts
        unit = tl.where(by_span, span, split)
    begin = tl.minimum(bounds.low, bounds.new_from) // unit
    end = tl.cdiv(tl.maximum(high, bounds.new_until), unit)
    end = tl.maximum(end, begin + 1)  # one that writes 0, where nothing is seen
    fewest = tl.where(by_span, 1, splits)
    each = tl.cdiv(end - begin, tl.minimum(tl.num_programs(2), tl.cdiv(end - begin, fewest)))
    sharing = tl.where(start + block * lanes // group < stop, tl.cdiv(end - begin, each), 0)
    # A program that has a whole request of one span to itself keeps its sums.
    is_alone = False
    if splits > 1:
        per_span = span // unit
        is_alone = (each == end - begin) & (begin // per_span == (end - 1) // per_span)
    if (share > 0) & (share >= sharing):
        return
    share_begin = (begin + share * each) * unit
    share_end = share_begin + each * unit  # of the next program
    from_position, to_position = tl.maximum(bounds.low, share_begin), tl.minimum(high, share_end)
    own_pool = Pool(k=pool.k, v=pool.v, table=pool.table + request * columns)
    number = page_of(own_pool.table, columns, from_position // tile, page, tile)
    lane = block * lanes + tl.arange(0, lanes)
    row, q_head = start + lane // group, head * group + lane % group
    lane_row = tl.maximum(tl.minimum(row, stop - 1), 0)  # spare lanes are not written
    first, until = tl.load(first_at + lane_row), tl.load(until_at + lane_row)
    new = start + tl.arange(0, new_rows)
    is_new = new < stop
    place = tl.load(places_at + new, mask=is_new, other=0)
    is_new &= tl.load(real_at + new, mask=is_new, other=0).to(tl.int32) != 0

    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    if (share == 0) & (block == 0):
        clear_padding(num_real + request, out_at, num_rows, num_requests, head, group, k_heads, D)
    if share >= sharing:
        return
    # Where programs are few, before what some of them do first; else registers are scarce.
    is_early: tl.constexpr = splits == 1 and not is_placed
    head_place = lane_row.to(tl.int64) * width + q_head * ((1 + gated) * D)
    if is_early:
        fetched = fetch(
            projected, projected.q_norm, head_place, lane_row, row < stop, heads, turning
        )
    if not is_placed:  # noqa: SIM102 - settled when it is compiled
        if (bounds.new_from < share_end) & (bounds.new_until > share_begin):
            is_written = is_new & (place >= share_begin) & (place < share_end)
            offset = new.to(tl.int64) * width
            write_pair(projected, own_pool, offset, new, is_written, place, head, heads, turning)
            tl.debug_barrier()  # they are read by other threads than wrote them
    place_of_lane = lane_row.to(tl.int64) * q_heads + q_head
    if is_placed:
        q = load_head(q_at + place_of_lane[:, None] * D + columns_of(D)[None, :], D)
    else:
        if not is_early:
            fetched = fetch(
                projected, projected.q_norm, head_place, lane_row, row < stop, heads, turning
            )
        q = turn(fetched, projected.eps, heads, turning).to(projected.rows.dtype.element_ty)
    window = pack(window_at, lane_row, nodes)
    is_bad = tl.zeros((new_rows,), tl.int1)
    if new_rows > 1:
        at = new.to(tl.int64) * width + (q_heads * (1 + gated) + k_heads + head) * D
        is_bad = _is_bad(projected.rows, at, is_new, D)
    sums = _sum_share(
        q, pool.k + head * D, pool.v + head * D, own_pool.table, columns, number,
        first, until, bounds, window, place, is_bad, from_position, to_position, scale,
        sums_at, peaks_at, totals_at, place_of_lane, row < stop, bounds.low // unit,
        num_rows * q_heads,
        unit, is_alone, heads, nodes, ones, split, tile, may_span | (splits > 1),
    )  # fmt: skip
    is_last = is_alone
    if not is_alone:
        tl.debug_barrier()
        counter = arrivals_at + request * num_counters + tl.program_id(0)
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == sharing - 1
        if is_last:
            tl.store(counter, 0)
            sums = combine(
                sums_at, peaks_at, totals_at, place_of_lane, bounds.low // unit,
                tl.where(bounds.low < high, tl.cdiv(high, unit), bounds.low // unit),
                tl.where(by_span, 1 << 20, span // split), num_rows * q_heads, lanes, D, unroll,
            )  # fmt: skip
    if is_last:
        if new_rows > 1:
            seen = sees(place, first, until, window, nodes) & is_bad[None, :]
            is_harmed = tl.max(seen.to(tl.int32), axis=1) > 0
            values = tl.where(is_harmed[:, None], float("nan"), sums.value)
            sums = Sums(value=values, peak=sums.peak, total=sums.total)
        finish(sums, projected.rows, head_place + D, out_at, place_of_lane, row < stop, D, gated)


@triton.jit
def _is_bad(projected_at, at, is_new, D: tl.constexpr):
    """Which new rows have a value that is no number.

    0 x NaN is NaN: such values are not read, and given back to the rows that see them.
    """
    keep = in_head(is_new[:, None], D)
    v = tl.load(projected_at + at[:, None] + columns_of(D)[None, :], mask=keep, other=0)
    return tl.max(tl.where(tl.abs(v) < float("inf"), 0, 1), axis=1) > 0


@triton.jit
def _sum_share(
    q,
    k_at,
    v_at,
    table_at,
    columns,
    number,
    first,
    until,
    bounds,
    window,
    place,
    is_bad,
    low,
    high,
    scale,
    sums_at,
    peaks_at,
    totals_at,
    place_of_lane,
    is_lane,
    base,
    stride,
    unit,
    is_alone,
    heads: tl.constexpr,
    nodes: tl.constexpr,
    ones: tl.constexpr,
    split: tl.constexpr,
    tile: tl.constexpr,
    may_gather: tl.constexpr,
):
    """Sums the positions from low to high, tiles to splits and splits to units, which are stored.

    A unit is a split, or a span. The first has number `base`, and one is `stride` places after
    another. Who is alone stores none. Gives the sums that are not stored. What no row sees is not
    read.
    """
    lanes: tl.constexpr = q.shape[0]
    D: tl.constexpr = heads.D
    sums, u_sums = no_split(lanes, D, ones), no_sums(lanes, D)
    begin = low // tile
    end = tl.where(low < high, tl.cdiv(high, tile), begin)
    # Tiles that every lane sees whole, and of which nothing is new, need no mask.
    whole = tl.minimum(tl.minimum(tl.min(until), bounds.new_from) // tile, end)
    whole = tl.where(tl.max(first) <= begin * tile, tl.maximum(whole, begin), begin)
    for i in range(begin, whole):
        position, offset, number = offsets(table_at, columns, number, i, tile, heads)
        sums = add_whole(q, k_at + offset, v_at + offset, scale, sums, D)
        sums, u_sums = _close(
            i, end, sums, u_sums,
            sums_at, peaks_at, totals_at, place_of_lane, is_lane, base, stride, unit, is_alone,
            D, ones, split, tile, may_gather,
        )  # fmt: skip
    for i in range(whole, end):
        position, offset, number = offsets(table_at, columns, number, i, tile, heads)
        is_read = (position >= bounds.seen_from) & (position < bounds.seen_until)
        if nodes > 0:
            is_read |= is_in(window[2], window[3], position - bounds.seen_until, nodes)
        if is_bad.shape[0] > 1:
            is_one = (position[:, None] == place[None, :]) & is_bad[None, :]
            is_read &= tl.max(is_one.to(tl.int32), axis=1) == 0
        keep = in_head(is_read[:, None], D)
        k = tl.load(k_at + offset, mask=keep, other=0.0)
        v = tl.load(v_at + offset, mask=keep, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = sees(position, first, until, window, nodes)
        scores = tl.where(seen, scores, NEGATIVE)
        highest = tl.maximum(sums.peak, tl.max(scores, axis=1))
        weights = tl.where(seen, tl.exp2(scores - highest[:, None]), 0.0).to(v.dtype)
        sums = add_tile(sums, highest, weights, v)
        sums, u_sums = _close(
            i, end, sums, u_sums,
            sums_at, peaks_at, totals_at, place_of_lane, is_lane, base, stride, unit, is_alone,
            D, ones, split, tile, may_gather,
        )  # fmt: skip
    return u_sums


@triton.jit
def _close(
    i,
    end,
    sums,
    u_sums,
    sums_at,
    peaks_at,
    totals_at,
    place_of_lane,
    is_lane,
    base,
    stride,
    unit,
    is_alone,
    D: tl.constexpr,
    ones: tl.constexpr,
    split: tl.constexpr,
    tile: tl.constexpr,
    may_gather: tl.constexpr,
):
    """After the last tile of a split adds it to its unit, and after the last split stores that."""
    lanes: tl.constexpr = sums.peak.shape[0]
    after, is_last = (i + 1) * tile, i + 1 == end
    if (after % split == 0) | is_last:
        at = (i * tile // unit - base) * stride + place_of_lane
        if may_gather:
            u_sums = fold_split(u_sums, sums)
            if ((after % unit == 0) | is_last) & (not is_alone):
                store_unit(sums_at, peaks_at, totals_at, at, u_sums, is_lane, D)
                u_sums = no_sums(lanes, D)
        else:
            total = tl.max(sums.total, axis=1)
            done = Sums(value=sums.value, peak=sums.peak, total=total)
            store_unit(sums_at, peaks_at, totals_at, at, done, is_lane, D)
        sums = no_split(lanes, D, ones)
    return sums, u_sums
