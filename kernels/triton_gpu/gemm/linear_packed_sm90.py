"""WGMMA GEMM of few rows with a packed weight, with TMA and warp specialisation (Gluon).

Outputs are the wide side of the tensor core, rows the narrow one. One producer warp copies blocks
of packed words and of the rows by TMA, and the words of the first blocks even before the previous
kernel ends. The consumer warps dequantise a part of a block in registers while the tensor cores
multiply the part before it.

Accumulation is one chain along the inputs, a weight is dequantised as by `block_loaders`, and the
epilogue computes as in `linear`, so the bits equal that kernel's.
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int32, Shaped
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import LinearTiles
from kernels.triton_gpu.gemm.int4_w4a16 import int4_assembly
from kernels.triton_gpu.gemm.linear_epilogue import (
    GemmOperands,
    GemmSizes,
    GemmTileConfig,
    SquaresChunks,
)
from kernels.triton_gpu.gemm.linear_sm90 import (
    copy_tile,
    is_on_hopper,
    load_added,
    norm_scale,
    store_tile,
)

WIDTH = gl.constexpr(64)
"""Outputs of a tile, the wide side of a WGMMA."""
WARPS = gl.constexpr(4)
"""Consumer warps, a warpgroup."""
WORDS = gl.constexpr(32)
"""Words of an output in a block, a shared-memory line."""
GROUP = gl.constexpr(128)
"""Inputs of a scale."""
PAIR = gl.constexpr(64)
"""Inputs of a product: two parts of a block."""
FORMATS = ("fp8_w8a16", "int4_w4a16")
"""Formats with a dequantisation below."""
_AHEAD = gl.constexpr(1024)
"""Inputs from the loaded scales to the used ones."""
_IN_FLIGHT = gl.constexpr(2)
"""Products that the tensor cores have yet to finish while the next part is dequantised."""
_COPYING_REGISTERS = gl.constexpr(24)
_REGISTERS = 80
"""Registers of a thread at the launch, which consumers and producer then share differently."""


class PackedPipeline(NamedTuple):
    """Ring of blocks in shared memory, with the mbarriers of producer and consumers.

    Attributes:
      words, rows: Blocks of the weight, and of the rows in pairs of parts.
      full, free: Barriers: the blocks of a slot are loaded, and are consumed.
    """

    words: Any
    rows: Any
    full: Any
    free: Any


def takes(
    x: Float[Tensor, "R inputs"],
    scales: Shaped[Tensor, "scales scales_in"] | None,
    *,
    format: str,
    is_gated: bool,
    segments: int,
    tiles: LinearTiles,
) -> bool:
    """Returns whether `launch` supports a call: few bfloat16 rows, scales of 128 inputs."""
    (rows, inputs), width = x.shape, tiles.columns * (2 if is_gated else 1)
    if scales is None or not tiles.copies_packed or format not in FORMATS or segments > 1:
        return False
    is_whole = inputs % tiles.depth == 0 and inputs == GROUP.value * scales.shape[1]
    is_whole &= scales.dtype in (torch.bfloat16, torch.int32)
    is_tile = rows <= tiles.rows and width == WIDTH.value and tiles.warps == WARPS.value
    return is_whole and is_tile and x.dtype == torch.bfloat16 and is_on_hopper()


def launch(
    x: Float[Tensor, "R inputs"],
    weight: Int32[Tensor, "stored words"],
    scales: Shaped[Tensor, "scales scales_in"],
    args: GemmOperands,
    blocks: int,
    *,
    sizes: GemmSizes,
    squares: SquaresChunks,
    config: GemmTileConfig,
    **launching: bool,
) -> None:
    """Launches the GEMM for arrays that `takes` accepts; writes the outputs of `args`.

    Args:
      x, weight, scales: Rows, packed weight and its scales.
      args: Inputs of the prologue and the epilogue, and outputs.
      blocks: Blocks of outputs.
      sizes, squares, config: Same as for the kernel of `linear`.
      launching: Launch options, see `launching` in `linear`.
    """
    block = [WIDTH.value, WORDS.value]
    if sizes.is_gated:  # blocks of gate and up form one tile
        weight = weight.view(2, sizes.N, weight.shape[1])
        block = [2, WIDTH.value // 2, WORDS.value]
    words_layout = gl.NVMMASharedLayout(128, element_bitwidth=32, rank=len(block))
    rows_layout = gl.NVMMASharedLayout(128, element_bitwidth=16, rank=2)
    _linear_packed_sm90_kernel[(blocks,)](
        TensorDescriptor.from_tensor(x, [config.rows, PAIR.value], rows_layout),
        TensorDescriptor.from_tensor(weight, block, words_layout),
        scales,
        args,
        len(x),
        sizes=sizes,
        squares=squares,
        config=config,
        num_warps=WARPS.value,
        maxnreg=_REGISTERS,
        **launching,
    )


@gluon.jit(do_not_specialize=["num_rows"])
def _linear_packed_sm90_kernel(
    x_of,
    words_of,
    scales_at,
    args,
    num_rows,
    sizes: gl.constexpr,
    squares: gl.constexpr,
    config: gl.constexpr,
    is_launched: gl.constexpr,
):
    """One program per block of outputs."""
    stages: gl.constexpr = config.stages
    calls: gl.constexpr = config.depth // PAIR
    blocks: gl.constexpr = config.depth // config.loads.format.inputs
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ring = PackedPipeline(
        words=gl.allocate_shared_memory(
            gl.int32, [stages * blocks] + words_of.block_type.shape, words_of.layout
        ),
        rows=gl.allocate_shared_memory(
            gl.bfloat16, [stages * calls] + x_of.block_type.shape, x_of.layout
        ),
        full=gl.allocate_shared_memory(gl.int64, [stages, 1], barrier),
        free=gl.allocate_shared_memory(gl.int64, [stages, 1], barrier),
    )
    for i in gl.static_range(stages):
        mbarrier.init(ring.full.index(i), count=1)
        mbarrier.init(ring.free.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_multiply, (ring, scales_at, args, num_rows, sizes, squares, config, is_launched)),
            (_copy, (x_of, words_of, ring, sizes, config, is_launched)),
        ],
        [1],
        [_COPYING_REGISTERS],
    )


@gluon.jit
def _copy(
    x_of, words_of, ring, sizes: gl.constexpr, config: gl.constexpr, is_launched: gl.constexpr
):
    """Producer: copies all blocks; the weight does not depend on the previous kernel."""
    stages: gl.constexpr = config.stages
    steps: gl.constexpr = sizes.K // config.depth
    first: gl.constexpr = min(stages, steps)
    blocks: gl.constexpr = config.depth // config.loads.format.inputs
    count: gl.constexpr = config.depth * 2 * config.rows + blocks * WIDTH * WORDS * 4
    for step in gl.static_range(first):
        full = ring.full.index(step)
        mbarrier.expect(full, count)
        _copy_words(words_of, step, full, ring, step, sizes, config)
    if is_launched:
        gdc_wait()
    for step in gl.static_range(first):
        _copy_rows(x_of, step, ring.full.index(step), ring, step, config)
    slot = 0
    phase = 0
    for step in range(stages, steps):
        mbarrier.wait(ring.free.index(slot), phase)
        full = ring.full.index(slot)
        mbarrier.expect(full, count)
        _copy_words(words_of, step, full, ring, slot, sizes, config)
        _copy_rows(x_of, step, full, ring, slot, config)
        slot += 1
        if slot == stages:
            slot = 0
            phase ^= 1
    if is_launched:
        gdc_launch_dependents()


@gluon.jit
def _copy_words(words_of, step, full, ring, slot, sizes: gl.constexpr, config: gl.constexpr):
    blocks: gl.constexpr = config.depth // config.loads.format.inputs
    column = gl.program_id(0) * config.columns
    for block in gl.static_range(blocks):
        at = (step * blocks + block) * WORDS
        place = ring.words.index(slot * blocks + block)
        if sizes.is_gated:
            copy_tile(words_of, [0, column, at], full, place)
        else:
            copy_tile(words_of, [column, at], full, place)


@gluon.jit
def _copy_rows(x_of, step, full, ring, slot, config: gl.constexpr):
    calls: gl.constexpr = config.depth // PAIR
    for call in gl.static_range(calls):
        at = step * config.depth + call * PAIR
        copy_tile(x_of, [0, at], full, ring.rows.index(slot * calls + call))


@gluon.jit
def _multiply(
    ring,
    scales_at,
    args,
    num_rows,
    sizes: gl.constexpr,
    squares: gl.constexpr,
    config: gl.constexpr,
    is_launched: gl.constexpr,
):
    """Consumer: accumulates the blocks of the ring, applies the epilogue and stores."""
    rows: gl.constexpr = config.rows
    depth: gl.constexpr = config.depth
    stages: gl.constexpr = config.stages
    format: gl.constexpr = config.loads.format
    steps: gl.constexpr = sizes.K // depth
    calls: gl.constexpr = depth // PAIR
    in_block: gl.constexpr = format.inputs // PAIR
    blocks: gl.constexpr = calls // in_block
    ahead: gl.constexpr = max(1, _AHEAD // depth)
    layout: gl.constexpr = _words_layout()
    sums: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, rows, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    column = gl.program_id(0) * config.columns
    lane = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, layout))
    output = column + lane % config.columns
    is_output = output < sizes.N
    output += lane // config.columns * sizes.N
    scales_at += output // format.scales.outputs * format.scales.scales_in
    later = (_scales_of(scales_at, 0, is_output, config),)
    for step in gl.static_range(1, ahead):
        later += (_scales_of(scales_at, min(step, steps - 1), is_output, config),)
    if is_launched:
        gdc_wait()
    early = load_added(args, 0, column, num_rows, rows, config.columns, sizes, WARPS)
    norm = num_rows
    if squares.count > 0:  # overlaps with the first copies
        norm = norm_scale(args, 0, num_rows, sizes, squares, rows, WARPS)
    acc = gl.zeros((WIDTH, rows), gl.float32, sums)
    slot = 0
    phase = 0
    for step in range(steps):
        stored = later[0]
        scales = _scales_of(scales_at, gl.minimum(step + ahead, steps - 1), is_output, config)
        later = later[1:] + (scales,)
        # The products in flight are of the previous step: those of the step before are complete.
        before = ring.free.index((slot + stages - 2) % stages)
        mbarrier.arrive(before, count=1, pred=step > 1)
        mbarrier.wait(ring.full.index(slot), phase)
        words = ()
        for block in gl.static_range(blocks):
            place = ring.words.index(slot * blocks + block).reshape((WIDTH, WORDS))
            words += (place.load(layout),)
        for call in gl.static_range(calls):
            scale = _scale_at(stored, call * PAIR // GROUP, format)
            one, two = _dequantised(words[call // in_block], scale, call % in_block, format)
            pair = gl.reshape(gl.permute(gl.join(one, two), (0, 2, 1)), (WIDTH, PAIR))
            pair = gl.convert_layout(pair, operand, assert_trivial=True)
            x = ring.rows.index(slot * calls + call)
            acc = warpgroup_mma(pair, x.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=_IN_FLIGHT, deps=(acc,))
        slot += 1
        if slot == stages:
            slot = 0
            phase ^= 1
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    result: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [WARPS, 1], [1, 0])
    acc = gl.convert_layout(gl.permute(acc, (1, 0)), result)
    store_tile(acc, norm, early, args, 0, column, num_rows, sizes, squares, WARPS)


@gluon.jit
def _scales_of(scales_at, step, is_output, config: gl.constexpr):
    """Loads the scales of a step as int32: a scale with a zero point, or two scales."""
    in_word: gl.constexpr = 1 if config.loads.format.has_scale_words else 2
    count: gl.constexpr = config.depth // GROUP // in_word
    scales_at += step * (config.depth // GROUP)
    scales_at = scales_at.to(gl.pointer_type(gl.int32), bitcast=True)
    scales = ()
    for number in gl.static_range(count):
        scales += (gl.load(scales_at + number, mask=is_output, other=0),)
    return scales


@gluon.jit
def _scale_at(stored, group: gl.constexpr, format: gl.constexpr):
    """Returns the scales of a group as a column."""
    if format.has_scale_words:
        scale = stored[group]
    else:
        word = stored[group // 2]
        if group % 2 == 1:
            word = word >> 16
        scale = word.to(gl.int16).to(gl.bfloat16, bitcast=True)
    return scale[:, None]


@gluon.jit
def _dequantised(words, scale, call: gl.constexpr, format: gl.constexpr):
    """Dequantises two neighbouring parts of a block."""
    if format.name == "int4_w4a16":
        one, two = _int4_pair(words, scale, call, format.has_scale_words)
    else:
        one, two = _fp8_pair(words, scale, call)
    return one, two


@gluon.jit
def _int4_pair(words, stored, byte: gl.constexpr, has_words: gl.constexpr):
    text: gl.constexpr = int4_assembly(byte, has_words)
    if has_words:
        upper = (stored & -0x10000).to(gl.float32, bitcast=True).to(gl.bfloat16)
        rest = ((stored & 0xFFF0) << 16).to(gl.float32, bitcast=True).to(gl.bfloat16)
        shift = (-128 - (stored & 15).to(gl.float32)).to(gl.bfloat16)
        one, two = gl.inline_asm_elementwise(
            text,
            "=r,=r,r,r,r,r,r,r,r,r",
            [words, upper, rest, shift, upper, rest, shift],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        one, two = gl.inline_asm_elementwise(
            text,
            "=r,=r,r,r,r,r",
            [words, stored, stored],
            dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return one, two


@gluon.jit
def _fp8_pair(words, scale, call: gl.constexpr):
    text: gl.constexpr = _fp8_assembly(call)
    one, two = gl.inline_asm_elementwise(
        text,
        "=r,=r,r,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )
    one = (one * scale).to(gl.bfloat16)
    two = (two * scale).to(gl.bfloat16)
    return one, two


@gluon.constexpr_function
def _fp8_assembly(call):
    """Returns PTX for two int32: two bytes of each, moved as by `fp8_w8a16.four`."""
    lines = [".reg .b32 t;"]
    for number in range(2):
        byte = 2 * call + number
        lines += [
            f"prmt.b32 t, $2, $3, 0x{12 + byte:x}{4 + byte}{8 + byte:x}{byte};",
            "shl.b32 t, t, 4;",
            f"and.b32 ${number}, t, 0x87f087f0;",
        ]
    return "{\n" + "\n".join(lines) + "\n}"


@gluon.constexpr_function
def _words_layout():
    """Returns the layout of words with codes that are an operand of WGMMA in registers."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0], [0, 8], [0, 16]],
        lane_bases=[[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 32],
    )
