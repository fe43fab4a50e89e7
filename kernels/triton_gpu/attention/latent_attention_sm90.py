"""Attention over latent rows of `latent_attention` with WGMMA and TMA, warp-specialised (Gluon).

A program processes 64 lanes, the (row, head) pairs of a request, in two consumer warpgroups. Each
computes the weights of one half of a tile's positions, reads the other's from shared memory, and
accumulates one half of the latent columns. A producer warp loads queries and tiles for both. Tiles,
splits and their order equal those of `latent_attention`, so results are bitwise equal.
"""

import torch
import triton
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from kernels.kernel_limits import fits_latent_sm90
from kernels.latent_tiles import SPLIT_PROGRAMS, LatentAttentionTiles, sm90_blocks
from kernels.triton_gpu.attention.latent_attention_sm90_mainloop import (
    BLOCKS,
    GROUPS,
    RANK,
    ROPE,
    SIZE,
    WIDTH,
    LatentPipeline,
    LatentResults,
    LatentSm90Config,
    attend_items,
    item_of,
)
from kernels.triton_gpu.attention.qk_norm_rope_kv_write import HeadSizes
from kernels.triton_gpu.attention.verify_sm90_loads import RowVisibility
from kernels.triton_gpu.attention.verify_sm90_mainloop import LANES, LOG2_E, TILE, WARPS
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.linear_sm90 import copy_tile, is_on_hopper

_REGISTERS = 168
"""Registers per thread of three warpgroups; the producer releases some to the consumers."""
_MULTIPLYING_REGISTERS, _COPYING_REGISTERS = gl.constexpr(240), gl.constexpr(24)


def takes(
    pool: Float[Tensor, "L 1 P page 1 r_dr"], window: Bool[Tensor, "R N"], rank: int, tile: int
) -> bool:
    """Returns whether `attend_latent_sm90` supports the arrays: `fits_latent_sm90`, bfloat16 and
    Hopper.

    Args:
      pool, window: Latent pools, and the windows of rows.
      rank: Columns of the latent.
      tile: Positions of a tile.
    """
    fits = fits_latent_sm90(pool.shape[3], pool.shape[5], window.shape[1], rank, tile)
    return fits and pool.dtype == torch.bfloat16 and is_on_hopper()


def attend_latent_sm90(
    q: Float[Tensor, "R Hq r_dr"],
    pool: Float[Tensor, "L 1 P page 1 r_dr"],
    layer: int,
    page_table: Int[Tensor, "B table"],
    row_starts: Int[Tensor, " B1"],
    first: Int[Tensor, " R"],
    until: Int[Tensor, " R"],
    *,
    max_rows: int,
    near: int,
    split: int,
    far_split: int,
    scale: float,
    tiles: LatentAttentionTiles,
) -> Float[Tensor, "R Hq r"]:
    """Same as `latent_attention.attend_latent`, for arrays that `takes` accepts."""
    (R, Hq, size), page, (B, columns) = q.shape, pool.shape[3], page_table.shape
    blocks = triton.cdiv(max_rows * Hq, LANES.value)
    programs = min(blocks * B, sm90_blocks(R * Hq, B), SPLIT_PROGRAMS)
    shape = programs, GROUPS.value, 2, LANES.value, WIDTH.value
    out, totals = q.new_empty((R, Hq, RANK.value)), q.new_empty(shape, dtype=torch.float32)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    lanes, rows = q.view(R * Hq, size), pool[layer, 0].view(-1, size)
    q_of, q_rope_of, latents_of, ropes_of = (
        TensorDescriptor.from_tensor(array, [block, width], layout)
        for array, block in ((lanes, LANES.value), (rows, TILE.value))
        for width in (WIDTH.value, ROPE.value)
    )
    _latent_attention_sm90_kernel[(programs,)](
        q_of,
        q_rope_of,
        latents_of,
        ropes_of,
        page_table,
        RowVisibility(starts=row_starts, first=first, until=until),
        LatentResults(out=out, totals=totals),
        num_rows=R,
        num_requests=B,
        columns=columns,
        scale=scale * LOG2_E.value,
        heads=HeadSizes(q_heads=Hq, k_heads=1, D=size, page=page, gated=False, line=0),
        config=LatentSm90Config(
            near=near // TILE.value,
            split=split // TILE.value,
            far_split=far_split // TILE.value,
            blocks=blocks,
            stages=tiles.stages,
        ),
        num_warps=WARPS.value,
        maxnreg=_REGISTERS,
        **launching(q),
    )
    return out


