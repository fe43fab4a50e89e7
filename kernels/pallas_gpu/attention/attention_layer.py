"""Fused split-KV (flash-decoding) attention layer between its two GEMMs (Pallas, Triton backend).

The kernel serves steps of few rows. The programs of a request and KV head split its positions. Each
writes the new keys and values of its positions before it reads them, except in a layer that reads
the KV of another layer. The last program to arrive combines the partial results. The reduction
order equals that of `attend`: the bits of a row do not depend on the number of rows and programs,
and those of a tree's row equal plain decoding.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

from kernels.pallas_gpu.attention.attention import (
    Order,
    VisibleRange,
    clear_padding,
    finish,
    load_rows,
    page_of,
)
from kernels.pallas_gpu.attention.attention_layer_mainloop import (
    LayerRows,
    NewRows,
    PositionRange,
    sum_share,
)
from kernels.pallas_gpu.attention.attention_layer_sm90 import attention_layer_sm90, takes
from kernels.pallas_gpu.attention.attention_layer_trees import attention_layer_trees
from kernels.pallas_gpu.attention.head_dim_padding import columns_of, in_head, load_head
from kernels.pallas_gpu.attention.online_softmax import SinkRefs, with_sink
from kernels.pallas_gpu.attention.qk_norm_rope_kv_write import (
    Projected,
    RopeArgs,
    early,
    fetch,
    is_bad_line,
    projected_of,
    rotate,
    write_pair,
)
from kernels.pallas_gpu.attention.row_bounds import bits_of, bounds_of
from kernels.pallas_gpu.attention.split_kv import SplitPartials, combine, store_partial
from kernels.tiles import DecodeAttentionTiles
from kernels.tree_blocks import tree_blocks


def attention_layer(
    projected: Float[jax.Array, "R outputs"],
    q_norm: Float[jax.Array, "*L D"] | None,
    k_norm: Float[jax.Array, "*L D"] | None,
    cos: Float[jax.Array, "R half"],
    sin: Float[jax.Array, "R half"],
    kv: Float[jax.Array, "L 2 P page Hk D"],
    layer: Int[jax.Array, " 1"],
    bounds: Int[jax.Array, "B bounds"],
    arrivals: Int[jax.Array, "B counters"],
    page_table: Int[jax.Array, "B table"],
    row_starts: Int[jax.Array, " B1"],
    places: Int[jax.Array, " R"],
    first: Int[jax.Array, " R"],
    until: Int[jax.Array, " R"],
    paths: Int[jax.Array, "R N"],
    is_real: Bool[jax.Array, " R"],
    q: Float[jax.Array, "R Hq D"] | None = None,
    sinks: Float[jax.Array, "L2 Hq"] | None = None,
    sink_layer: Int[jax.Array, " 1"] | None = None,
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
    interpret: bool = False,
) -> tuple[
    Float[jax.Array, "R outputs_of_heads"],
    Float[jax.Array, "L 2 P page Hk D"],
    Int[jax.Array, "B counters"],
]:
    """Same as `shared.spec.attention_layer.attention_layer`, for flat rows grouped by request.

    Args:
      projected, q_norm, k_norm, cos, sin, kv, layer, page_table, places, is_real: See `place`.
      gated, has_kv, eps, digits: See `place`.
      q: Queries from `place`, which has also written keys and values; None to do both here.
      bounds, arrivals, paths: From `compute_row_bounds`.
      row_starts, first, until, sinks, sink_layer, max_rows, span, split, tile, scale, softcap: See
        `attend`. With a tree, all rows of a request have the same `until`, and are written from
        there on.
      max_parts: Maximum splits of a request with partial results per split; above, per span.
      tiles: Tile config.
      interpret: Run on a CPU.

    Returns:
      The concatenated head outputs, the pools after the writes, and `arrivals`, zero again.

    Raises:
      ValueError: `tiles` limits registers, which is not supported in Pallas.
    """
    if tiles.registers:
        raise ValueError("registers must be 0: Pallas does not support a limit")
    # Mosaic GPU's interpreter does not support inline PTX.
    is_wide = tiles.described and softcap is None and not paths.shape[1] and not interpret
    if is_wide and q is not None and takes(q.shape[1], kv, tile):
        rows = (bounds, page_table, row_starts, first, until, sinks, sink_layer)
        order = {"max_rows": max_rows, "span": span, "split": split, "scale": scale}
        gate = projected if gated else None
        return attention_layer_sm90(q, gate, kv, layer, *rows, **order, tiles=tiles), kv, arrivals
    R, (page, Hk, D), (B, columns) = len(projected), kv.shape[3:], page_table.shape
    Hq = (projected.shape[1] // D - 2 * Hk * has_kv) // (1 + gated)
    nodes, group = paths.shape[1], Hq // Hk
    order = Order(span, split, tile, tiles.ones, nodes, scale, softcap)
    rows = LayerRows(
        starts=row_starts,
        places=places,
        is_real=is_real.astype(jnp.int8),
        first=first,
        until=until,
        paths=paths if nodes else until[:, None],
    )
    all_sinks = None if sinks is None else SinkRefs(sinks, sink_layer)
    separate = tree_blocks(tiles, nodes=nodes, max_rows=max_rows, group=group)
    if q is not None and separate is not None:
        gate = projected if gated else None
        out, arrivals = attention_layer_trees(
            q,
            gate,
            kv,
            arrivals,
            layer,
            page_table,
            bounds,
            rows,
            all_sinks,
            order=order,
            blocks=separate,
            max_rows=max_rows,
            max_parts=max_parts,
            tiles=tiles,
            interpret=interpret,
        )
        return out, kv, arrivals
    splits = pl.cdiv(columns * page, split)
    parts = max(min(splits, max_parts), pl.cdiv(columns * page, span))
    programs = min(tiles.programs, pl.cdiv(splits, tiles.splits))
    pairs = max_rows * group
    lanes = min(tiles.lanes, max(16, pl.next_power_of_2(pairs)))
    config = (lanes, pl.cdiv(pairs, lanes), programs, tiles.splits)
    sizes = _Sizes(Hq, max_rows, *config, max_parts, splits > max_parts, tiles.path_rows, False)
    # Keys and values of a path depend on the loads of their node and page: more stages, if two
    # programs then have the shared memory of a multiprocessor.
    stages = max(tiles.stages, tiles.path_stages) if nodes and D <= 128 else tiles.stages
    of = jax.ShapeDtypeStruct
    kv, arrivals, out, _ = pl.pallas_call(
        partial(
            _attention_layer_kernel,
            order=order,
            settings=_ProjectionSettings(
                q_norm is not None, q is not None, gated, has_kv, eps, digits
            ),
            sizes=sizes,
            interpret=interpret,
        ),
        grid=(sizes.blocks * Hk, B, programs),
        out_shape=(
            of(kv.shape, kv.dtype),
            of(arrivals.shape, arrivals.dtype),
            of((R, Hq * D), projected.dtype),
            SplitPartials.of(parts, R, Hq, D),
        ),
        input_output_aliases={len(Projected._fields) + which: which for which in range(2)},
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=stages),
        interpret=interpret,
        name="attention_layer",
    )(
        projected_of(projected, q_norm, k_norm, cos, sin),
        *(kv, arrivals, layer, page_table, bounds),
        rows,
        cos if q is None else q,
        all_sinks,
    )
    return out, kv, arrivals


class _ProjectionSettings(NamedTuple):
    """Settings of QK norm, RoPE and the KV write; `is_placed` if `place` has already run."""

    has_norms: bool
    is_placed: bool
    gated: bool
    has_kv: bool
    eps: float
    digits: int


class _Sizes(NamedTuple):
    """Compile-time settings of the kernel."""

    q_heads: int
    max_rows: int
    lanes: int
    blocks: int
    programs: int
    splits: int
    max_parts: int
    may_span: bool
    path_rows: int
    is_separate: bool


def _attention_layer_kernel(
    projected,
    _,
    __,
    layer_ref,
    table_ref,
    bounds_ref,
    rows,
    q_ref,
    sinks,
    kv_ref,
    arrivals_ref,
    out_ref,
    parts,
    *,
    order,
    settings,
    sizes,
    interpret,
):
    """One program per block of lanes of a KV head, request, and share of its positions."""
    counter, request, number = (pl.program_id(axis) for axis in range(3))
    head, block = lax.div(counter, sizes.blocks), lax.rem(counter, sizes.blocks)
    D, group = kv_ref.shape[5], sizes.q_heads // kv_ref.shape[4]
    start, stop = rows.starts[request], rows.starts[request + 1]

    @pl.when((number == 0) & (block == 0))
    def _():
        clear_padding(rows.starts, out_ref, head, request, group, D, programs=1)

    @pl.when(start + lax.div(block * sizes.lanes, group) < stop)
    def _():
        bounds = bounds_of(bounds_ref, request)
        share = _share(number, table_ref.shape[1] * kv_ref.shape[3], bounds, order, sizes)

        @pl.when(share.number < share.sharing)
        def _():
            lane = block * sizes.lanes + early(lax.iota(jnp.int32, sizes.lanes), interpret)
            row, q_head = start + lax.div(lane, group), head * group + lax.rem(lane, group)
            # Spare lanes repeat the last row and are not written.
            lane_row = jnp.minimum(row, stop - 1)
            first = pltriton.load(rows.first.at[lane_row])
            until = pltriton.load(rows.until.at[lane_row])
            layer = layer_ref[0]
            seen = VisibleRange(
                kv_ref=kv_ref,
                table_ref=table_ref,
                window_ref=rows.paths,
                layer=layer,
                request=request,
                head=head,
                row=lane_row,
                first=first,
                until=until,
            )
            page = page_of(seen, lax.div(share.from_position, order.tile), order.tile)
            written = start + lax.iota(jnp.int32, pl.next_power_of_2(sizes.max_rows))
            is_new = written < stop
            place = pltriton.load(rows.places.at[written], mask=is_new, other=0)
            is_new &= pltriton.load(rows.is_real.at[written], mask=is_new, other=0) != 0
            norming = (settings.has_norms, settings.eps, settings.digits)
            turning = RopeArgs(projected.cos.shape[1], *norming, D)
            fetch_of = partial(fetch, projected, layer=layer, turning=turning)
            start_of_head = q_head * ((1 + settings.gated) * D)
            of_queries = {"row": lane_row, "start": start_of_head, "is_in": row < stop}
            fetch_q = partial(fetch_of, norm_ref=projected.q_norm, **of_queries)
            # With few programs, before the KV write of some of them; else registers are scarce.
            is_early = sizes.splits == 1 and not settings.is_placed
            fetched = fetch_q() if is_early else None
            column = (sizes.q_heads * (1 + settings.gated) + head) * D

            def write():
                is_written = is_new
                if order.nodes == 0:
                    is_written &= (place >= share.share_begin) & (place < share.share_end)
                of_keys = {"row": written, "start": column + 0 * written, "is_in": is_written}
                k = rotate(fetch_of(norm_ref=projected.k_norm, **of_keys), turning)
                write_pair(
                    projected.rows,
                    kv_ref,
                    table_ref,
                    layer,
                    written,
                    request,
                    place,
                    is_written,
                    head,
                    column,
                    k,
                )
                _barrier(interpret)  # read by other threads than the writers

            if settings.is_placed:
                at = (lane_row[:, None], q_head[:, None], columns_of(D)[None, :])
                q = load_head(q_ref.at[at], D)
            else:
                if settings.has_kv:
                    written_from, written_until = bounds.new_from, bounds.new_until
                    if order.nodes:  # a path has new nodes at positions of other programs
                        written_from = jnp.minimum(written_from, bounds.seen_until)
                        written_until = jnp.maximum(written_until, bounds.path_until)
                    has_new = written_from < share.share_end
                    has_new &= written_until > share.share_begin
                    pl.when(has_new)(write)
                q = rotate(fetched or fetch_q(), turning).astype(projected.rows.dtype)

            def bad_rows():
                v_start = column + kv_ref.shape[4] * D
                if settings.has_kv:
                    at = projected.rows.at[written[:, None], v_start + columns_of(D)[None, :]]
                    v = pltriton.load(at, mask=in_head(is_new[:, None], D), other=0)
                else:
                    at = table_ref.at[request, lax.div(place, kv_ref.shape[3])]
                    pages = pltriton.load(at, mask=is_new, other=0)[:, None]
                    v = load_rows(seen, 1, pages, place, is_new[:, None])
                return is_bad_line(v)

            is_bad, bits = jnp.zeros(written.shape, bool), None
            if order.nodes:
                has_nodes = share.to_position > lax.div(bounds.seen_until, order.tile) * order.tile
                bits = lax.cond(
                    has_nodes,
                    lambda: bits_of(bad_rows(), place - bounds.seen_until),
                    lambda: (0 * bounds.low, 0 * bounds.low),
                )
            elif sizes.max_rows > 1:
                is_bad = bad_rows()
            base = lax.div(share.low, share.unit)

            def store(unit, sums):
                store_partial(parts, unit - base, row, q_head, sums, row < stop)

            new = NewRows(places=place, is_bad=is_bad, bits=bits)
            own_sums = sum_share(
                q, seen, new, rows.first, bounds, page, share, order, sizes, store=store
            )

            def end(sums):
                sums = with_sink(sums, sinks, q_head)
                gate_ref = projected.rows if settings.gated else None
                finish(sums, gate_ref, out_ref, row, q_head, row < stop, D)

            def end_if_last():
                _barrier(interpret)
                arrived = pltriton.atomic_add(arrivals_ref, (request, counter), jnp.int32(1))

                @pl.when(arrived == share.sharing - 1)
                def _():
                    arrivals_ref[request, counter] = 0
                    end(_combine(parts, lane_row, q_head, base, share, order, sizes, interpret))

            if share.is_alone is None:
                end_if_last()
            else:
                pl.when(share.is_alone)(partial(end, own_sums))
                pl.when(~share.is_alone)(end_if_last)


def _share(number, capacity, bounds, order, sizes):
    """Returns the share of the attended or written positions that a program processes."""
    high = jnp.minimum(bounds.path_until, capacity)
    by_span, unit, fewest = False, order.split, sizes.splits
    if sizes.may_span:
        by_span = pl.cdiv(high, order.split) - lax.div(bounds.low, order.split) > sizes.max_parts
        unit = _select(by_span, order.span, order.split)
        fewest = _select(by_span, 1, sizes.splits)
    begin = lax.div(jnp.minimum(bounds.low, bounds.new_from), unit)
    end = pl.cdiv(jnp.maximum(high, bounds.new_until), unit)
    end = jnp.maximum(end, begin + 1)  # at least one, for zeros if no position is visible
    each = pl.cdiv(end - begin, jnp.minimum(sizes.programs, pl.cdiv(end - begin, fewest)))
    share_begin = (begin + number * each) * unit
    share_end = share_begin + each * unit
    sharing, is_alone = pl.cdiv(end - begin, each), None
    if sizes.splits > 1:
        per_span = lax.div(order.span, unit)
        is_in_one = lax.div(begin, per_span) == lax.div(end - 1, per_span)
        is_alone = is_in_one & (each == end - begin)
    return PositionRange(
        low=bounds.low,
        high=high,
        from_position=jnp.maximum(bounds.low, share_begin),
        to_position=jnp.minimum(high, share_end),
        unit=unit,
        by_span=by_span,
        share_begin=share_begin,
        share_end=share_end,
        number=number,
        sharing=sharing,
        is_alone=is_alone,
    )


def _select(condition, one, other):
    """Selects one of two integers; Pallas gives a select of constants the type of its condition."""
    return other + condition.astype(jnp.int32) * (one - other)


def _combine(parts, row, q_head, begin, share, order, sizes, interpret):
    """Combines the partial results of a request's programs."""
    end = jnp.where(share.low < share.high, pl.cdiv(share.high, share.unit), begin)
    per_span = order.span // order.split
    if sizes.may_span:
        per_span = _select(share.by_span, 1 << 20, per_span)
    unroll = max(1, min(8, 16 * 128 * 8 // (sizes.lanes * pl.next_power_of_2(parts.sums.shape[3]))))
    return combine(parts, row, q_head, begin, end, per_span, unroll, interpret)


def _barrier(interpret):
    """Waits for all threads of the program, so that their writes are visible to each other."""
    if not interpret:
        pltriton.debug_barrier()
