"""Paged multi-query attention over latent rows (absorbed MLA) with split-KV (Pallas, Triton
backend).

All heads of a request read the same cached rows, `[latent | rope key]`; values are the latents. A
lane is a (row, head) pair. Products are transposed (swap-AB): positions and latent columns are the
wide sides of the tensor core, lanes the narrow one. A tile of positions is loaded once, for scores
and values. The splits of positions are fixed, so results are batch-invariant and independent of the
rows, lanes and programs of the request. A row of a tree has the bits of plain decoding.
`kernels/__init__.py` lists what must equal the Triton twin.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

from kernels.latent_tiles import SM90_LANES, LatentAttentionTiles, block_widths, splits_of
from kernels.pallas_gpu.attention.latent_attention_mainloop import (
    LatentRange,
    LatentWork,
    sum_positions,
)
from kernels.pallas_gpu.attention.latent_attention_sm90 import attend_latent_sm90, takes
from kernels.pallas_gpu.attention.latent_combine import combine, request_splits, tile_range
from kernels.pallas_gpu.attention.online_softmax import LOG2_E
from kernels.pallas_gpu.attention.qk_norm_rope_kv_write import early
from kernels.pallas_gpu.attention.row_bounds import window_operand
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
    near: int,
    split: int,
    far_split: int,
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
      near, split, far_split, tile: See `LatentAttentionOrder`; they fix the reduction order.
      scale: Multiplier of the scores.
      tiles: Tile config.
      interpret: Run on a CPU.
    """
    (R, Hq, size), B = q.shape, len(page_table)
    # Mosaic GPU's interpreter does not support inline PTX.
    if tiles.lanes == SM90_LANES and takes(pool, window, rank, tile) and not interpret:
        return attend_latent_sm90(
            q,
            pool,
            layer,
            page_table,
            row_starts,
            first,
            until,
            near=near,
            split=split,
            far_split=far_split,
            scale=scale,
            tiles=tiles,
        )
    lanes, blocks, sharing = tiles.programs_of(max_rows * Hq, B)
    width, rope_width = block_widths(rank, size - rank)
    work = LatentWork(
        rank=rank,
        rope=size - rank,
        width=width,
        rope_width=rope_width,
        near=near,
        split=split,
        far_split=far_split,
        tile=tile,
        nodes=window.shape[1],
        scale=scale * LOG2_E,
        lanes=lanes,
        blocks=blocks,
        sharing=sharing,
        max_rows=max_rows,
    )
    out = jax.ShapeDtypeStruct((R, Hq, rank), q.dtype)
    capacity = page_table.shape[1] * pool.shape[3]
    splits = splits_of(capacity, near, split, far_split)
    results = pl.pallas_call(
        partial(_attend_latent_kernel, work=work, interpret=interpret),
        grid=(blocks, sharing, B),
        out_shape=out if sharing == 1 else _partials(splits, R, Hq, rank),
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
            first_ref=refs.first,
            until_ref=refs.until,
            whole_from=jnp.max(first),
            whole_until=jnp.min(until),
            high=jnp.minimum(jnp.max(until) + work.nodes, capacity),
        )
        own = (row, head, is_lane)
        if work.sharing == 1:
            low = jnp.min(jnp.minimum(first, until))
            begin = lax.div(low, work.tile)
            end = jnp.where(low < seen.high, pl.cdiv(seen.high, work.tile), begin)
            _write(refs.results, own, sum_positions(refs, seen, own, (begin, end), None, work))
            return
        bounds = request_splits(refs.first, refs.until, start, stop, capacity, work)
        tiles = tile_range(bounds, share, work)

        @pl.when(tiles[0] < tiles[1])
        def _():
            of_request = seen._replace(high=bounds.high)
            store = partial(_store_split, refs.results, bounds.base, own)
            sum_positions(refs, of_request, own, tiles, store, work)


def _partials(splits, R, Hq, rank):
    """Returns the shapes of partial results; lanes are contiguous, as in the accumulators."""
    single = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    of_lanes = single((splits, R, Hq))
    return SplitPartials(sums=single((splits, rank, R, Hq)), peaks=of_lanes, totals=of_lanes)


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
    total = jnp.maximum(sums.total, 1e-30)
    row, head, is_lane = own
    R, _, rank = out_ref.shape
    for i, block in enumerate(sums.blocks):
        value = (block / total[None, :]).astype(out_ref.dtype)
        column = i * value.shape[0] + lax.iota(jnp.int32, value.shape[0])[None, :]
        keep = is_lane[:, None] & (column < rank)
        # A number that is not written gets a row out of bounds, for the interpreter.
        at = (jnp.where(keep, row[:, None], R), head[:, None], column)
        pltriton.store(out_ref.at[at], value.T, mask=keep)


def _store_split(parts, base, own, number, sums):
    """Stores the accumulator of a split."""
    row, head, is_lane = own
    _, rank, R, _ = parts.sums.shape
    number -= base
    for i, block in enumerate(sums.blocks):
        column = i * block.shape[0] + lax.iota(jnp.int32, block.shape[0])[:, None]
        keep = is_lane[None, :]
        if rank % block.shape[0]:
            keep &= column < rank
        # A number that is not written gets a row out of bounds, for the interpreter.
        at = (number, column, jnp.where(keep, row[None, :], R), head[None, :])
        pltriton.store(parts.sums.at[at], block, mask=keep)
    at = jnp.where(is_lane, row, R)
    pltriton.store(parts.peaks.at[number, at, head], sums.peak, mask=is_lane)
    pltriton.store(parts.totals.at[number, at, head], sums.total, mask=is_lane)