@gluon.jit(do_not_specialize=["num_rows", "num_requests", "columns"])
def _latent_attention_sm90_kernel(
    q_of,
    q_rope_of,
    latents_of,
    ropes_of,
    table_at,
    seen,
    results,
    num_rows,
    num_requests,
    columns,
    scale,
    heads: gl.constexpr,
    config: gl.constexpr,
    is_launched: gl.constexpr,
):
    """Programs process blocks of lanes, longest first."""
    if is_launched:
        gdc_wait()
    begin = gl.load(seen.starts + num_requests) + gl.program_id(0)
    _clear_padding(results.out, begin, num_rows, gl.num_programs(0), heads)
    stages: gl.constexpr = config.stages
    of_barrier: gl.constexpr = mbarrier.MBarrierLayout()
    of_lines: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    pipeline = LatentPipeline(
        queries=gl.allocate_shared_memory(gl.bfloat16, [BLOCKS, LANES, WIDTH], q_of.layout),
        query_ropes=gl.allocate_shared_memory(gl.bfloat16, [1, LANES, ROPE], q_rope_of.layout),
        tiles=gl.allocate_shared_memory(
            gl.bfloat16, [stages * BLOCKS, TILE, WIDTH], latents_of.layout
        ),
        ropes=gl.allocate_shared_memory(gl.bfloat16, [stages, TILE, ROPE], ropes_of.layout),
        come=gl.allocate_shared_memory(gl.int64, [stages, 1], of_barrier),
        is_free=gl.allocate_shared_memory(gl.int64, [stages, 1], of_barrier),
        queries_come=gl.allocate_shared_memory(gl.int64, [1, 1], of_barrier),
        queries_free=gl.allocate_shared_memory(gl.int64, [1, 1], of_barrier),
        peaks=gl.allocate_shared_memory(gl.float32, [GROUPS, LANES], of_lines),
        counts=gl.allocate_shared_memory(gl.int32, [GROUPS, LANES], of_lines),
        weights=gl.allocate_shared_memory(gl.bfloat16, [LANES, TILE], q_rope_of.layout),
        bad=gl.allocate_shared_memory(gl.int32, [TILE], of_lines),
        meet=gl.allocate_shared_memory(gl.int64, [1, 1], of_barrier),
    )
    for i in gl.static_range(stages):
        mbarrier.init(pipeline.come.index(i), count=1)
        mbarrier.init(pipeline.is_free.index(i), count=GROUPS)
    mbarrier.init(pipeline.queries_come.index(0), count=1)
    mbarrier.init(pipeline.queries_free.index(0), count=GROUPS)
    mbarrier.init(pipeline.meet.index(0), count=GROUPS)
    fence_async_shared()
    gl.warp_specialize(
        [
            (
                attend_items,
                (pipeline, seen, results, num_requests, columns, scale, 0, heads, config),
            ),
            (
                attend_items,
                (pipeline, seen, results, num_requests, columns, scale, 1, heads, config),
            ),
            (
                _copy_items,
                (
                    q_of,
                    q_rope_of,
                    latents_of,
                    ropes_of,
                    pipeline,
                    seen,
                    table_at,
                    num_requests,
                    columns,
                    heads,
                    config,
                ),
            ),
        ],
        [WARPS, 1],
        [_MULTIPLYING_REGISTERS, _COPYING_REGISTERS],
    )


@gluon.jit
def _clear_padding(out_at, begin, num_rows, stride, heads: gl.constexpr):
    """Writes zeros to every `stride`-th row from `begin` on."""
    line: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    zeros = gl.zeros((RANK,), out_at.dtype.element_ty, layout=line)
    for row in range(begin, num_rows, stride):
        for head in range(heads.q_heads):
            at = (row * heads.q_heads + head).to(gl.int64) * RANK
            gl.store(out_at + at + gl.arange(0, RANK, layout=line), zeros)


@gluon.jit
def _copy_items(
    q_of,
    q_rope_of,
    latents_of,
    ropes_of,
    pipeline,
    seen,
    table_at,
    num_requests,
    columns,
    heads: gl.constexpr,
    config: gl.constexpr,
):
    """Loads the queries and tiles of a program's items into free buffers (producer)."""
    page: gl.constexpr = heads.page
    items = config.blocks * num_requests
    step, turn = 0 * items, 0 * items
    for number in range(gl.program_id(0), items, gl.num_programs(0)):
        item = item_of(number, seen, num_requests, columns, 1, heads, config)
        if item.begin < item.end:
            mbarrier.wait(pipeline.queries_free.index(0), (turn & 1) ^ 1)
            turn += 1
            come = pipeline.queries_come.index(0)
            mbarrier.expect(come, LANES * SIZE * 2)
            for i in gl.static_range(BLOCKS):
                copy_tile(q_of, [item.place, i * WIDTH], come, pipeline.queries.index(i))
            copy_tile(q_rope_of, [item.place, RANK], come, pipeline.query_ropes.index(0))
        own_table = table_at + item.request * columns
        # TMA coordinates have 32 bits; page numbers may have more.
        at = gl.minimum(item.begin * TILE // page, columns - 1)
        page_number = gl.load(own_table + at).to(gl.int32)
        for i in range(item.begin, item.end):
            after = gl.minimum((i + 1) * TILE // page, columns - 1)
            next_page = gl.load(own_table + after).to(gl.int32)
            slot = step % config.stages
            mbarrier.wait(pipeline.is_free.index(slot), ((step // config.stages) & 1) ^ 1)
            line = page_number * page + i * TILE % page
            come = pipeline.come.index(slot)
            mbarrier.expect(come, TILE * SIZE * 2)
            for j in gl.static_range(BLOCKS):
                tile = pipeline.tiles.index(slot * BLOCKS + j)
                copy_tile(latents_of, [line, j * WIDTH], come, tile)
            copy_tile(ropes_of, [line, RANK], come, pipeline.ropes.index(slot))
            page_number = next_page
            step += 1
