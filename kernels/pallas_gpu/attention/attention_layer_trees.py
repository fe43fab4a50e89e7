"""Split-KV attention of draft trees in `attention_layer`, after `place` (Pallas, Triton backend).

The context before a tree is the same for all its nodes, and each node has its own path in the
window. So programs of many (query head, node) pairs attend to the context, and programs of a few
nodes to the window and the split in which it begins. The last program of a block of nodes combines
the partial results. Tiles, splits, spans and their order equal those of `attention_layer`, so
results are bitwise equal.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.pallas_gpu.attention.attention import (
    Order,
    VisibleRange,
    clear_padding,
    finish,
    load_rows,
    page_of,
)
from kernels.pallas_gpu.attention.attention_layer_mainloop import LayerRows, NewRows, sum_share
from kernels.pallas_gpu.attention.head_dim_padding import columns_of, load_head
from kernels.pallas_gpu.attention.online_softmax import SinkRefs, with_sink
from kernels.pallas_gpu.attention.qk_norm_rope_kv_write import early, is_bad_line
from kernels.pallas_gpu.attention.row_bounds import bits_of, bounds_of
from kernels.pallas_gpu.attention.split_kv import SplitPartials, combine, store_partial
from kernels.tiles import TREE_LANES, DecodeAttentionTiles
from kernels.tree_blocks import TreeBlocks


class TreeSizes(NamedTuple):
    """Compile-time settings of the kernel.

    Attributes:
      rows, blocks, lanes, wide, wide_blocks: See `TreeBlocks`.
      programs: Maximum programs that share the positions of the context.
      max_rows: Maximum rows of a request.
      max_parts: Maximum splits of a request with partial results per split.
      may_span: Whether partial results may be per span.
      path_rows: Rows of a step over the window.
      splits, is_separate: Constants for `sum_share`.
    """

    rows: int
    blocks: int
    lanes: int
    wide: int
    wide_blocks: int
    programs: int
    max_rows: int
    max_parts: int
    may_span: bool
    path_rows: int
    splits: int
    is_separate: bool


class Share(NamedTuple):
    """Positions of a program, and of a partial result."""

    from_position: Any
    to_position: Any
    unit: Any
    is_alone: None = None


def attention_layer_trees(
    q: Float[jax.Array, "R Hq D"],
    gate: Float[jax.Array, "R outputs"] | None,
    kv: Float[jax.Array, "L 2 P page Hk D"],
    arrivals: Int[jax.Array, "B counters"],
    layer: Int[jax.Array, " 1"],
    page_table: Int[jax.Array, "B table"],
    bounds: Int[jax.Array, "B bounds"],
    rows: LayerRows,
    sinks: SinkRefs | None,
    *,
    order: Order,
    blocks: TreeBlocks,
    max_rows: int,
    max_parts: int,
    tiles: DecodeAttentionTiles,
    interpret: bool,
) -> tuple[Float[jax.Array, "R outputs_of_heads"], Int[jax.Array, "B counters"]]:
    """Same as `attention_layer.attention_layer` after `place`, for rows of trees.

    Args:
      q: Queries from `place`, which has also written the new keys and values.
      gate: QKV projection, in which each query head is followed by its gate; None without gates.
      kv, arrivals, layer, page_table, bounds, max_rows, max_parts, tiles, interpret: See
        `attention_layer`.
      rows: Bounds of the rows.
      sinks: Stacked sinks of query heads; None without.
      order: Reduction settings.
      blocks: Blocks of the programs.

    Returns:
      The concatenated head outputs, and `arrivals`, zero again.
    """
    (R, Hq, D), (page, Hk), (B, columns) = q.shape, kv.shape[3:5], page_table.shape
    splits = pl.cdiv(columns * page, order.split)
    parts = max(min(splits, max_parts), pl.cdiv(columns * page, order.span))
    programs = min(tiles.programs, pl.cdiv(splits, tiles.splits))
    sizes = TreeSizes(
        **blocks._asdict(),
        programs=programs,
        max_rows=max_rows,
        max_parts=max_parts,
        may_span=splits > max_parts,
        path_rows=tiles.path_rows,
        splits=1,
        is_separate=True,
    )
    of = jax.ShapeDtypeStruct
    arrivals, out, _ = pl.pallas_call(
        partial(_attention_layer_trees_kernel, order=order, sizes=sizes, interpret=interpret),
        grid=(Hk * (blocks.blocks + blocks.wide_blocks * programs), B),
        out_shape=(
            of(arrivals.shape, arrivals.dtype),
            of((R, Hq * D), q.dtype),
            SplitPartials.of(parts, R, Hq, D),
        ),
        input_output_aliases={0: 0},
        compiler_params=pltriton.CompilerParams(
            num_warps=tiles.warps, num_stages=tiles.path_stages
        ),
        interpret=interpret,
        name="attention_layer_trees",
    )(arrivals, q, gate, kv, layer, page_table, bounds, rows, sinks)
    return out, arrivals


def _attention_layer_trees_kernel(
    _,
    q_ref,
    gate_ref,
    kv_ref,
    layer_ref,
    table_ref,
    bounds_ref,
    rows,
    sinks,
    arrivals_ref,
    out_ref,
    parts,
    *,
    order,
    sizes,
    interpret,
):
    """One program per request, KV head, and block of the window, or block and share of the context.

    Programs of the window, the longest, start first.
    """
    D, Hk = q_ref.shape[2], kv_ref.shape[4]
    group, windows = q_ref.shape[1] // Hk, sizes.blocks * Hk
    program, request = pl.program_id(0), pl.program_id(1)
    is_window = program < windows
    is_wide = (~is_window).astype(jnp.int32)
    index, per_share = program - windows * is_wide, sizes.wide_blocks * Hk
    number = is_wide * lax.div(index, per_share)
    blocks = sizes.blocks + is_wide * (sizes.wide_blocks - sizes.blocks)
    head, block = lax.div(lax.rem(index, blocks * Hk), blocks), lax.rem(index, blocks)
    start, stop = rows.starts[request], rows.starts[request + 1]

    @pl.when(is_window & (block == 0))
    def _():
        clear_padding(rows.starts, out_ref, head, request, group, D, programs=1)

    bounds = bounds_of(bounds_ref, request)
    high = jnp.minimum(bounds.path_until, table_ref.shape[1] * kv_ref.shape[3])
    unit, per_span = order.split, order.span // order.split
    if sizes.may_span:
        by_span = pl.cdiv(high, order.split) - lax.div(bounds.low, order.split) > sizes.max_parts
        unit = unit + by_span.astype(jnp.int32) * (order.span - unit)
        per_span = per_span + by_span.astype(jnp.int32) * ((1 << 20) - per_span)
    base = lax.div(bounds.low, unit)
    window_unit = jnp.maximum(lax.div(jnp.minimum(bounds.seen_until, high), unit), base)
    each = jnp.maximum(pl.cdiv(window_unit - base, sizes.programs), 1)
    num_shares = pl.cdiv(window_unit - base, each)
    first_block = block * (1 + is_wide * (sizes.wide - 1))
    begin = start + first_block * sizes.rows

    @pl.when((begin < stop) & (is_window | (number < num_shares)))
    def _():
        from_unit = jnp.where(is_window, window_unit, base + number * each)
        until = jnp.minimum(window_unit, from_unit + each) * unit
        share = Share(
            from_position=jnp.maximum(bounds.low, from_unit * unit),
            to_position=jnp.where(is_window, high, until),
            unit=unit,
        )
        sum_block = partial(
            _sum_block,
            q_ref,
            kv_ref,
            layer_ref[0],
            table_ref,
            rows,
            parts,
            bounds,
            share,
            base,
            request=request,
            head=head,
            start=start,
            stop=stop,
            begin=begin,
            sizes=sizes,
            interpret=interpret,
        )
        pl.when(is_window)(partial(sum_block, num_rows=sizes.rows, lanes=TREE_LANES, order=order))
        ones = 16 if sizes.lanes >= 64 else 2 * sizes.lanes
        wide_order = order._replace(nodes=0, ones=ones)
        pl.when(~is_window)(
            partial(
                sum_block,
                num_rows=sizes.wide * sizes.rows,
                lanes=sizes.lanes,
                order=wide_order,
            )
        )
        if not interpret:
            pltriton.debug_barrier()
        end = jnp.where(bounds.low < high, pl.cdiv(high, unit), base)

        def end_block(i, _):
            @pl.when(begin + i * sizes.rows < stop)
            def _():
                # One atomic per block: Pallas adds arrays of integers as if they were floats.
                counter = head * sizes.blocks + first_block + i
                arrived = pltriton.atomic_add(arrivals_ref, (request, counter), jnp.int32(1))

                @pl.when(arrived == num_shares)  # shares of the context, and the window
                def _():
                    arrivals_ref[request, counter] = 0
                    first = begin + i * sizes.rows
                    row, is_lane, q_head = _pairs(first, stop, head, group, sizes.rows, TREE_LANES)
                    unroll = max(1, min(4, 128 * 4 // pl.next_power_of_2(D)))
                    sums = combine(parts, row, q_head, base, end, per_span, unroll, interpret)
                    sums = with_sink(sums, sinks, q_head)
                    finish(sums, gate_ref, out_ref, row, q_head, is_lane, D)

        num_blocks = 1 + is_wide * (sizes.wide - 1)
        lax.fori_loop(0, num_blocks, end_block, None)


def _pairs(begin, stop, head, group, num_rows, lanes):
    """Returns the row of each lane, whether the lane is not spare, and its query head."""
    lane = lax.iota(jnp.int32, lanes)
    row = begin + lax.div(lane, group)
    is_lane = (lane < num_rows * group) & (row < stop)
    # Spare lanes repeat the last row and are not written.
    row = jnp.minimum(row, jnp.minimum(begin + num_rows, stop) - 1)
    return row, is_lane, head * group + lax.rem(lane, group)


def _sum_block(
    q_ref,
    kv_ref,
    layer,
    table_ref,
    rows,
    parts,
    bounds,
    share,
    base,
    request,
    head,
    start,
    stop,
    begin,
    num_rows,
    lanes,
    *,
    order,
    sizes,
    interpret,
):
    """Stores the partial results of a share's positions, for some nodes.

    Without nodes in `order`, the positions are before the tree.
    """
    D, group = q_ref.shape[2], q_ref.shape[1] // kv_ref.shape[4]
    row, is_lane, q_head = _pairs(begin, stop, head, group, num_rows, lanes)
    row = early(row, interpret)
    seen = VisibleRange(
        kv_ref=kv_ref,
        table_ref=table_ref,
        window_ref=rows.paths,
        layer=layer,
        request=request,
        head=head,
        row=row,
        first=pltriton.load(rows.first.at[row]),
        until=pltriton.load(rows.until.at[row]),
    )
    page = page_of(seen, lax.div(share.from_position, order.tile), order.tile)
    q = load_head(q_ref.at[row[:, None], q_head[:, None], columns_of(D)[None, :]], D)
    new = None
    if order.nodes:
        written = start + lax.iota(jnp.int32, pl.next_power_of_2(sizes.max_rows))
        is_new = written < stop
        place = pltriton.load(rows.places.at[written], mask=is_new, other=0)
        is_new &= pltriton.load(rows.is_real.at[written], mask=is_new, other=0) != 0
        at = table_ref.at[request, lax.div(place, kv_ref.shape[3])]
        pages = pltriton.load(at, mask=is_new, other=0)[:, None]
        is_bad = is_bad_line(load_rows(seen, 1, pages, place, is_new[:, None]))
        new = NewRows(place, is_bad, bits_of(is_bad, place - bounds.seen_until))

    def store(unit, sums):
        store_partial(parts, unit - base, row, q_head, sums, is_lane)

    sum_share(q, seen, new, rows.first, bounds, page, share, order, sizes, store=store)
