"""Vision encoder attention with WGMMA and TMA, warp-specialised (Gluon).

A program has two or three consumer warpgroups, each with 64 patches of a head, and a producer warp
that loads tiles of keys and values for all of them. While a warpgroup computes the softmax weights
of a tile, its tensor cores compute the scores of the next. Tiles and their order equal those of
`encoder_attention`, so results are bitwise equal.
"""

from typing import Any, NamedTuple

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from kernels.tiles import EncoderAttentionTiles
from kernels.triton_gpu.attention.verify_sm90_mainloop import (
    LANES,
    NEGATIVE,
    TILE,
    WARPS,
    lines_of,
    wide,
)
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.linear_sm90 import copy_tile, is_on_hopper

MAIN, REST, BESIDE = gl.constexpr(64), gl.constexpr(8), gl.constexpr(16)
"""Columns of a head's two blocks, and of the second block with the total weight and padding."""
_REGISTERS = {2: 168, 3: 128}
"""Registers per thread, by number of consumer warpgroups, with one more for the producer."""
_MULTIPLYING_REGISTERS = {2: 240, 3: 160}
_COPYING_REGISTERS = 24


class EncoderPipeline(NamedTuple):
    """Multistage pipeline of tiles in shared memory, with its mbarriers.

    Queries, keys and values have two column blocks each.

    Attributes:
      q, q_rest: Queries of each warpgroup.
      k, k_rest, v, v_beside: Keys and values, one tile per pipeline stage.
      queries_come, come, is_free: Barriers: queries have arrived, a tile has arrived, a tile is
        free.
    """

    q: Any
    q_rest: Any
    k: Any
    k_rest: Any
    v: Any
    v_beside: Any
    queries_come: Any
    come: Any
    is_free: Any


class TileWeights(NamedTuple):
    """Softmax weights of a tile, new maximum score, and factor of the previous accumulator."""

    peak: Any
    weights: Any
    decay: Any


class EncoderTileConfig(NamedTuple):
    """Tile config of the kernel.

    Attributes:
      heads: Number of heads.
      groups: Consumer warpgroups.
      stages: Pipeline stages.
      more, copying: Registers per consumer thread and per producer thread.
    """

    heads: int
    groups: int
    stages: int
    more: int
    copying: int


def takes(qkv: Float[Tensor, "R columns"], D: int, tile: int) -> bool:
    """Returns whether `encoder_attention_sm90` supports the arrays: bfloat16 on Hopper.

    Args:
      qkv: See `bidirectional_attention`.
      D: Size of a head.
      tile: Patches of a tile.
    """
    is_whole = MAIN.value + REST.value == D and tile == TILE.value
    return is_whole and qkv.dtype == torch.bfloat16 and is_on_hopper()


def encoder_attention_sm90(
    laid: Float[Tensor, "rows width"],
    count: Int[Tensor, " 1"],
    out: Float[Tensor, "R hidden"],
    *,
    heads: int,
    scale: float,
    tiles: EncoderAttentionTiles,
) -> None:
    """Same as `bidirectional_attention`, for arrays that `takes` accepts.

    Args:
      laid: Output of `lay`, padded to the rows of whole programs.
      count: See `bidirectional_attention`.
      out: Result, which is written.
      heads: Number of heads.
      scale: Multiplier of the scores, times log2(e).
      tiles: Tile config.
    """
    blocks = []
    for columns in (MAIN.value, BESIDE.value):
        layout = gl.NVMMASharedLayout(swizzle_byte_width=2 * columns, element_bitwidth=16, rank=2)
        blocks.append(TensorDescriptor.from_tensor(laid, [TILE.value, columns], layout))
    R, groups = len(out), tiles.groups
    _encoder_attention_sm90_kernel[(triton.cdiv(R, groups * LANES.value), heads)](
        *(*blocks, out, count, R),
        scale=scale,
        config=EncoderTileConfig(
            heads=heads,
            groups=groups,
            stages=tiles.described,
            more=_MULTIPLYING_REGISTERS[groups],
            copying=_COPYING_REGISTERS,
        ),
        num_warps=WARPS.value,
        maxnreg=_REGISTERS[groups],
        **launching(laid),
    )


