"""WGMMA main loops of `linear_sm90`, and of `linear_swap_ab` with the weight on the wide side
(Gluon).

They add the inputs as `linear_mainloop`. A packed weight is dequantised in registers as by
`block_loaders`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.triton_gpu.gemm.linear_packed_sm90_mainloop import (
    PAIR,
    WIDTH,
    WORDS,
    dequantised,
    scales_of,
    steps_ahead,
    words_layout,
)

WIDE, NARROW = gl.constexpr(128), gl.constexpr(64)
"""Weight columns of the two products of a tile of `linear_sm90`."""
FEW, MOST_ROWS = gl.constexpr(32), gl.constexpr(128)
"""Maximum rows of a small tile, and of a tile."""
WARPS = gl.constexpr(4)
"""Consumer warps, a warpgroup."""
_IN_FLIGHT = gl.constexpr(2)
"""Products that the tensor cores have yet to finish while the next part is dequantised. A step of a
packed weight has more products, since the next one dequantises to the same registers."""


class SwapABPipeline(NamedTuple):
    """Ring of blocks in shared memory, with the mbarriers of producer and consumers.

    Attributes:
      weight, rows: Blocks of the weight, and of the rows for each product.
      full, free: Barriers: the blocks of a slot are loaded, and are consumed.
    """

    weight: Any
    rows: Any
    full: Any
    free: Any


class GemmPipeline(NamedTuple):
    """Ring of blocks in shared memory, with the mbarriers of producer and consumers.

    Attributes:
      rows, wide, narrow: Blocks of the rows, and of the weight for each product; None if the tile
        is one product.
      full, free: Barriers: the blocks of a slot are loaded, and are consumed.
    """

    rows: Any
    wide: Any
    narrow: Any
    full: Any
    free: Any


@gluon.jit
def accumulate_pair(ring, done, sizes: gl.constexpr, config: gl.constexpr, warps: gl.constexpr):
    """Returns the sums of both products of a tile; see `accumulate_segmented`.

    Registers hold a chain and all sums.
    """
    rows: gl.constexpr = config.rows
    segments: gl.constexpr = config.segments
    if segments == 1:
        sums, more, done = _add_pair(ring, done, sizes, config, warps)
    else:
        sums = gl.zeros((rows, WIDE), gl.float32, sums_layout(WIDE, warps))
        more = gl.zeros((rows, NARROW), gl.float32, sums_layout(NARROW, warps))
        for _ in range(segments):
            wide, narrow, done = _add_pair(ring, done, sizes, config, warps)
            sums += wide
            more += narrow
    return sums, more, done


@gluon.jit
def _add_pair(ring, done, sizes: gl.constexpr, config: gl.constexpr, warps: gl.constexpr):
    """Adds the steps of a segment from zero; see `accumulate_pair`."""
    rows: gl.constexpr = config.rows
    depth: gl.constexpr = config.depth
    sums = gl.zeros((rows, WIDE), gl.float32, sums_layout(WIDE, warps))
    more = gl.zeros((rows, NARROW), gl.float32, sums_layout(NARROW, warps))
    for at in range(0, sizes.K // config.segments, depth):
        slot = done % config.stages
        mbarrier.wait(ring.full.index(slot), (done // config.stages) & 1)
        x = ring.rows.index(slot)
        wide = ring.wide.index(slot)
        narrow = ring.narrow.index(slot)
        if sizes.is_gated:
            wide = wide.reshape((WIDE, depth))
            narrow = narrow.reshape((NARROW, depth))
        sums = warpgroup_mma(x, wide.permute((1, 0)), sums, is_async=True)
        more = warpgroup_mma(x, narrow.permute((1, 0)), more, is_async=True)
        sums, more = warpgroup_mma_wait(num_outstanding=2, deps=(sums, more))
        # The two products of the previous step are complete.
        before = ring.free.index((done + config.stages - 1) % config.stages)
        mbarrier.arrive(before, count=1, pred=at > 0)
        done += 1
    sums, more = warpgroup_mma_wait(num_outstanding=0, deps=(sums, more))
    mbarrier.arrive(ring.free.index((done + config.stages - 1) % config.stages), count=1)
    return sums, more, done


@gluon.jit
def accumulate_segmented(
    ring, done, sizes: gl.constexpr, config: gl.constexpr, warps: gl.constexpr
):
    """Adds the segments of a tile of one product in order.

    During a chain, registers hold the sums of the left half of the columns, and shared memory those
    of the right half.

    Args:
      ring: Ring of blocks.
      done: Steps so far, of all tiles of the program.
      sizes, config, warps: Sizes of the GEMM, tile config, and consumer warps.

    Returns:
      Sums of the left and of the right half, and `done` after the tile.
    """
    rows: gl.constexpr = config.rows
    columns: gl.constexpr = config.columns
    stages: gl.constexpr = config.stages
    segments: gl.constexpr = config.segments
    lines: gl.constexpr = gl.NVMMASharedLayout(128, element_bitwidth=32, rank=2)
    stored = gl.allocate_shared_memory(gl.float32, [rows, columns // 2], lines)
    zeros = gl.zeros((rows, columns), gl.float32, sums_layout(columns, warps))
    left, right = _halves(zeros)
    for segment in range(segments):
        if segment > 0:
            stored.store(right)
        acc = zeros
        for step in range(sizes.K // config.depth // segments):
            slot = done % stages
            mbarrier.wait(ring.full.index(slot), (done // stages) & 1)
            x, weight = ring.rows.index(slot), ring.wide.index(slot)
            acc = warpgroup_mma(x, weight.permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            # The product of the previous step is complete.
            before = ring.free.index((done + stages - 1) % stages)
            mbarrier.arrive(before, count=1, pred=step > 0)
            done += 1
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(ring.free.index((done + stages - 1) % stages), count=1)
        more, right = _halves(acc)
        left += more
        if segment > 0:
            right = stored.load(right.type.layout) + right
    return left, right, done


@gluon.jit
def _halves(acc):
    rows: gl.constexpr = acc.shape[0]
    columns: gl.constexpr = acc.shape[1]
    return gl.split(gl.permute(gl.reshape(acc, (rows, 2, columns // 2)), (0, 2, 1)))


@gluon.jit
def accumulate_segments(
    ring, scales_at, later, is_output, steps: gl.constexpr, config: gl.constexpr
):
    """Returns the sum of the segments of a program, `[outputs, rows]`; see `_accumulate`."""
    rows: gl.constexpr = config.rows
    segments: gl.constexpr = 1 if config.is_separate else config.segments
    length: gl.constexpr = steps // segments
    sums: gl.constexpr = _sums_of(rows, config.is_sync)
    total = gl.zeros((WIDTH, rows), gl.float32, sums)
    slot, phase = 0, 0
    if segments == 1:
        total, later, slot, phase = _accumulate(
            ring, scales_at, later, is_output, total, slot, phase, 0, length, steps, config
        )
    else:
        for segment in range(segments):
            acc = gl.zeros((WIDTH, rows), gl.float32, sums)
            first = segment * length
            acc, later, slot, phase = _accumulate(
                ring, scales_at, later, is_output, acc, slot, phase, first, length, steps, config
            )
            total += acc
    return total


@gluon.jit
def _accumulate(
    ring,
    scales_at,
    later,
    is_output,
    acc,
    slot,
    phase,
    first,
    length: gl.constexpr,
    steps: gl.constexpr,
    config: gl.constexpr,
):
    """Adds the products of some steps to an accumulator.

    Args:
      ring: Ring of blocks.
      scales_at, later, is_output: Pointers to the scales, scales of the next steps, and mask;
        unused without scales.
      acc: Accumulator, `[outputs, rows]`.
      slot, phase: Slot and phase of the first step.
      first, length, steps: First step, their number, and the steps of the program.
      config: Tile config.

    Returns:
      The accumulator, and scales, slot and phase of the next step.
    """
    format: gl.constexpr = config.loads.format
    is_packed: gl.constexpr = format.packed > 1
    stages: gl.constexpr = config.stages
    calls: gl.constexpr = config.depth // PAIR
    in_block: gl.constexpr = format.inputs // PAIR
    blocks: gl.constexpr = calls // in_block
    ahead: gl.constexpr = steps_ahead(config)
    layout: gl.constexpr = words_layout(WORDS)
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    rows_operand: gl.constexpr = gl.DotOperandLayout(1, acc.type.layout, 2)
    is_sync: gl.constexpr = config.is_sync
    for number in range(length):
        step = first + number
        if is_packed:
            stored = later[0]
            scales = scales_of(scales_at, gl.minimum(step + ahead, steps - 1), is_output, config)
            later = later[1:] + (scales,)
        mbarrier.wait(ring.full.index(slot), phase)
        words = ()
        if is_packed:
            for block in gl.static_range(blocks):
                place = ring.weight.index(slot * blocks + block).reshape((WIDTH, WORDS))
                words += (place.load(layout),)
        for call in gl.static_range(calls):
            if is_packed:
                pair = dequantised(words[call // in_block], stored, call, format)
                pair = gl.convert_layout(pair, operand, assert_trivial=True)
            else:
                pair = ring.weight.index(slot * blocks + call).reshape((WIDTH, PAIR))
            x = ring.rows.index(slot * calls + call)
            if is_sync:
                acc = mma_v2(pair, x.permute((1, 0)).load(rows_operand), acc)
            else:
                acc = warpgroup_mma(pair, x.permute((1, 0)), acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=_IN_FLIGHT, deps=(acc,))
                if call == _IN_FLIGHT - 1:  # the products in flight are of this step
                    before = ring.free.index((slot + stages - 1) % stages)
                    mbarrier.arrive(before, count=1, pred=step > 0)
        if is_sync:
            mbarrier.arrive(ring.free.index(slot), count=1)
        slot += 1
        if slot == stages:
            slot = 0
            phase ^= 1
    if not is_sync:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    return acc, later, slot, phase


@gluon.constexpr_function
def _sums_of(rows, is_sync):
    """Returns the layout of the sums of `WIDTH` outputs."""
    if is_sync:
        return gl.NVMMADistributedLayout([2, 0], [WARPS, 1], [16, 8])
    return gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, rows, 16])


@gluon.constexpr_function
def sums_layout(columns, warps):
    """Returns the layout of WGMMA accumulators, with 16 rows or more per warp."""
    return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])
