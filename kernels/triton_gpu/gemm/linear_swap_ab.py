"""GEMM of few rows on tensor cores, with TMA and warp specialisation (Gluon).

Outputs are the wide side of the tensor core, rows the narrow one. One producer warp copies blocks
of the weight and of the rows by TMA, and the first blocks of the weight even before the previous
kernel ends. The tensor cores read bfloat16 from shared memory. Of a packed weight the consumer
warps dequantise a part of a block in registers while the tensor cores multiply the part before it.

Accumulation is one chain along the inputs, or along each segment of them. A weight is dequantised
as by `block_loaders`, and the epilogue computes as in `linear`, so the bits equal that kernel's.
"""

import torch
from jaxtyping import Float, Int32, Shaped
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import LinearTiles
from kernels.triton_gpu.gemm.linear_epilogue import (
    GemmOperands,
    GemmSizes,
    GemmTileConfig,
    SquaresChunks,
)
from kernels.triton_gpu.gemm.linear_packed_sm90_mainloop import (
    FORMATS,
    FP8,
    PAIR,
    WIDTH,
    WORDS,
    first_scales,
    is_supported,
    words_layout,
)
from kernels.triton_gpu.gemm.linear_sm90 import (
    barrier,
    copy_tile,
    is_on_hopper,
    load_added,
    norm_scale,
    store_tile,
)
from kernels.triton_gpu.gemm.linear_sm90_mainloop import (
    FEW,
    MOST_ROWS,
    WARPS,
    SwapABPipeline,
    accumulate_segments,
)
from shared.models.formats.fp8_w8a16 import FP8_BLOCK

_RESULT = gl.constexpr(gl.BlockedLayout([1, 2], [2, 16], [WARPS.value, 1], [1, 0]))
"""Layout of the sums of a tile, `[rows, outputs]`."""
_COPYING_REGISTERS, _MORE_COPYING_REGISTERS = gl.constexpr(24), gl.constexpr(32)
"""Registers of a producer thread, and those with segments or in tiles of more than `FEW` rows."""
_EARLY_PARTS = gl.constexpr(2)
"""Parts of a tile with a residual in registers during the main loop."""
_REGISTERS, _MORE_REGISTERS, _MANY_REGISTERS = 80, 96, 128
"""Registers of a thread at the launch, which consumers and producer then share differently.

With the first a multiprocessor holds three programs, with the others two. The second is for
segments and for blocks of rows, the last for more than `FEW` rows and for scales of few inputs.
"""


def takes(
    x: Float[Tensor, "R inputs"],
    weight: Float[Tensor, "stored inputs"] | Int32[Tensor, "stored words"],
    scales: Shaped[Tensor, "scales scales_in"] | None,
    *,
    format: str,
    is_gated: bool,
    segments: int,
    tiles: LinearTiles,
) -> bool:
    """Returns whether `launch` supports a call.

    See `is_supported`. Tiles of less than `FEW` rows must contain all rows; larger ones form blocks
    of rows. Without segments the last step can be partial, except in FP8.
    """
    (rows, inputs), width = x.shape, tiles.columns * (2 if is_gated else 1)
    if not tiles.copies_swapped or format not in FORMATS:
        return False
    is_whole = inputs % (segments * tiles.depth) == 0
    if format != FP8.value:  # TMA fills a partial block with zeros
        is_whole |= segments == 1 and inputs % 8 == 0
    is_whole &= scales is None or tiles.depth >= 2 * FP8_BLOCK
    is_whole &= is_supported(format, inputs, weight, scales)
    is_tile = rows <= tiles.rows or FEW.value <= tiles.rows <= MOST_ROWS.value
    is_tile &= width == WIDTH.value and tiles.warps == WARPS.value
    return is_whole and is_tile and x.dtype == torch.bfloat16 and is_on_hopper()