@gluon.jit(do_not_specialize=["num_rows"])
def _encoder_attention_sm90_kernel(
    main_of,
    beside_of,
    out_at,
    count_at,
    num_rows,
    scale,
    config: gl.constexpr,
    is_launched: gl.constexpr,
):
    """One program per `groups` blocks of 64 rows, and head."""
    groups: gl.constexpr = config.groups
    stages: gl.constexpr = config.stages
    head, first = gl.program_id(1), gl.program_id(0) * groups * LANES
    if is_launched:  # no early launch of the next kernel: this one fills multiprocessors
        gdc_wait()
    count = gl.load(count_at)
    if first >= count:
        for i in gl.static_range(groups):
            zeros = gl.zeros((LANES, MAIN), gl.float32, layout=wide(MAIN))
            beside = gl.zeros((LANES, BESIDE), gl.float32, layout=wide(BESIDE))
            _store_block(out_at, first + i * LANES, num_rows, head, zeros, beside, config)
        return
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    pipeline = EncoderPipeline(
        q=gl.allocate_shared_memory(gl.bfloat16, [groups, LANES, MAIN], main_of.layout),
        q_rest=gl.allocate_shared_memory(gl.bfloat16, [groups, LANES, BESIDE], beside_of.layout),
        k=gl.allocate_shared_memory(gl.bfloat16, [stages, TILE, MAIN], main_of.layout),
        k_rest=gl.allocate_shared_memory(gl.bfloat16, [stages, TILE, BESIDE], beside_of.layout),
        v=gl.allocate_shared_memory(gl.bfloat16, [stages, TILE, MAIN], main_of.layout),
        v_beside=gl.allocate_shared_memory(gl.bfloat16, [stages, TILE, BESIDE], beside_of.layout),
        queries_come=gl.allocate_shared_memory(gl.int64, [1, 1], barrier),
        come=gl.allocate_shared_memory(gl.int64, [stages, 1], barrier),
        is_free=gl.allocate_shared_memory(gl.int64, [stages, 1], barrier),
    )
    mbarrier.init(pipeline.queries_come.index(0), count=1)
    for i in gl.static_range(stages):
        mbarrier.init(pipeline.come.index(i), count=1)
        mbarrier.init(pipeline.is_free.index(i), count=groups)
    fence_async_shared()
    if groups == 2:
        gl.warp_specialize(
            [
                (_attend_block, (pipeline, out_at, first, num_rows, count, scale, head, 0, config)),
                (_attend_block, (pipeline, out_at, first, num_rows, count, scale, head, 1, config)),
                (_copy, (main_of, beside_of, pipeline, first, count, head, config)),
            ],
            [WARPS, 1],
            [config.more, config.copying],
        )
    else:
        gl.warp_specialize(
            [
                (_attend_block, (pipeline, out_at, first, num_rows, count, scale, head, 0, config)),
                (_attend_block, (pipeline, out_at, first, num_rows, count, scale, head, 1, config)),
                (_attend_block, (pipeline, out_at, first, num_rows, count, scale, head, 2, config)),
                (_copy, (main_of, beside_of, pipeline, first, count, head, config)),
            ],
            [WARPS, WARPS, 1],
            [config.more, config.more, config.copying],
        )


