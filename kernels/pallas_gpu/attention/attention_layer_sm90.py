"""Split-KV attention of `attention_layer`: WGMMA, TMA, warp-specialised (Pallas, Mosaic GPU).

A program has two consumer warpgroups, each with up to 64 (row, query head) pairs, the rows of a
WGMMA: of two KV heads, or of the two halves of a 256-wide head's values. A third warpgroup, the
producer, loads tiles of keys and values ahead. Tiles, splits, spans and their order equal those of
`attention_layer`, so results are bitwise equal. `place` computes the queries and writes the new
keys and values first.

One program processes a request of one span. The spans of longer requests are divided among
programs, and a second kernel (Triton backend) combines them.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.pallas_gpu.attention.online_softmax import LOG2_E, SoftmaxState, fold
from kernels.pallas_gpu.attention.row_bounds import bounds_of
from kernels.pallas_gpu.attention.verify_sm90_loads import (
    WarpgroupTile,
    clear_padding,
    copy_tiles,
    fetch_queries,
    lane_sinks,
    piece_of,
    shared_of,
    write_result,
)
from kernels.pallas_gpu.attention.verify_sm90_mainloop import (
    GROUPS,
    LANES,
    TILE,
    PairMask,
    SplitRange,
    VerifyBuffers,
    VerifyTileWork,
    loaded_pairs,
    nothing,
    spans_of,
    sum_span,
)
from kernels.pallas_gpu.gemm.linear_sm90 import has_mosaic
from kernels.tiles import DecodeAttentionTiles


class LayerRefs(NamedTuple):
    """Global memory references of a program.

    Attributes:
      q, gate, out: Queries, gates and outputs.
      pool: Keys and values of all layers, one row per position.
      layer, table, starts, bounds: See `attention_layer`.
      pairs: `first` and `until` of the pairs of each block.
      visible_to_all: Range of positions that are visible to all pairs of each block.
      sums, peaks, totals: Partial results of spans.
      sinks: See `verify_sm90_loads.lane_sinks`; None without.
    """

    q: Any
    gate: Any
    pool: Any
    layer: Any
    table: Any
    starts: Any
    bounds: Any
    pairs: Any
    visible_to_all: Any
    out: Any
    sums: Any
    peaks: Any
    totals: Any
    sinks: Any


COLUMNS = 128
"""Maximum value columns of a warpgroup."""
_MOST_STAGED = 2 * COLUMNS
"""Maximum value columns of a warpgroup, over all pipeline stages."""
COPYING_REGISTERS, REGISTERS = 24, 240


def takes(q_heads: int, kv: Float[jax.Array, "L 2 P page Hk D"], tile: int) -> bool:
    """Returns whether `attention_layer_sm90` supports the arrays: bfloat16, pages of whole tiles,
    Hopper.

    Args:
      q_heads: Query heads; a warpgroup processes all query heads of a KV head, at most 64.
      kv: KV pools; two warpgroups share a pair of KV heads, or a 256-wide head.
      tile: Positions of a tile.
    """
    page, k_heads, D = kv.shape[3:]
    is_whole = page % TILE == 0 and tile == TILE and q_heads <= LANES * k_heads
    is_even = D == GROUPS * COLUMNS or (D in (COLUMNS, COLUMNS // 2) and k_heads % GROUPS == 0)
    return is_whole and is_even and kv.dtype == jnp.bfloat16 and has_mosaic()


# A separate function, which is lowered and compiled once for all layers: for a Mosaic GPU kernel
# that takes half a second.
@functools.partial(
    jax.jit, static_argnames=("max_rows", "span", "split", "scale", "tiles"), inline=False
)
def attention_layer_sm90(
    q: Float[jax.Array, "R Hq D"],
    gate: Float[jax.Array, "R outputs"] | None,
    kv: Float[jax.Array, "L 2 P page Hk D"],
    layer: Int[jax.Array, " 1"],
    bounds: Int[jax.Array, "B bounds"],
    page_table: Int[jax.Array, "B table"],
    row_starts: Int[jax.Array, " B1"],
    first: Int[jax.Array, " R"],
    until: Int[jax.Array, " R"],
    sinks: Float[jax.Array, "L2 Hq"] | None,
    sink_layer: Int[jax.Array, " 1"] | None,
    *,
    max_rows: int,
    span: int,
    split: int,
    scale: float,
    tiles: DecodeAttentionTiles,
) -> Float[jax.Array, "R outputs_of_heads"]:
    """Same as `attention_layer.attention_layer` after `place`, for arrays that `takes` accepts.

    Args:
      q: Queries from `place`, which has also written the new keys and values.
      gate: QKV projection, in which each query head is followed by its gate; None without gates.
      kv, layer, bounds, page_table, row_starts, first, until, sinks, sink_layer: See
        `attention_layer`.
      max_rows, span, split, scale, tiles: See `attend`.

    Raises:
      ValueError: `tiles` has more stages than shared memory allows.
    """
    (R, Hq, D), (L, _, P, page, Hk, _) = q.shape, kv.shape
    B, columns = page_table.shape
    group, width = Hq // Hk, min(D, COLUMNS)
    if tiles.stages * width > _MOST_STAGED:
        most = _MOST_STAGED // width
        raise ValueError(f"stages must be at most {most} for head size {D}, got {tiles.stages}")
    rows = min(LANES // group, max_rows)
    spans = pl.cdiv(columns * page, span)
    work = VerifyTileWork(
        group=group,
        piece=piece_of(group, gate, D),
        D=D,
        width=width,
        copied=GROUPS,
        rows=rows,
        blocks=pl.cdiv(max_rows, rows),
        pages=P,
        programs=min(tiles.programs, spans),
        span=span,
        split=split,
        page=page,
        stages=tiles.stages,
        scale=scale * LOG2_E,
        has_sinks=sinks is not None,
        gated=gate is not None,
    )
    gates = q if gate is None else gate.reshape(R, -1, 2, D)
    own = None if sinks is None else lane_sinks(sinks[sink_layer[0]], group)
    pairs, visible_to_all = _pairs_of(row_starts, first, until, work)
    numbers = Hk * work.parts * work.blocks
    of, single = jax.ShapeDtypeStruct, jnp.float32
    out, *partials = plgpu.kernel(
        functools.partial(_attention_layer_sm90_kernel, work=work),
        out_type=(
            of((R, Hq, D), q.dtype),
            of((spans, B, numbers, LANES, width), single),
            *(of((spans, B, numbers, LANES), single),) * 2,
        ),
        grid=(numbers // GROUPS, B, work.programs),
        grid_names=("number", "request", "share"),
        num_threads=GROUPS + 1,
        thread_name="group",
        scratch_types=shared_of(work)._asdict(),
        compiler_params=plgpu.CompilerParams(),
        kernel_name="attention_layer_sm90",
    )(
        *(q, gates, kv.reshape(L * 2 * P * page, Hk * D), layer, page_table, row_starts, bounds),
        *(pairs, visible_to_all),
        *([] if own is None else [own]),
    )
    out = out.reshape(R, Hq * D)
    if spans == 1:
        return out
    arrays = (out, q if gate is None else gate, *partials, bounds, row_starts, own)
    return _combined(arrays, columns, work)


def _pairs_of(row_starts, first, until, work):
    """Returns the mask bounds of the pairs of each block; a padding pair repeats the last row."""
    start, stop = (x[:, None, None] for x in (row_starts[:-1], row_starts[1:]))
    of_block = jnp.arange(work.blocks)[:, None] * work.rows + jnp.arange(LANES) // work.group
    row = jnp.clip(jnp.minimum(start + of_block, stop - 1), 0)
    first, until = (x[row].astype(jnp.int32) for x in (first, until))
    pairs = jnp.stack([first, until], axis=2).reshape(-1, 2, LANES)
    visible_to_all = jnp.stack([first.max(axis=2), until.min(axis=2)], axis=2)
    return pairs, visible_to_all.reshape(-1, 2)


def _share(number, bounds, has_rows, capacity, work):
    """Returns the share of program `number`."""
    low, high = bounds.low, jnp.minimum(bounds.seen_until, capacity)
    base = lax.div(low, work.span)
    spans = jnp.maximum(pl.cdiv(high, work.span) - base, 1)
    each = pl.cdiv(spans, jnp.minimum(work.programs, spans))
    begin = lax.div(jnp.maximum(low, (base + number * each) * work.span), TILE)
    end = pl.cdiv(jnp.minimum(high, (base + (number + 1) * each) * work.span), TILE)
    is_one = has_rows & (number < pl.cdiv(spans, each))
    end = jnp.where((low < high) & is_one, jnp.maximum(end, begin), begin)
    return SplitRange(begin=begin, end=end, base=base, is_alone=spans == 1, is_one=is_one)


def _attention_layer_sm90_kernel(*refs, work, **shared):
    """One program per block of rows and two warpgroup columns of KV heads, request, and share."""
    *read, out, sums, peaks, totals = refs
    sinks = read.pop() if work.has_sinks else None
    refs = LayerRefs(*read, out, sums, peaks, totals, sinks)
    shared = VerifyBuffers(**shared)
    number, request = lax.axis_index("number"), lax.axis_index("request")
    group, share_number = lax.axis_index("group"), lax.axis_index("share")
    pair, block = lax.div(number, work.blocks), lax.rem(number, work.blocks)
    bounds = bounds_of(refs.bounds, request)
    row, stop = refs.starts[request] + block * work.rows, refs.starts[request + 1]
    capacity = refs.table.shape[1] * work.page
    share = _share(share_number, bounds, row < stop, capacity, work)

    @pl.when(group == GROUPS)
    def _copy():
        plgpu.set_max_registers(COPYING_REGISTERS, action="decrease")
        copy_tiles(refs, shared, share, request, pair * GROUPS * work.width, work)

    @pl.when(group < GROUPS)
    def _attend():
        plgpu.set_max_registers(REGISTERS, action="increase")
        part = pair * GROUPS + group
        head, column = lax.div(part, work.parts), lax.rem(part, work.parts) * work.width
        own = WarpgroupTile(head=head, column=column, row=row, stop=stop)

        @pl.when((share_number == 0) & (block == 0))
        def _():
            num_requests = refs.starts.shape[0] - 1
            begin = refs.starts[num_requests] + request
            clear_padding(refs, shared, group, own, begin, num_requests, work)

        @pl.when(share.is_one)
        def _():
            fetch_queries(refs, shared, group, own, work)
            index = request * work.blocks + block
            mask = _mask_of(refs, index, bounds)

            def add(span, _):
                sums = sum_span(shared, share, span, group, mask, work)

                @pl.when(~share.is_alone)
                def _store():
                    place = (span - share.base, request, part * work.blocks + block)
                    refs.sums[place] = sums.value
                    refs.peaks[place] = sums.peak
                    refs.totals[place] = sums.total

                return sums

            sums = lax.fori_loop(*spans_of(share, work), add, nothing(work.width))

            @pl.when(share.is_alone)
            def _finish():
                write_result(refs, shared, group, own, sums, work)


def _mask_of(refs, index, bounds):
    """Returns the mask of the pairs of a block."""
    return PairMask(
        pairs=loaded_pairs(refs.pairs.at[index, i] for i in range(2)),
        whole_from=refs.visible_to_all[index, 0],
        whole_until=jnp.minimum(refs.visible_to_all[index, 1], bounds.new_from),
        old_from=bounds.seen_from,
        old_until=jnp.minimum(bounds.seen_until, bounds.new_from),
    )


def _combined(arrays, columns, work):
    """Combines the spans that programs have stored, and finishes the rows of these requests."""
    out, (_, B, numbers, *_) = arrays[0], arrays[2].shape
    return pl.pallas_call(
        functools.partial(_combine_kernel, capacity=columns * work.page, work=work),
        grid=(numbers, B),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={0: 0},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        name="combine_splits",
    )(*arrays)


def _combine_kernel(
    _,
    gate_ref,
    sums_ref,
    peaks_ref,
    totals_ref,
    bounds_ref,
    starts_ref,
    sinks_ref,
    out_ref,
    *,
    capacity,
    work,
):
    """One program per block of pairs and value columns of a KV head, and request."""
    number, request = pl.program_id(0), pl.program_id(1)
    part, block = lax.div(number, work.blocks), lax.rem(number, work.blocks)
    head, column = lax.div(part, work.parts), lax.rem(part, work.parts) * work.width
    bounds = bounds_of(bounds_ref, request)
    low, high = bounds.low, jnp.minimum(bounds.seen_until, capacity)
    spans = pl.cdiv(high, work.span) - lax.div(low, work.span)
    start, stop = starts_ref[request] + block * work.rows, starts_ref[request + 1]

    @pl.when((spans > 1) & (low < high) & (start < stop))
    def _():
        lane, of_lane = lax.iota(jnp.int32, LANES), lax.iota(jnp.int32, work.width)
        each = lax.div(lane, work.group)
        row, q_head = start + each, head * work.group + lax.rem(lane, work.group)

        def add(unit, sums):
            at = unit, request, number
            more = SoftmaxState(
                pltriton.load(sums_ref.at[(*at, lane[:, None], of_lane[None, :])]),
                pltriton.load(peaks_ref.at[(*at, lane)]),
                pltriton.load(totals_ref.at[(*at, lane)]),
            )
            return fold(sums, more)

        sums = lax.fori_loop(0, spans, add, SoftmaxState.nothing(LANES, work.width))
        keep, total = ((row < stop) & (each < work.rows))[:, None], sums.total
        if work.has_sinks:
            sink = pltriton.load(sinks_ref.at[head, lane])
            total += jnp.exp2(sink * LOG2_E - sums.peak)
        out = sums.value / jnp.maximum(total, 1e-30)[:, None]
        at = q_head[:, None] * work.D + column + of_lane[None, :]
        if work.gated:
            gate_at = gate_ref.at[row[:, None], at + (q_head[:, None] + 1) * work.D]
            gate = pltriton.load(gate_at, mask=keep, other=0.0).astype(jnp.float32)
            out = out / (1.0 + jnp.exp2(gate * -LOG2_E))
        pltriton.store(out_ref.at[row[:, None], at], out.astype(out_ref.dtype), mask=keep)
