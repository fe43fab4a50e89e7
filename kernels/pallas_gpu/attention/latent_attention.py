"""Paged multi-query attention over latent rows (absorbed MLA) with split-KV (Pallas, Triton
backend).

All heads of a request read the same cached rows, `[latent | rope key]`; values are the latents. A
lane is a (row, head) pair. Products are transposed (swap-AB): positions and latent columns are the
wide sides of the tensor core, lanes the narrow one. A tile of positions is loaded once, for scores
and values. Its weights are relative to its own maximum, and it is added to the sums of its span as
a unit. The reduction order of a row depends on its position alone: results are batch-invariant and
independent of the rows, lanes and programs of the request. `kernels/__init__.py` lists what must
equal the Triton twin.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

from kernels.latent_tiles import LatentAttentionTiles, block_widths, units_of
from kernels.pallas_gpu.attention.attention import window_operand
from kernels.pallas_gpu.attention.latent_attention_mainloop import (
    LatentRange,
    LatentSums,
    LatentWork,
    merged,
    sum_positions,
)
from kernels.pallas_gpu.attention.latent_combine import combine, request_units
from kernels.pallas_gpu.attention.online_softmax import LOG2_E
from kernels.pallas_gpu.attention.qk_norm_rope_kv_write import early
from kernels.pallas_gpu.attention.split_kv import SplitPartials


class LatentRefs(NamedTuple):
    """Global memory references of a program; `out` or `parts` is written."""

    q: Any
    pool: Any
    layer: Any
    table: Any
    starts: Any
    first: Any
    until: Any
    window: Any
    results: Any


def attend_latent(
    q: Float[jax.Array, "R Hq r_dr"],
    pool: Float[jax.Array, "L 1 P page 1 r_dr"],
    layer: Int[jax.Array, " 1"],
    page_table: Int[jax.Array, "B table"],
    row_starts: Int[jax.Array, " B1"],
    first: Int[jax.Array, " R"],
    until: Int[jax.Array, " R"],
    window: Bool[jax.Array, "R N"],
    *,
    rank: int,
    max_rows: int,
    span: int,
    tile: int,
    scale: float,
    tiles: LatentAttentionTiles,
    interpret: bool = False,
) -> Float[jax.Array, "R Hq r"]:
    """Same as `shared.spec.latent_attention.attend_latent`, for flat rows grouped by request.

    If lanes are few, several programs share the positions of a request, and a second kernel
    combines their partial results.

    Args:
      q: Queries in absorbed form.
      pool, layer: Latent pools of all layers, and the index of the layer to read.
      page_table, first, until, window: See the specification.
      row_starts: First flat row of each request, and the end; later rows are padding.
      rank: Columns of the latent.
      max_rows: Maximum rows of a request.
      span, tile: Positions of each; they fix the reduction order.
      scale: Multiplier of the scores.
      tiles: Tile config.
      interpret: Run on a CPU.
    """
    (R, Hq, size), B = q.shape, len(page_table)
    lanes, blocks, sharing = tiles.programs_of(max_rows * Hq, B)
    width, rope_width = block_widths(rank, size - rank)
    work = LatentWork(
        rank=rank,
        rope=size - rank,
        width=width,
        rope_width=rope_width,
        span=span,
        tile=tile,
        nodes=window.shape[1],
        scale=scale * LOG2_E,
        lanes=lanes,
        ones=16 * tiles.warps,
        blocks=blocks,
        sharing=sharing,
        max_rows=max_rows,
    )
    out = jax.ShapeDtypeStruct((R, Hq, rank), q.dtype)
    capacity = page_table.shape[1] * pool.shape[3]
    units = units_of(capacity, sharing, span, tile)
    results = pl.pallas_call(
        partial(_attend_latent_kernel, work=work, interpret=interpret),
        grid=(blocks, sharing, B),
        out_shape=out if sharing == 1 else SplitPartials.of(units, R, Hq, rank),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="latent_attention",
    )(q, pool, layer, page_table, row_starts, first, until, window_operand(window))
    if sharing == 1:
        return results
    parts = SplitPartials(sums=results[0], peaks=results[1], totals=results[2])
    return combine(parts, row_starts, first, until, capacity, q.dtype, work, interpret)


def _attend_latent_kernel(
    q_ref,
    pool_ref,
    layer_ref,
    table_ref,
    starts_ref,
    first_ref,
    until_ref,
    window_ref,
    *result_refs,
    work,
    interpret,
):
    """One program per block of lanes, share of the positions, and request."""
    (results,) = result_refs if work.sharing == 1 else (SplitPartials._make(result_refs),)
    refs = LatentRefs(
        q=q_ref,
        pool=pool_ref,
        layer=layer_ref,
        table=table_ref,
        starts=starts_ref,
        first=first_ref,
        until=until_ref,
        window=window_ref,
        results=results,
    )
    block, share, request = (pl.program_id(axis) for axis in range(3))
    # The last rows attend to most positions: their programs, the longest, start first.
    block = work.blocks - 1 - block
    heads = refs.q.shape[1]
    start, stop = refs.starts[request], refs.starts[request + 1]
    if work.sharing == 1:
        _clear_padding(refs, request * work.blocks + block, work)

    @pl.when(start + lax.div(block * work.lanes, heads) < stop)
    def _():
        lane = early(block * work.lanes + lax.iota(jnp.int32, work.lanes), interpret)
        row, head = start + lax.div(lane, heads), lax.rem(lane, heads)
        is_lane = row < stop
        row = jnp.minimum(row, stop - 1)  # spare lanes repeat the last row and are not written
        first, until = pltriton.load(refs.first.at[row]), pltriton.load(refs.until.at[row])
        capacity = refs.table.shape[1] * refs.pool.shape[3]
        seen = LatentRange(
            pool_ref=refs.pool,
            table_ref=refs.table,
            window_ref=refs.window,
            layer=refs.layer[0],
            request=request,
            row=row,
            first=first,
            until=until,
            high=jnp.minimum(jnp.max(until) + work.nodes, capacity),
        )
        own = (row, head, is_lane)
        if work.sharing == 1:
            sums = _sum_alone(refs, seen, own, work)
            _write(refs.results, own, sums)
            return
        bounds = request_units(refs.first, refs.until, start, stop, capacity, work)
        each = pl.cdiv(bounds.end - bounds.base, work.sharing)
        unit = bounds.base + share * each

        @pl.when(unit < bounds.end)
        def _():
            _store_share(refs, seen._replace(high=bounds.high), own, bounds, unit, each, work)


def _sum_alone(refs, seen, own, work):
    """Accumulates all positions of a block of lanes."""
    low = jnp.min(jnp.minimum(seen.first, seen.until))
    begin = lax.div(low, work.tile)
    end = jnp.where(low < seen.high, pl.cdiv(seen.high, work.tile), begin)
    nothing = LatentSums.nothing(work)

    def close(i, state):
        sums, whole = state
        is_end = (lax.rem((i + 1) * work.tile, work.span) == 0) | (i + 1 == end)
        return lax.cond(is_end, lambda: (nothing, merged(whole, sums)), lambda: state)

    return sum_positions(refs, seen, own, (begin, end), close, (nothing,), work)[-1]


def _store_share(refs, seen, own, bounds, unit, each, work):
    """Accumulates the units of a share, and stores each."""
    begin = jnp.maximum(unit * bounds.tiles, lax.div(bounds.low, work.tile))
    end = jnp.minimum((unit + each) * bounds.tiles, pl.cdiv(bounds.high, work.tile))

    def close(i, state):
        is_end = (lax.rem(i + 1, bounds.tiles) == 0) | (i + 1 == end)

        def stored():
            _store_unit(refs.results, lax.div(i, bounds.tiles) - bounds.base, own, state[0])
            return (LatentSums.nothing(work),)

        return lax.cond(is_end, stored, lambda: state)

    sum_positions(refs, seen, own, (begin, end), close, (), work)


def _clear_padding(refs, index, work):
    """Writes zeros to the padding rows, which are strided over programs."""
    R, Hq, rank = refs.results.shape
    requests = refs.starts.shape[0] - 1
    begin, stride = refs.starts[requests] + index, requests * work.blocks
    column = lax.iota(jnp.int32, pl.next_power_of_2(rank))
    zeros = jnp.zeros(column.shape, refs.results.dtype)

    def clear(number, _):
        def clear_head(head, _):
            at = refs.results.at[begin + number * stride, head, column]
            pltriton.store(at, zeros, mask=column < rank)

        lax.fori_loop(0, Hq, clear_head, None)

    lax.fori_loop(0, pl.cdiv(jnp.maximum(R - begin, 0), stride), clear, None)


def _write(out_ref, own, sums):
    """Divides by the total weight and writes the outputs of the lanes that are not spare."""
    total = jnp.maximum(sums.total.max(axis=0), 1e-30)
    for i, block in enumerate(sums.blocks):
        value = (block / total[None, :]).astype(out_ref.dtype)
        _store_block(out_ref, (), own, i, value)


def _store_unit(parts, unit, own, sums):
    """Stores the accumulator of a unit."""
    for i, block in enumerate(sums.blocks):
        _store_block(parts.sums, (unit,), own, i, block)
    row, head, is_lane = own
    at = jnp.where(is_lane, row, parts.peaks.shape[1])
    pltriton.store(parts.peaks.at[unit, at, head], sums.peak, mask=is_lane)
    pltriton.store(parts.totals.at[unit, at, head], sums.total.max(axis=0), mask=is_lane)


def _store_block(ref, unit, own, i, block):
    """Stores a block of columns, [width, lanes], of the lanes that are not spare."""
    row, head, is_lane = own
    *_, rows, _, rank = ref.shape
    column = i * block.shape[0] + lax.iota(jnp.int32, block.shape[0])[None, :]
    keep = is_lane[:, None] & (column < rank)
    # A number that is not written gets a row out of bounds, for the interpreter.
    row = jnp.where(keep, row[:, None], rows)
    pltriton.store(ref.at[(*unit, row, head[:, None], column)], block.T, mask=keep)