@gluon.jit
def _copy(main_of, beside_of, pipeline, first, count, head, config: gl.constexpr):
    """Loads the warpgroups' queries, then tiles of keys and values into free stages (producer)."""
    groups: gl.constexpr = config.groups
    heads: gl.constexpr = config.heads
    rests: gl.constexpr = 3 * heads * MAIN
    padded: gl.constexpr = MAIN + BESIDE
    barrier = pipeline.queries_come.index(0)
    mbarrier.expect(barrier, groups * LANES * padded * 2)
    for i in gl.static_range(groups):
        row = first + i * LANES
        copy_tile(main_of, [row, head * MAIN], barrier, pipeline.q.index(i))
        copy_tile(beside_of, [row, rests + head * BESIDE], barrier, pipeline.q_rest.index(i))
    for i in range(0, gl.cdiv(count, TILE)):
        slot = i % config.stages
        mbarrier.wait(pipeline.is_free.index(slot), ((i // config.stages) & 1) ^ 1)
        barrier = pipeline.come.index(slot)
        mbarrier.expect(barrier, 2 * TILE * padded * 2)
        row, key, value = i * TILE, heads + head, 2 * heads + head
        copy_tile(main_of, [row, key * MAIN], barrier, pipeline.k.index(slot))
        copy_tile(beside_of, [row, rests + key * BESIDE], barrier, pipeline.k_rest.index(slot))
        copy_tile(main_of, [row, value * MAIN], barrier, pipeline.v.index(slot))
        copy_tile(beside_of, [row, rests + value * BESIDE], barrier, pipeline.v_beside.index(slot))


@gluon.jit
def _attend_block(
    pipeline,
    out_at,
    first,
    num_rows,
    count,
    scale,
    head,
    which: gl.constexpr,
    config: gl.constexpr,
):
    """Accumulates all patches for the 64 rows of a warpgroup, and writes the result."""
    last = gl.cdiv(count, TILE) - 1
    peak = gl.full((LANES,), NEGATIVE, gl.float32, layout=gl.SliceLayout(1, wide(TILE)))
    main = gl.zeros((LANES, MAIN), gl.float32, layout=wide(MAIN))
    beside = gl.zeros((LANES, BESIDE), gl.float32, layout=wide(BESIDE))
    mbarrier.wait(pipeline.queries_come.index(0), 0)
    mbarrier.wait(pipeline.come.index(0), 0)
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(_scores_of(pipeline, which, 0),))
    for i in range(0, last):
        slot = (i + 1) % config.stages
        mbarrier.wait(pipeline.come.index(slot), ((i + 1) // config.stages) & 1)
        next_scores = _scores_of(pipeline, which, slot)
        tile_weights = _softmax_weights(scores * scale, peak)
        peak = tile_weights.peak
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(next_scores,))
        main, beside = _add_values(pipeline, main, beside, tile_weights, i % config.stages)
        mbarrier.arrive(pipeline.is_free.index(i % config.stages), count=1)
    # The last patch is repeated to the end of its tile, with weight 0.
    patch = last * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, wide(TILE)))
    padding_bias = gl.where(patch < count, 0.0, NEGATIVE)
    tile_weights = _softmax_weights(scores * scale + padding_bias[None, :], peak)
    main, beside = _add_values(pipeline, main, beside, tile_weights, last % config.stages)
    column = gl.arange(0, BESIDE, layout=gl.SliceLayout(0, wide(BESIDE)))
    total = gl.max(gl.where((column == REST)[None, :], beside, 0.0), axis=1)
    weight = gl.maximum(total, 1e-30)
    main = main / gl.convert_layout(weight, gl.SliceLayout(1, wide(MAIN)))[:, None]
    beside = beside / weight[:, None]
    _store_block(out_at, first + which * LANES, num_rows, head, main, beside, config)


@gluon.jit
def _scores_of(pipeline, which: gl.constexpr, slot):
    """Starts the WGMMAs of a warpgroup's queries and a tile of keys; returns pending scores."""
    zero = gl.zeros((LANES, TILE), gl.float32, layout=wide(TILE))
    k, k_rest = pipeline.k.index(slot), pipeline.k_rest.index(slot)
    scores = warpgroup_mma(
        pipeline.q.index(which), k.permute((1, 0)), zero, use_acc=False, is_async=True
    )
    return warpgroup_mma(
        pipeline.q_rest.index(which), k_rest.permute((1, 0)), scores, is_async=True
    )


@gluon.jit
def _softmax_weights(scores, peak):
    """Computes the softmax weights of a tile, and the factor of the previous accumulator."""
    highest = gl.maximum(peak, gl.max(scores, axis=1))
    weights = gl.exp2(scores - highest[:, None]).to(gl.bfloat16)
    return TileWeights(peak=highest, weights=weights, decay=gl.exp2(peak - highest))


@gluon.jit
def _add_values(pipeline, main, beside, tile_weights, slot):
    """Adds the weighted values of a tile to the accumulator."""
    decay = gl.convert_layout(tile_weights.decay, gl.SliceLayout(1, wide(MAIN)))
    main = main * decay[:, None]
    decay = gl.convert_layout(tile_weights.decay, gl.SliceLayout(1, wide(BESIDE)))
    beside = beside * decay[:, None]
    for_main = gl.convert_layout(tile_weights.weights, gl.DotOperandLayout(0, wide(MAIN), 2))
    for_beside = gl.convert_layout(tile_weights.weights, gl.DotOperandLayout(0, wide(BESIDE), 2))
    main = warpgroup_mma(for_main, pipeline.v.index(slot), main, is_async=True)
    beside = warpgroup_mma(for_beside, pipeline.v_beside.index(slot), beside, is_async=True)
    return warpgroup_mma_wait(num_outstanding=0, deps=(main, beside))


@gluon.jit
def _store_block(out_at, first, num_rows, head, main, beside, config: gl.constexpr):
    """Writes both blocks of 64 rows of a head."""
    at = out_at + head * (MAIN + REST)
    _store(at, main, first, num_rows, MAIN, config)
    _store(at + MAIN, beside, first, num_rows, REST, config)


@gluon.jit
def _store(at, x, first, num_rows, columns: gl.constexpr, config: gl.constexpr):
    """Writes some columns of 64 rows."""
    lines: gl.constexpr = lines_of(x.shape[1])
    hidden: gl.constexpr = config.heads * (MAIN + REST)
    row = first + gl.arange(0, LANES, layout=gl.SliceLayout(1, lines))
    column = gl.arange(0, x.shape[1], layout=gl.SliceLayout(0, lines))
    keep = (row < num_rows)[:, None] & (column < columns)[None, :]
    place = row.to(gl.int64)[:, None] * hidden + column[None, :]
    gl.store(at + place, gl.convert_layout(x.to(gl.bfloat16), lines), mask=keep)
