"""Attention over latent rows of `latent_attention` with WGMMA and TMA, warp-specialised (Pallas,
Mosaic GPU).

A program processes 64 lanes, the (row, head) pairs of a request, in two consumer warpgroups. Each
computes the weights of one half of a tile's positions, reads the other's from shared memory, and
accumulates one half of the latent columns. A third warpgroup, the producer, loads queries and tiles
for both. Tiles, splits and their order equal those
of `latent_attention`, so results are bitwise equal.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Bool, Float, Int

from kernels.kernel_limits import fits_latent_sm90
from kernels.latent_tiles import (
    LATENT_COLUMNS,
    SM90_RANK,
    SM90_ROPE,
    SPLIT_PROGRAMS,
    LatentAttentionTiles,
    sm90_blocks,
)
from kernels.pallas_gpu.attention.latent_attention_sm90_mainloop import (
    BLOCKS,
    GROUPS,
    OWN,
    LatentBuffers,
    LatentItem,
    LatentSm90Refs,
    LatentSm90Work,
    attend_item,
)
from kernels.pallas_gpu.attention.online_softmax import LOG2_E
from kernels.pallas_gpu.attention.verify_sm90_mainloop import LANES, TILE
from kernels.pallas_gpu.gemm.linear_sm90_mainloop import LINE_BYTES, LINES

_ROPE, _RANK = SM90_ROPE, SM90_RANK
_COPYING_REGISTERS, _MULTIPLYING_REGISTERS = 24, 240


def takes(
    pool: Float[jax.Array, "L 1 P page 1 r_dr"],
    window: Bool[jax.Array, "R N"],
    rank: int,
    tile: int,
) -> bool:
    """Returns whether `attend_latent_sm90` supports the arrays: `fits_latent_sm90`, bfloat16.

    Args:
      pool, window: Latent pools, and the windows of rows.
      rank: Columns of the latent.
      tile: Positions of a tile.
    """
    fits = fits_latent_sm90(pool.shape[3], pool.shape[5], window.shape[1], rank, tile)
    return fits and pool.dtype == jnp.bfloat16


def attend_latent_sm90(
    q: Float[jax.Array, "R Hq r_dr"],
    pool: Float[jax.Array, "L 1 P page 1 r_dr"],
    layer: Int[jax.Array, " 1"],
    page_table: Int[jax.Array, "B table"],
    row_starts: Int[jax.Array, " B1"],
    first: Int[jax.Array, " R"],
    until: Int[jax.Array, " R"],
    *,
    near: int,
    split: int,
    far_split: int,
    scale: float,
    tiles: LatentAttentionTiles,
) -> Float[jax.Array, "R Hq r"]:
    """Same as `latent_attention.attend_latent`, for arrays that `takes` accepts."""
    (R, Hq, _), (P, page) = q.shape, pool.shape[2:4]
    blocks = sm90_blocks(R * Hq, len(page_table))
    work = LatentSm90Work(
        blocks=blocks,
        pages=P,
        page=page,
        near=near // TILE,
        split=split // TILE,
        far_split=far_split // TILE,
        scale=scale * LOG2_E,
        programs=min(blocks, SPLIT_PROGRAMS),
        stages=tiles.stages,
    )
    return _attend(q, pool, layer, page_table, row_starts, first, until, work=work)


# A separate function, for the same reason as `attention_layer_sm90`.
@functools.partial(jax.jit, static_argnames=("work",), inline=False)
def _attend(q, pool, layer, page_table, row_starts, first, until, *, work):
    (R, Hq, size), L = q.shape, len(pool)
    # TMA needs blocks of lanes that begin at a multiple of 8. Spare lanes repeat the last row.
    starts, stops = row_starts[:-1] * Hq, row_starts[1:] * Hq
    ends = jnp.cumsum(-(-(stops - starts) // LANES))
    begins = jnp.concatenate([jnp.zeros(1, ends.dtype), ends[:-1]])
    block, last = jnp.arange(work.blocks), len(ends) - 1
    request = jnp.minimum(jnp.searchsorted(ends, block, side="right"), last)
    lane = starts[request] + (block - begins[request]) * LANES
    lane = lane[:, None] + jnp.arange(LANES)
    lane = jnp.clip(lane, 0, jnp.maximum(stops[request] - 1, 0)[:, None]).reshape(-1)
    pairs = jnp.stack([first, until])[:, lane // Hq].astype(jnp.int32)
    capacity = page_table.shape[1] * work.page
    bounds = _bounds_of(request, block < ends[-1], pairs, capacity, work)
    blocks, _ = plgpu.kernel(
        functools.partial(_latent_attention_sm90_kernel, work=work),
        out_type=(
            jax.ShapeDtypeStruct((len(lane), _RANK), q.dtype),
            jax.ShapeDtypeStruct((work.programs, GROUPS, OWN, LANES, LATENT_COLUMNS), jnp.float32),
        ),
        grid=(work.programs,),
        grid_names=("program",),
        num_threads=GROUPS + 1,
        thread_name="group",
        scratch_types=_shared_of(work)._asdict(),
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=0),
        kernel_name="latent_attention_sm90",
    )(
        q.reshape(R * Hq, size)[lane],
        pool.reshape(L * work.pages * work.page, size),
        layer,
        page_table,
        pairs,
        bounds,
    )
    row = jnp.arange(R)
    request = jnp.searchsorted(row_starts[1:], row, side="right")
    is_row, request = request <= last, jnp.minimum(request, last)
    lane = begins[request] * LANES + (row - row_starts[request]) * Hq
    out = blocks[jnp.where(is_row, lane, 0)[:, None] + jnp.arange(Hq)]
    return jnp.where(is_row[:, None, None], out, 0)


def _bounds_of(request, has_lanes, visible, capacity, work):
    """Returns `LatentSm90Refs.bounds`; a block without lanes has no tiles."""
    first, until = visible.reshape(2, work.blocks, LANES)
    low = jnp.minimum(first, until).min(axis=1)
    high = jnp.minimum(until.max(axis=1), capacity)
    begin = low // TILE
    # A block without visible positions reads one tile, which gives zeros.
    end = jnp.where(has_lanes, jnp.maximum(-(-high // TILE), begin + 1), begin)
    bounds = [request, begin, end, first.max(axis=1), until.min(axis=1)]
    return jnp.stack(bounds, axis=1).astype(jnp.int32)


def _shared_of(work):
    """Returns the shared memory types of a program."""
    kind = jnp.bfloat16

    def block(*shape, line_bytes=LINE_BYTES):
        line = line_bytes // kind.dtype.itemsize
        layout = plgpu.TilingTransform((LINES, line)), plgpu.SwizzleTransform(line_bytes)
        return plgpu.SMEM(shape, kind, transforms=layout)

    return LatentBuffers(
        queries=block(BLOCKS, LANES, LATENT_COLUMNS),
        query_ropes=block(LANES, _ROPE),
        tiles=block(work.stages, BLOCKS, TILE, LATENT_COLUMNS),
        ropes=block(work.stages, TILE, _ROPE),
        peaks=plgpu.SMEM((GROUPS, LANES), jnp.float32),
        weights=block(LANES, TILE, line_bytes=LINE_BYTES // GROUPS),
        counts=plgpu.SMEM((2, GROUPS, LANES), jnp.int32),
        come=plgpu.Barrier(num_arrivals=BLOCKS + 1, num_barriers=work.stages),
        is_free=plgpu.Barrier(num_arrivals=GROUPS, num_barriers=work.stages),
        queries_come=plgpu.Barrier(num_arrivals=BLOCKS + 1),
        queries_free=plgpu.Barrier(num_arrivals=GROUPS),
        meet=plgpu.Barrier(num_arrivals=GROUPS),
    )


def _latent_attention_sm90_kernel(*refs, work, **shared):
    """Programs process blocks of lanes, longest first."""
    refs, shared = LatentSm90Refs._make(refs), LatentBuffers(**shared)
    program, group = lax.axis_index("program"), lax.axis_index("group")
    items = pl.cdiv(work.blocks - program, work.programs)

    @pl.when(group == GROUPS)
    def _copy():
        plgpu.set_max_registers(_COPYING_REGISTERS, action="decrease")

        def copy(turn, step):
            item = _item_of(refs, program + turn * work.programs, work)
            _copy_queries(refs, shared, item, turn)
            return _copy_tiles(refs, shared, item, step, work)

        lax.fori_loop(0, items, copy, jnp.int32(0))

    @pl.when(group < GROUPS)
    def _attend():
        plgpu.set_max_registers(_MULTIPLYING_REGISTERS, action="increase")

        def attend(turn, step):
            item = _item_of(refs, program + turn * work.programs, work)
            plgpu.barrier_wait(shared.queries_come)
            attend_item(refs, shared, program, group, item, step, work)
            plgpu.barrier_arrive(shared.queries_free)
            return step + item.end - item.begin

        lax.fori_loop(0, items, attend, jnp.int32(0))


def _item_of(refs, number, work):
    """Returns the work item `number`; the last blocks of requests, the longest, come first."""
    block = work.blocks - 1 - number
    return LatentItem(block * LANES, *(refs.bounds[block, i] for i in range(5)))


def _copy_queries(refs, shared, item, turn):
    """Loads the queries of a block of lanes."""

    @pl.when(turn > 0)
    def _wait():
        plgpu.barrier_wait(shared.queries_free)

    lanes = pl.ds(item.place, LANES)
    for i in range(BLOCKS):
        columns = pl.ds(i * LATENT_COLUMNS, LATENT_COLUMNS)
        plgpu.copy_gmem_to_smem(
            refs.q.at[lanes, columns], shared.queries.at[i], shared.queries_come
        )
    ropes = refs.q.at[lanes, pl.ds(_RANK, _ROPE)]
    plgpu.copy_gmem_to_smem(ropes, shared.query_ropes, shared.queries_come)


def _copy_tiles(refs, shared, item, step, work):
    """Loads the tiles of a block of lanes into free pipeline stages; returns the next step."""
    columns, per_page = refs.table.shape[1], work.page // TILE
    layer = refs.layer[0] * work.pages

    def page_at(i):
        return refs.table[item.request, jnp.minimum(lax.div(i, per_page), columns - 1)]

    def copy(i, carry):
        step, number = carry
        slot = lax.rem(step, work.stages)

        @pl.when(step >= work.stages)
        def _wait():
            plgpu.barrier_wait(shared.is_free.at[slot])

        rows = pl.ds((layer + number) * work.page + lax.rem(i, per_page) * TILE, TILE)
        come = shared.come.at[slot]
        for j in range(BLOCKS):
            block = refs.pool.at[rows, pl.ds(j * LATENT_COLUMNS, LATENT_COLUMNS)]
            plgpu.copy_gmem_to_smem(block, shared.tiles.at[slot, j], come)
        ropes = refs.pool.at[rows, pl.ds(_RANK, _ROPE)]
        plgpu.copy_gmem_to_smem(ropes, shared.ropes.at[slot], come)
        return step + 1, page_at(i + 1)

    return lax.fori_loop(item.begin, item.end, copy, (step, page_at(item.begin)))[0]
