"""Fused split-KV (flash-decoding) attention layer between its two GEMMs (Triton).

The kernel serves steps of few rows. The programs of a request and KV head split its positions. Each
writes the new keys and values of its positions before it reads them, except in a layer that reads
the KV of another layer. The last program to arrive combines the partial results. The reduction
order equals that of `attend`: the bits of a row do not depend on the number of rows and programs,
and those of a tree's row equal plain decoding.
The positions of the rows are read before the previous kernel has ended, which must not write them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import DecodeAttentionTiles
from kernels.tree_blocks import tree_blocks
from kernels.triton_gpu.attention.attention import (
    Order,
    VisibleRange,
    clear_padding,
    finish,
    page_of,
)
from kernels.triton_gpu.attention.attention_layer_mainloop import (
    LaneRows,
    LayerRequests,
    LayerRows,
    NewRows,
    Units,
    sum_share,
)
from kernels.triton_gpu.attention.attention_layer_sm90 import attention_layer_sm90, takes
from kernels.triton_gpu.attention.attention_layer_trees import attention_layer_trees
from kernels.triton_gpu.attention.head_dim_padding import columns_of, load_head
from kernels.triton_gpu.attention.online_softmax import LOG2_E, softcap_of, with_sink
from kernels.triton_gpu.attention.qk_norm_rope_kv_write import (
    HeadSizes,
    Pool,
    RopeArgs,
    fetch,
    is_bad_line,
    projected_of,
    rotate,
    write_pair,
)
from kernels.triton_gpu.attention.row_bounds import bits_of, bounds_of
from kernels.triton_gpu.attention.split_kv import SplitPartials, combine
from kernels.triton_gpu.gemm.linear import launching


class AttentionLayerConfig(NamedTuple):
    """Tile config of the kernel.

    Attributes:
      lanes, blocks: (row, query head) pairs of a program, and programs per KV head.
      splits: Minimum splits of a program.
      unroll: Units combined per loop step.
      new_rows: Maximum rows of a request, rounded up to a power of two.
      counters: Arrival counters of a request.
      has_kv: Whether the projection has new keys and values; if not, the pools have them.
      is_placed: Whether `place` has already written the new keys and values.
      may_span: Whether partial results may be per span.
      path_rows, path_stages: Rows and pipeline stages of a step over a tree's window.
    """

    lanes: int
    blocks: int
    splits: int
    unroll: int
    new_rows: int
    counters: int
    has_kv: bool
    is_placed: bool
    may_span: bool
    path_rows: int
    path_stages: int


def attention_layer(
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
    paths: Int[Tensor, "R N"],
    is_real: Bool[Tensor, " R"],
    q: Float[Tensor, "R Hq D"] | None = None,
    sinks: Float[Tensor, " Hq"] | None = None,
    *,
    gated: bool,
    has_kv: bool,
    eps: float,
    digits: int,
    max_rows: int,
    span: int,
    split: int,
    tile: int,
    max_parts: int,
    scale: float,
    softcap: float | None = None,
    tiles: DecodeAttentionTiles,
) -> Float[Tensor, "R outputs_of_heads"]:
    """Same as `shared.spec.attention_layer.attention_layer`, for flat rows grouped by request.

    Args:
      projected, q_norm, k_norm, cos, sin, kv, layer, page_table, places, is_real: See `place`.
      gated, has_kv, eps, digits: See `place`.
      q: Queries from `place`, which has also written keys and values; None to do both here.
      bounds, arrivals, paths: From `compute_row_bounds`; `arrivals` is zero again afterwards.
      row_starts, first, until, sinks, max_rows, span, split, tile, scale, softcap: See `attend`.
        With a tree, all rows of a request have the same `until`, and are written from there on.
      max_parts: Maximum splits of a request with partial results per split; above, per span.
      tiles: Tile config.

    Raises:
      ValueError: The pools are not contiguous.
    """
    if not kv.is_contiguous():
        raise ValueError("the pools must be contiguous")
    is_wide = tiles.described and softcap is None and not paths.shape[1]
    if is_wide and q is not None and takes(kv, tile):
        return attention_layer_sm90(
            q,
            projected if gated else None,
            kv,
            layer,
            bounds=bounds,
            arrivals=arrivals,
            page_table=page_table,
            row_starts=row_starts,
            first=first,
            until=until,
            sinks=sinks,
            max_rows=max_rows,
            span=span,
            split=split,
            scale=scale,
            tiles=tiles,
        )
    read = (projected, cos, sin, page_table, row_starts, places, first, until, paths, is_real)
    projected, cos, sin, page_table, row_starts, places, *read = (x.contiguous() for x in read)
    first, until, paths, is_real = read
    R, (page, Hk, D) = len(projected), kv.shape[3:]
    B, columns = page_table.shape
    Hq = (projected.shape[1] // D - 2 * Hk * has_kv) // (1 + gated)
    nodes = paths.shape[1]
    requests = LayerRequests(bounds=bounds, arrivals=arrivals)
    rows = LayerRows(
        starts=row_starts,
        places=places,
        is_real=is_real,
        first=first,
        until=until,
        paths=paths if nodes else until,
    )
    separate = tree_blocks(tiles, nodes=nodes, max_rows=max_rows, group=Hq // Hk)
    if q is not None and separate is not None:
        return attention_layer_trees(
            q,
            projected if gated else None,
            kv,
            layer,
            page_table,
            requests,
            rows,
            sinks,
            blocks=separate,
            max_rows=max_rows,
            span=span,
            split=split,
            tile=tile,
            max_parts=max_parts,
            scale=scale,
            softcap=softcap,
            tiles=tiles,
        )
    pairs = max_rows * (Hq // Hk)
    lanes = min(tiles.lanes, max(16, triton.next_power_of_2(pairs)))
    blocks = triton.cdiv(pairs, lanes)
    splits = triton.cdiv(columns * page, split)
    parts = max(min(splits, max_parts), triton.cdiv(columns * page, span))
    sums = projected.new_empty((parts, R, Hq, D), dtype=torch.float32)
    peaks, totals = projected.new_empty((2, parts, R, Hq), dtype=torch.float32)
    out = projected.new_empty((R, Hq * D))
    programs = min(tiles.programs, triton.cdiv(splits, tiles.splits))
    _attention_layer_kernel[(blocks * Hk, B, programs)](
        projected_of(projected, q_norm, k_norm, cos, sin, eps),
        Pool(k=kv[layer, 0], v=kv[layer, 1], table=page_table),
        requests,
        rows,
        *(projected if q is None else q, projected if sinks is None else sinks, out),
        SplitPartials(sums=sums, peaks=peaks, totals=totals),
        num_rows=R,
        num_requests=B,
        columns=columns,
        scale=scale * LOG2_E.value,
        max_parts=max_parts,
        heads=HeadSizes(
            q_heads=Hq, k_heads=Hk, D=D, page=page, gated=gated, line=projected.shape[1]
        ),
        turning=RopeArgs(half=cos.shape[1], has_norms=q_norm is not None, digits=digits),
        order=Order(
            span=span,
            split=split,
            tile=tile,
            ones=tiles.ones,
            nodes=nodes,
            softcap=softcap_of(softcap),
            has_sinks=sinks is not None,
        ),
        config=AttentionLayerConfig(
            lanes=lanes,
            blocks=blocks,
            splits=tiles.splits,
            unroll=max(1, min(8, 16 * 128 * 8 // (lanes * triton.next_power_of_2(D)))),
            new_rows=triton.next_power_of_2(max_rows),
            counters=arrivals.shape[1],
            has_kv=has_kv,
            is_placed=q is not None,
            may_span=splits > max_parts,
            path_rows=tiles.path_rows,
            path_stages=tiles.path_stages,
        ),
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        maxnreg=tiles.registers or None,
        **launching(projected),
    )
    return out


@triton.jit(do_not_specialize=["num_rows", "num_requests", "columns", "max_parts"])
def _attention_layer_kernel(
    projected,
    pool,
    requests,
    rows,
    q_at,
    sinks_at,
    out_at,
    parts,
    num_rows,
    num_requests,
    columns,
    scale,
    max_parts,
    heads: tl.constexpr,
    turning: tl.constexpr,
    order: tl.constexpr,
    config: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of lanes of a KV head, request, and share of its positions."""
    q_heads: tl.constexpr = heads.q_heads
    k_heads: tl.constexpr = heads.k_heads
    D: tl.constexpr = heads.D
    gated: tl.constexpr = heads.gated
    lanes: tl.constexpr = config.lanes
    new_rows: tl.constexpr = config.new_rows
    split: tl.constexpr = order.split
    group: tl.constexpr = q_heads // k_heads
    width: tl.constexpr = heads.line
    writes: tl.constexpr = config.has_kv and not config.is_placed
    head, block = tl.program_id(0) // config.blocks, tl.program_id(0) % config.blocks
    request, share = tl.program_id(1), tl.program_id(2)
    bounds = bounds_of(requests.bounds, request)
    start, stop = tl.load(rows.starts + request), tl.load(rows.starts + request + 1)
    num_real = tl.load(rows.starts + num_requests)
    high = tl.minimum(bounds.path_until, columns * heads.page)
    by_span, unit = False, split
    if config.may_span:
        by_span = tl.cdiv(high, split) - bounds.low // split > max_parts
        unit = tl.where(by_span, order.span, split)
    begin = tl.minimum(bounds.low, bounds.new_from) // unit
    end = tl.cdiv(tl.maximum(high, bounds.new_until), unit)
    end = tl.maximum(end, begin + 1)  # at least one, for zeros if no position is visible
    fewest = tl.where(by_span, 1, config.splits)
    each = tl.cdiv(end - begin, tl.minimum(tl.num_programs(2), tl.cdiv(end - begin, fewest)))
    sharing = tl.where(start + block * lanes // group < stop, tl.cdiv(end - begin, each), 0)
    # A program with a whole request, within one span, keeps its accumulator in registers.
    is_alone = False
    if config.splits > 1:
        per_span = order.span // unit
        is_alone = (each == end - begin) & (begin // per_span == (end - 1) // per_span)
    if (share > 0) & (share >= sharing):
        return
    share_begin = (begin + share * each) * unit
    share_end = share_begin + each * unit  # start of the next program
    from_position, to_position = tl.maximum(bounds.low, share_begin), tl.minimum(high, share_end)
    own_pool = Pool(k=pool.k, v=pool.v, table=pool.table + request * columns)
    number = page_of(own_pool.table, columns, from_position // order.tile, heads.page, order.tile)
    lane = block * lanes + tl.arange(0, lanes)
    row, q_head = start + lane // group, head * group + lane % group
    lane_row = tl.maximum(tl.minimum(row, stop - 1), 0)  # spare lanes are not written
    first, until = tl.load(rows.first + lane_row), tl.load(rows.until + lane_row)
    new = start + tl.arange(0, new_rows)
    is_new = new < stop
    place = tl.load(rows.places + new, mask=is_new, other=0)
    is_new &= tl.load(rows.is_real + new, mask=is_new, other=0).to(tl.int32) != 0

    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    if (share == 0) & (block == 0):
        clear_padding(num_real + request, out_at, num_rows, num_requests, head, group, k_heads, D)
    if share >= sharing:
        return
    # With few programs, before the KV write of some of them; else registers are scarce.
    is_early: tl.constexpr = config.splits == 1 and not config.is_placed
    head_place = lane_row.to(tl.int64) * width + q_head * ((1 + gated) * D)
    if is_early:
        fetched = fetch(
            projected, projected.q_norm, head_place, lane_row, row < stop, heads, turning
        )
    if writes:
        written_from, written_until, is_written = bounds.new_from, bounds.new_until, is_new
        if order.nodes == 0:
            is_written &= (place >= share_begin) & (place < share_end)
        else:  # a path has new nodes at positions of other programs
            written_from = tl.minimum(written_from, bounds.seen_until)
            written_until = tl.maximum(written_until, bounds.path_until)
        if (written_from < share_end) & (written_until > share_begin):
            offset = new.to(tl.int64) * width
            write_pair(projected, own_pool, offset, new, is_written, place, head, heads, turning)
            tl.debug_barrier()  # read by other threads than the writers
    place_of_lane = lane_row.to(tl.int64) * q_heads + q_head
    if config.is_placed:
        q = load_head(q_at + place_of_lane[:, None] * D + columns_of(D)[None, :], D)
    else:
        if not is_early:
            fetched = fetch(
                projected, projected.q_norm, head_place, lane_row, row < stop, heads, turning
            )
        q = rotate(fetched, projected.eps, heads, turning).to(projected.rows.dtype.element_ty)
    is_bad, low, high_bits = tl.zeros((new_rows,), tl.int1), 0, 0
    if order.nodes == 0:
        if new_rows > 1:
            is_bad = _bad_rows(projected, own_pool, new, place, is_new, head, heads, config)
    elif to_position > bounds.seen_until // order.tile * order.tile:  # has tiles with nodes
        is_bad_node = _bad_rows(projected, own_pool, new, place, is_new, head, heads, config)
        low, high_bits = bits_of(is_bad_node, place - bounds.seen_until)
    seen = VisibleRange(
        k=pool.k + head * D,
        v=pool.v + head * D,
        table=own_pool.table,
        columns=columns,
        window=rows.paths,
        first=first,
        until=until,
        scale=scale,
    )
    new_kv = NewRows(places=place, is_bad=is_bad, low=low, high=high_bits)
    lane_rows = LaneRows(
        of_lane=lane_row,
        begin=start + block * lanes // group,
        end=tl.minimum(start + tl.cdiv((block + 1) * lanes, group), stop),
        first_of_rows=rows.first,
    )
    units = Units(
        parts=parts,
        place=place_of_lane,
        is_lane=row < stop,
        base=bounds.low // unit,
        stride=num_rows * q_heads,
        length=unit,
        is_alone=is_alone,
    )
    may_gather: tl.constexpr = config.may_span or config.splits > 1
    sums = sum_share(
        q,
        seen,
        new_kv,
        lane_rows,
        bounds,
        number,
        from_position,
        to_position,
        units,
        heads,
        order,
        may_gather,
        at_once=config.path_rows,
        path_stages=config.path_stages,
    )
    is_last = is_alone
    if not is_alone:
        tl.debug_barrier()
        counter = requests.arrivals + request * config.counters + tl.program_id(0)
        is_last = tl.atomic_add(counter, 1, sem="acq_rel") == sharing - 1
        if is_last:
            tl.store(counter, 0)
            stop_unit = tl.where(bounds.low < high, tl.cdiv(high, unit), units.base)
            per_span = tl.where(by_span, 1 << 20, order.span // split)
            sums = combine(
                parts,
                place_of_lane,
                units.base,
                stop_unit,
                per_span,
                units.stride,
                lanes,
                D,
                config.unroll,
            )
    if is_last:
        if order.has_sinks:
            sums = with_sink(sums, sinks_at, place_of_lane, q_heads)
        finish(sums, projected.rows, head_place + D, out_at, place_of_lane, row < stop, D, gated)


@triton.jit
def _bad_rows(
    projected, own_pool, new, place, is_new, head, heads: tl.constexpr, config: tl.constexpr
):
    """Returns the new rows with a non-finite value in a head."""
    k_heads: tl.constexpr = heads.k_heads
    D: tl.constexpr = heads.D
    if config.has_kv:
        column = (heads.q_heads * (1 + heads.gated) + k_heads + head) * D
        return is_bad_line(projected.rows, new.to(tl.int64) * heads.line + column, is_new, D)
    number = tl.load(own_pool.table + place // heads.page, mask=is_new, other=0)
    at = number.to(tl.int64) * heads.page + place % heads.page
    return is_bad_line(own_pool.v, (at * k_heads + head) * D, is_new, D)
