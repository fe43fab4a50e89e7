"""Kernel of the shrink of LoRA adapters (Triton); see `lora`."""

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.shrink_tiles import ShrinkTiles
from shared.spec.reduction_order import ShrinkOrder

_PREFETCH_PTX = tl.constexpr("""{ .reg .pred is_any; setp.gt.s32 is_any, $2, 0; mov.b32 $0, $2;
@is_any cp.async.bulk.prefetch.L2.global [$1], $2; }""")
"""Copies bytes from an address to the L2 cache, or none."""
_PIECE = tl.constexpr(2048)
"""Bytes that a thread copies to the L2 cache."""


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
    adapters,
    num_rows,
    sizes: tl.constexpr,
    expanded: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per slot, block of rows, block of rows of A, and split of the inputs.

    Programs of the first rows also copy the operands of the expand, of sizes `expanded`, to the L2
    cache. Otherwise the end of each GEMM program would wait for memory.
    """
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
    row = tl.program_id(1) * rows + tl.arange(0, rows)
    slot, split = tl.program_id(2), tl.program_id(0) // sizes.blocks
    rank = tl.program_id(0) % sizes.blocks * width + tl.arange(0, width)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    is_own = tl.load(adapters.slots + row, mask=row < num_rows, other=0) == slot + 1
    if tl.max(is_own.to(tl.int32), 0) > 0:
        if is_launched and tl.program_id(1) == 0:
            _prefetch_expand(adapters, slot.to(tl.int64), expanded)
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
        tl.store(adapters.sums + place, total, mask=is_own[:, None])


@triton.jit
def _prefetch_expand(adapters, slot, sizes: tl.constexpr):
    """Copies B, the factors and the scales of an adapter to the L2 cache."""
    outputs: tl.constexpr = sizes.ends[len(sizes.ends) - 1]
    _prefetch(adapters.b + slot * sizes.b, outputs * sizes.rank)
    _prefetch(adapters.factors + slot * sizes.factors, outputs)
    _prefetch(adapters.scales + slot * sizes.scales, sizes.ranks)


@triton.jit
def _prefetch(at, count: tl.constexpr):
    """Copies elements to the L2 cache, as one of the programs of a slot.

    Addresses and sizes are rounded down to 16 bytes, as the instruction requires.
    """
    size: tl.constexpr = count * at.dtype.element_ty.primitive_bitwidth // 8 // 16 * 16
    pieces: tl.constexpr = (size + _PIECE - 1) // _PIECE
    step = tl.num_programs(0)
    for first in tl.range(tl.program_id(0), pieces, 128 * step):
        place = (first + tl.arange(0, 128) * step) * _PIECE
        tl.inline_asm_elementwise(
            _PREFETCH_PTX,
            "=r,l,r",
            [(at.to(tl.int64) + place) & -16, tl.minimum(size - place, _PIECE)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
