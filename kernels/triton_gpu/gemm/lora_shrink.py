"""Shrink of LoRA adapters: a kernel, and the first programs of a GEMM of few rows (Triton).

See `lora`. Both compute the same sums in the same order.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.shrink_tiles import ShrinkTiles
from shared.spec.reduction_order import ShrinkOrder


class ShrinkSizes(NamedTuple):
    """Sizes of the shrink, compile-time constants.

    Attributes:
      K, ranks, stride: Inputs, rows of A, and elements from a slot to the next.
      chunk, chunks, splits, blocks: Inputs of a chunk, see `ShrinkOrder`, chunks of a program,
        splits of the inputs, and blocks of rows of A.
      rows, width, depth, stages: See `ShrinkTiles`; `width` are the rows of A of a program.
    """

    K: int
    ranks: int
    stride: int
    chunk: int
    chunks: int
    splits: int
    blocks: int
    rows: int
    width: int
    depth: int
    stages: int

    @classmethod
    def of(cls, a: Tensor, tiles: ShrinkTiles, order: ShrinkOrder) -> "ShrinkSizes":
        """Returns the sizes of a call."""
        return cls(
            K=a.shape[2],
            ranks=a.shape[1],
            stride=a.stride(0),
            chunk=order.chunk,
            chunks=tiles.chunks,
            splits=tiles.splits,
            blocks=triton.cdiv(a.shape[1], tiles.ranks),
            rows=tiles.rows,
            width=tiles.ranks,
            depth=tiles.depth,
            stages=tiles.stages,
        )


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    x_at,
    a_at,
    slots_at,
    sums_at,
    num_rows,
    sizes: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per slot, block of rows, block of rows of A, and split of the inputs."""
    row = tl.program_id(1) * sizes.rows + tl.arange(0, sizes.rows)
    slot, split = tl.program_id(2), tl.program_id(0) // sizes.blocks
    block = tl.program_id(0) % sizes.blocks
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    slots = tl.load(slots_at + row, mask=row < num_rows, other=0)
    _add_inputs_of_rows(x_at, a_at, sums_at, row, slots, slot, block, split, sizes)


@triton.jit
def shrink_ahead(number, num_rows, adapters, sizes: tl.constexpr):
    """Computes the shrink as one of the first programs of a GEMM, of the given number.

    Programs start in the order of their numbers, so those that wait do not keep one of these from
    starting. The first adds the blocks of the GEMM to the counter once for each program, and every
    other one takes them off. So the blocks remain when all have stored their sums.
    """
    shrink: tl.constexpr = sizes.shrink
    blocks: tl.constexpr = shrink.blocks
    splits: tl.constexpr = shrink.splits
    step: tl.constexpr = sizes.ahead
    waiting = tl.num_programs(0) - step
    row = tl.arange(0, shrink.rows)
    slots = tl.load(adapters.slots + row, mask=row < num_rows, other=0)
    begin = tl.min(tl.where(slots > 0, slots, sizes.slots + 1), 0) - 1
    units = tl.maximum(tl.max(slots, 0) - begin, 0) * (blocks * splits)
    for unit in tl.range(number, units, step):
        slot = begin + unit // (blocks * splits)
        split, block = unit // blocks % splits, unit % blocks
        x_at, a_at, sums_at = adapters.x, adapters.a, adapters.sums
        _add_inputs_of_rows(x_at, a_at, sums_at, row, slots, slot, block, split, shrink)
    tl.debug_barrier()
    tl.atomic_add(adapters.arrivals, tl.where(number == 0, waiting * step, -waiting))


@triton.jit
def wait_for_sums(adapters, sizes: tl.constexpr):
    """Waits until all programs of `shrink_ahead` have stored their sums.

    The program of each block takes 1 off the counter, so that it is zero again after the GEMM. The
    counter is negative until the first program of the shrink has added to it. It is at least the
    number of blocks until all have.
    """
    waiting = tl.num_programs(0) - sizes.ahead
    left = tl.atomic_add(adapters.arrivals, -1) - 1
    while (left < 0) | (left >= waiting):
        left = tl.atomic_add(adapters.arrivals, 0)


@triton.jit
def leave_sums(adapters):
    """Counts a program that does not read the sums; see `wait_for_sums`."""
    tl.atomic_add(adapters.arrivals, -1)


@triton.jit
def _add_inputs_of_rows(x_at, a_at, sums_at, row, slots, slot, block, split, sizes: tl.constexpr):
    """Stores the sums of the rows of one adapter, for a block of rows of A and a split."""
    K: tl.constexpr = sizes.K
    ranks: tl.constexpr = sizes.ranks
    stride: tl.constexpr = sizes.stride
    chunk: tl.constexpr = sizes.chunk
    chunks: tl.constexpr = sizes.chunks
    splits: tl.constexpr = sizes.splits
    rows: tl.constexpr = sizes.rows
    width: tl.constexpr = sizes.width
    depth: tl.constexpr = sizes.depth
    stages: tl.constexpr = sizes.stages
    rank, is_own = block * width + tl.arange(0, width), slots == slot + 1
    if tl.max(is_own.to(tl.int32), 0) > 0:
        lane = tl.arange(0, depth)
        of_rows = x_at + row.to(tl.int64)[:, None] * K + lane[None, :]
        of_ranks = a_at + slot.to(tl.int64) * stride + rank[:, None] * K + lane[None, :]
        total = tl.zeros((rows, width), tl.float32)
        for number in tl.range(0, chunks):
            first = (split * chunks + number) * chunk
            acc = tl.zeros((rows, width), tl.float32)
            for at in tl.range(first, first + chunk, depth, num_stages=stages):
                if K % chunk == 0:
                    x = tl.load(of_rows + at, mask=is_own[:, None], other=0.0)
                    a = tl.load(of_ranks + at)
                else:
                    is_input = (lane < K - at)[None, :]
                    x = tl.load(of_rows + at, mask=is_own[:, None] & is_input, other=0.0)
                    a = tl.load(of_ranks + at, mask=is_input & (rank < ranks)[:, None], other=0.0)
                acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
            total += acc
        place = (row.to(tl.int64) * splits + split)[:, None] * ranks + rank[None, :]
        tl.store(sums_at + place, total, mask=is_own[:, None])
