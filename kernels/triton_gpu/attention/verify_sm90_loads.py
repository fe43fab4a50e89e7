"""Loads of (row, query head) pairs and TMA loads of tiles for attention (Gluon).

Used by `attention_layer_sm90` and `attention_sm90`: the K/V pipeline, mask bounds of pairs, and
padding.
"""

from typing import Any, NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from kernels.triton_gpu.attention.verify_sm90_mainloop import (
    LANES,
    ONES,
    TILE,
    WARPS,
    HeadRowPairs,
    KVPipeline,
    lines_of,
    wide,
)
from kernels.triton_gpu.gemm.linear_sm90 import copy_tile


class RowVisibility(NamedTuple):
    """Visible positions of rows.

    Attributes:
      starts: First flat row of each request, and the end.
      first, until: Visible positions of each row.
    """

    starts: Any
    first: Any
    until: Any


@gluon.jit
def pairs_of(block, seen, tile: gl.constexpr, heads: gl.constexpr):
    """Loads the pairs of a block, beside `tile` positions; spare pairs repeat the last row of the
    request.
    """
    group: gl.constexpr = heads.q_heads // heads.k_heads
    lanes: gl.constexpr = gl.SliceLayout(1, wide(tile))
    start = gl.load(seen.starts + block.request)
    stop = gl.load(seen.starts + block.request + 1)
    lane = block.number * LANES + gl.arange(0, LANES, layout=lanes)
    row = gl.maximum(gl.minimum(start + lane // group, stop - 1), 0)
    return HeadRowPairs(
        place=row * heads.q_heads + block.head * group + lane % group,
        is_one=start + lane // group < stop,
        first=gl.load(seen.first + row),
        until=gl.load(seen.until + row),
    )


@gluon.jit
def queries_of(q_at, block, seen, heads: gl.constexpr):
    """Loads the queries of a block, in the layout of `lines_of`."""
    group: gl.constexpr = heads.q_heads // heads.k_heads
    lines: gl.constexpr = lines_of(heads.D)
    start = gl.load(seen.starts + block.request)
    stop = gl.load(seen.starts + block.request + 1)
    lane = block.number * LANES + gl.arange(0, LANES, layout=gl.SliceLayout(1, lines))
    row = gl.maximum(gl.minimum(start + lane // group, stop - 1), 0)
    place = row * heads.q_heads + block.head * group + lane % group
    column = gl.arange(0, heads.D, layout=gl.SliceLayout(0, lines))
    return gl.load(q_at + place.to(gl.int64)[:, None] * heads.D + column[None, :])


@gluon.jit
def shared_memory(k_of, v_of, blocks: gl.constexpr, heads: gl.constexpr, config: gl.constexpr):
    """Allocates the queries of `blocks` blocks, the ones, and the K/V pipeline of a program."""
    stages: gl.constexpr = config.stages
    v_tiles: gl.constexpr = stages * config.copied + (config.groups if config.groups > 1 else 0)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    queries = gl.allocate_shared_memory(gl.bfloat16, [blocks, LANES, heads.D], swizzled)
    ones = gl.allocate_shared_memory(gl.bfloat16, [ONES, TILE], swizzled)
    pipeline = KVPipeline(
        k_tiles=gl.allocate_shared_memory(gl.bfloat16, [stages, TILE, heads.D], k_of.layout),
        v_tiles=gl.allocate_shared_memory(gl.bfloat16, [v_tiles, TILE, config.width], v_of.layout),
        keys_come=gl.allocate_shared_memory(gl.int64, [stages, 1], barrier),
        values_come=gl.allocate_shared_memory(gl.int64, [stages, 1], barrier),
        is_free=gl.allocate_shared_memory(gl.int64, [stages, 1], barrier),
    )
    for i in gl.static_range(stages):
        mbarrier.init(pipeline.keys_come.index(i), count=1)
        mbarrier.init(pipeline.values_come.index(i), count=1)
        mbarrier.init(pipeline.is_free.index(i), count=config.groups)
    return queries, ones, pipeline


@gluon.jit
def clear_padding(out_at, begin, num_rows, stride, head, heads: gl.constexpr):
    """Writes zeros to a KV head's outputs in every `stride`-th row from `begin` on."""
    size: gl.constexpr = heads.q_heads // heads.k_heads * heads.D
    line: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    block: gl.constexpr = triton.next_power_of_2(size)
    column = gl.arange(0, block, layout=line)
    zeros = gl.zeros((block,), out_at.dtype.element_ty, layout=line)
    for row in range(begin, num_rows, stride):
        place = (row * heads.k_heads + head).to(gl.int64) * size
        gl.store(out_at + place + column, zeros, mask=column < size)


@gluon.jit
def copy_tiles(
    k_of,
    v_of,
    pipeline,
    table_at,
    columns,
    begin,
    end,
    column,
    v_column,
    heads: gl.constexpr,
    config: gl.constexpr,
):
    """Loads the tiles of a share into free pipeline stages (producer)."""
    page: gl.constexpr = heads.page
    copied: gl.constexpr = config.copied
    # TMA coordinates have 32 bits; page numbers may have more.
    page_number = gl.load(table_at + gl.minimum(begin * TILE // page, columns - 1)).to(gl.int32)
    for i in range(begin, end):
        after = gl.minimum((i + 1) * TILE // page, columns - 1)
        next_page = gl.load(table_at + after).to(gl.int32)
        step = i - begin
        slot = step % config.stages
        mbarrier.wait(pipeline.is_free.index(slot), ((step // config.stages) & 1) ^ 1)
        line = page_number * page + i * TILE % page
        barrier = pipeline.keys_come.index(slot)
        mbarrier.expect(barrier, TILE * heads.D * 2)
        copy_tile(k_of, [line, column], barrier, pipeline.k_tiles.index(slot))
        barrier = pipeline.values_come.index(slot)
        mbarrier.expect(barrier, TILE * config.width * copied * 2)
        for part in gl.static_range(copied):
            at = [line, column + v_column + part * config.width]
            copy_tile(v_of, at, barrier, pipeline.v_tiles.index(slot * copied + part))
        page_number = next_page