def launch(
    x: Float[Tensor, "R inputs"],
    weight: Float[Tensor, "stored inputs"] | Int32[Tensor, "stored words"],
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
      x, weight, scales: Rows, weight, and its scales if it is packed.
      args: Inputs of the prologue and the epilogue, and outputs.
      blocks: Blocks of rows and outputs.
      sizes, squares, config: Same as for the kernel of `linear`.
      launching: Launch options, see `launching` in `linear`.
    """
    item, programs = weight.element_size(), (blocks,)
    block = [WIDTH.value, WORDS.value * 4 // item]
    is_blocked = config.rows > FEW.value or len(x) > config.rows
    if config.is_separate:
        programs = blocks, config.segments
    if sizes.is_gated:  # blocks of gate and up form one tile
        weight = weight.view(2, sizes.N, weight.shape[1])
        block = [2, WIDTH.value // 2, block[1]]
    weight_layout = gl.NVMMASharedLayout(128, element_bitwidth=8 * item, rank=len(block))
    rows_layout = gl.NVMMASharedLayout(128, element_bitwidth=16, rank=2)
    _linear_swap_ab_kernel[programs](
        TensorDescriptor.from_tensor(x, [config.rows, PAIR.value], rows_layout),
        TensorDescriptor.from_tensor(weight, block, weight_layout),
        scales,
        args,
        len(x),
        sizes=sizes,
        squares=squares,
        config=config,
        is_blocked=is_blocked,
        num_warps=WARPS.value,
        maxnreg=_registers_of(config, is_blocked=is_blocked),
        **launching,
    )


def _registers_of(config: GemmTileConfig, *, is_blocked: bool) -> int:
    if config.rows > FEW.value or 0 < config.loads.format.group < FP8_BLOCK:
        return _MANY_REGISTERS
    return _MORE_REGISTERS if is_blocked or config.segments > 1 else _REGISTERS


@gluon.jit(do_not_specialize=["num_rows"])
def _linear_swap_ab_kernel(
    x_of,
    weight_of,
    scales_at,
    args,
    num_rows,
    sizes: gl.constexpr,
    squares: gl.constexpr,
    config: gl.constexpr,
    is_blocked: gl.constexpr,
    is_launched: gl.constexpr,
):
    """One program per block of rows and outputs, or per block and segment of inputs."""
    stages: gl.constexpr = config.stages
    calls: gl.constexpr = config.depth // PAIR
    blocks: gl.constexpr = config.depth // config.loads.format.inputs
    of_barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ring = SwapABPipeline(
        weight=gl.allocate_shared_memory(
            weight_of.dtype, [stages * blocks] + weight_of.block_type.shape, weight_of.layout
        ),
        rows=gl.allocate_shared_memory(
            gl.bfloat16, [stages * calls] + x_of.block_type.shape, x_of.layout
        ),
        full=gl.allocate_shared_memory(gl.int64, [stages, 1], of_barrier),
        free=gl.allocate_shared_memory(gl.int64, [stages, 1], of_barrier),
    )
    for i in gl.static_range(stages):
        mbarrier.init(ring.full.index(i), count=1)
        mbarrier.init(ring.free.index(i), count=1)
    fence_async_shared()
    is_small: gl.constexpr = config.segments == 1 and config.rows <= FEW
    copying: gl.constexpr = _COPYING_REGISTERS if is_small else _MORE_COPYING_REGISTERS
    gl.warp_specialize(
        [
            (
                _multiply,
                (ring, scales_at, args, num_rows, sizes, squares, config, is_blocked, is_launched),
            ),
            (_copy, (x_of, weight_of, ring, num_rows, sizes, config, is_blocked, is_launched)),
        ],
        [1],
        [copying],
    )


@gluon.jit
def _copy(
    x_of,
    weight_of,
    ring,
    num_rows,
    sizes: gl.constexpr,
    config: gl.constexpr,
    is_blocked: gl.constexpr,
    is_launched: gl.constexpr,
):
    """Producer: copies all blocks; the weight does not depend on the previous kernel."""
    stages: gl.constexpr = config.stages
    steps: gl.constexpr = _steps_of(sizes, config)
    first: gl.constexpr = min(stages, steps)
    blocks: gl.constexpr = config.depth // config.loads.format.inputs
    count: gl.constexpr = config.depth * 2 * config.rows + blocks * WIDTH * WORDS * 4
    begin = 0
    if config.is_separate:
        begin = gl.program_id(1) * steps
    for step in gl.static_range(first):
        full = ring.full.index(step)
        mbarrier.expect(full, count)
        _copy_weight(weight_of, num_rows, begin + step, full, ring, step, sizes, config, is_blocked)
    if is_launched:
        gdc_wait()
    for step in gl.static_range(first):
        full = ring.full.index(step)
        _copy_rows(x_of, num_rows, begin + step, full, ring, step, config, is_blocked)
    slot = 0
    phase = 0
    for step in range(stages, steps):
        mbarrier.wait(ring.free.index(slot), phase)
        full = ring.full.index(slot)
        mbarrier.expect(full, count)
        _copy_weight(weight_of, num_rows, begin + step, full, ring, slot, sizes, config, is_blocked)
        _copy_rows(x_of, num_rows, begin + step, full, ring, slot, config, is_blocked)
        slot += 1
        if slot == stages:
            slot = 0
            phase ^= 1
    if is_launched:
        gdc_launch_dependents()


@gluon.jit
def _copy_weight(
    weight_of,
    num_rows,
    step,
    full,
    ring,
    slot,
    sizes: gl.constexpr,
    config: gl.constexpr,
    is_blocked: gl.constexpr,
):
    blocks: gl.constexpr = config.depth // config.loads.format.inputs
    line: gl.constexpr = weight_of.block_type.shape[-1]
    _, column = _block_of(num_rows, config, is_blocked)
    for block in gl.static_range(blocks):
        at = (step * blocks + block) * line
        place = ring.weight.index(slot * blocks + block)
        if sizes.is_gated:
            copy_tile(weight_of, [0, column, at], full, place)
        else:
            copy_tile(weight_of, [column, at], full, place)


@gluon.jit
def _copy_rows(
    x_of, num_rows, step, full, ring, slot, config: gl.constexpr, is_blocked: gl.constexpr
):
    calls: gl.constexpr = config.depth // PAIR
    first_row, _ = _block_of(num_rows, config, is_blocked)
    for call in gl.static_range(calls):
        at = step * config.depth + call * PAIR
        copy_tile(x_of, [first_row, at], full, ring.rows.index(slot * calls + call))


@gluon.jit
def _block_of(num_rows, config: gl.constexpr, is_blocked: gl.constexpr):
    """Returns the first row and output of a program; rows vary first, as in `linear`."""
    first_row = 0
    block = gl.program_id(0)
    if is_blocked:
        row_blocks = (num_rows + config.rows - 1) // config.rows
        first_row = block % row_blocks * config.rows
        block = block // row_blocks
    return first_row, block * config.columns


@gluon.jit
def _multiply(
    ring,
    scales_at,
    args,
    num_rows,
    sizes: gl.constexpr,
    squares: gl.constexpr,
    config: gl.constexpr,
    is_blocked: gl.constexpr,
    is_launched: gl.constexpr,
):
    """Consumer: accumulates the blocks of the ring, applies the epilogue and stores.

    With separate segments, the program that arrives last does so for the sum of all.
    """
    format: gl.constexpr = config.loads.format
    steps: gl.constexpr = _steps_of(sizes, config)
    layout: gl.constexpr = words_layout(format.inputs // format.parts)
    first_row, column = _block_of(num_rows, config, is_blocked)
    is_output, later = True, ()
    if format.packed > 1:
        lane = gl.arange(0, WIDTH, layout=gl.SliceLayout(1, layout))
        output = column + lane % config.columns
        is_output = output < sizes.N
        output += lane // config.columns * sizes.N
        scales_at += output // format.scales.outputs * format.scales.scales_in
        if config.is_separate:
            scales_at += gl.program_id(1) * (steps * config.depth // format.group)
        later = first_scales(scales_at, is_output, steps, config)
    if is_launched:
        gdc_wait()
    inputs = ()
    if not config.is_separate:  # overlaps with the first copies
        inputs = _inputs_of(args, first_row, column, num_rows, sizes, squares, config)
    acc = accumulate_segments(ring, scales_at, later, is_output, steps, config)
    acc = gl.permute(acc, (1, 0))
    if config.is_separate:
        _store_part(acc, args, first_row, column, num_rows, sizes, squares, config)
    else:
        _store(_parts_of(acc), inputs, args, first_row, column, num_rows, sizes, squares)


@gluon.constexpr_function
def _steps_of(sizes, config):
    """Returns the steps of a program; the last one may be partial."""
    return -(-sizes.K // config.depth) // (config.segments if config.is_separate else 1)


@gluon.jit
def _inputs_of(
    args,
    first_row,
    column,
    num_rows,
    sizes: gl.constexpr,
    squares: gl.constexpr,
    config: gl.constexpr,
):
    """Computes the norm scales of each part of a tile, and loads the residual of the first ones."""
    rows: gl.constexpr = min(config.rows, FEW)
    norms, early = (), ()
    for part in gl.static_range(config.rows // rows):
        row = first_row + part * rows
        if part < _EARLY_PARTS:
            early += (load_added(args, row, column, num_rows, rows, config.columns, sizes, WARPS),)
        norm = num_rows
        if squares.count > 0:
            norm = norm_scale(args, row, num_rows, sizes, squares, rows, WARPS)
        norms += (norm,)
    return norms, early


@gluon.jit
def _parts_of(acc):
    """Returns the parts of a tile with `FEW` rows each; a smaller tile is a part."""
    rows: gl.constexpr = acc.shape[0]
    if rows <= FEW:
        parts = (acc,)
    else:
        halves = gl.reshape(acc, (2, rows // 2, acc.shape[1]))
        one, two = gl.split(gl.permute(halves, (1, 2, 0)))
        parts = _parts_of(one) + _parts_of(two)
    return parts


@gluon.jit
def _store(
    parts,
    inputs,
    args,
    first_row,
    column,
    num_rows,
    sizes: gl.constexpr,
    squares: gl.constexpr,
):
    """Applies the epilogue to each part of a tile, and stores it."""
    for part in gl.static_range(len(parts)):
        acc = gl.convert_layout(parts[part], _RESULT)
        row = first_row + part * acc.shape[0]
        norms, early = inputs
        added = early[part] if part < _EARLY_PARTS else None
        store_tile(acc, norms[part], added, args, row, column, num_rows, sizes, squares, WARPS)


@gluon.jit
def _store_part(
    acc,
    args,
    first_row,
    column,
    num_rows,
    sizes: gl.constexpr,
    squares: gl.constexpr,
    config: gl.constexpr,
):
    """Stores a segment of a block; the last to arrive adds all, applies the epilogue and stores.

    Same order and memory ordering as `arrives_last` and `sum_of_parts` of `linear_mainloop`.
    """
    rows: gl.constexpr = min(config.rows, FEW)
    segments: gl.constexpr = config.segments
    parts = _parts_of(acc)
    for part in gl.static_range(len(parts)):
        row = first_row + part * rows
        sums = gl.convert_layout(parts[part], _RESULT)
        at, is_inside = _sums_at(args, row, column, num_rows, rows, sizes)
        at += gl.program_id(1).to(gl.int64) * num_rows * sizes.N
        gl.store(at, sums, mask=is_inside)
    barrier()  # the stores of all threads, before one of them counts
    counter = args.arrivals + gl.program_id(0)
    if gl.atomic_add(counter, 1, sem="acq_rel") == segments - 1:
        barrier()  # the count, before the loads of all threads
        gl.store(counter, 0)
        inputs = _inputs_of(args, first_row, column, num_rows, sizes, squares, config)
        totals = ()
        for part in gl.static_range(len(parts)):
            row = first_row + part * rows
            at, is_inside = _sums_at(args, row, column, num_rows, rows, sizes)
            total = gl.zeros((rows, WIDTH), gl.float32, _RESULT)
            for _ in gl.static_range(segments):
                total += gl.load(at, mask=is_inside, other=0.0, volatile=True)
                at += num_rows.to(gl.int64) * sizes.N
            totals += (total,)
        _store(totals, inputs, args, first_row, column, num_rows, sizes, squares)


@gluon.jit
def _sums_at(args, first_row, column, num_rows, rows: gl.constexpr, sizes: gl.constexpr):
    """Returns pointers to the sums of the first segment of a part of a tile, and their mask."""
    row = first_row + gl.arange(0, rows, layout=gl.SliceLayout(1, _RESULT))
    output = column + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, _RESULT))
    is_inside = (row < num_rows)[:, None] & (output < sizes.N)[None, :]
    return args.parts + (row.to(gl.int64)[:, None] * sizes.N + output[None, :]), is_inside
