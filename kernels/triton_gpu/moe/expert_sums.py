"""Sums of the slots of a row, and the epilogue of an MoE block (Triton)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton_gpu.gemm.sum_of_squares import add_up


class ExpertStream(NamedTuple):
    """Rows of the residual stream, the rows scaled for the next norm, and sums of squares."""

    rows: Any
    scaled: Any
    squares: Any


class ExpertEpilogue(NamedTuple):
    """Epilogue inputs: the residual, the weights of the slots, and the scale of the next norm."""

    rows: Any
    weights: Any
    norm: Any


class ExpertSums(NamedTuple):
    """Columns of a chunk of squares, and the bits of their fixed-point units."""

    length: int
    digits: int


@triton.jit
def sum_kernel(
    parts_at,
    ids_at,
    epilogue,
    stream,
    sizes: tl.constexpr,
    sums: tl.constexpr,
    columns: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per row and block of outputs."""
    blocks: tl.constexpr = (sizes.N + columns - 1) // columns
    row, block = tl.program_id(0) // blocks, tl.program_id(0) % blocks
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    if tl.load(ids_at + row * sizes.slots) >= 0:
        column = block * columns + tl.arange(0, columns)
        add_slots(parts_at, epilogue, stream, row, column, block, sizes, sums)


@triton.jit
def add_slots(
    parts_at, epilogue, stream, row, column, block, sizes: tl.constexpr, sums: tl.constexpr
):
    """Adds the slots of a row in their order, each a rounded product, and applies the epilogue."""
    N: tl.constexpr = sizes.N
    columns: tl.constexpr = column.shape[0]
    chunks: tl.constexpr = (N + sums.length - 1) // sums.length
    parts: tl.constexpr = columns // sums.length
    is_column = column < N
    slots: tl.constexpr = sizes.slots
    first, total = row * slots, tl.zeros((columns,), tl.float32)
    for slot in tl.static_range(slots):
        at = parts_at + (first + slot).to(tl.int64) * N + column
        # Volatile loads bypass the L1 cache: other programs have written the values.
        part = tl.load(at, mask=is_column, other=0.0, cache_modifier=".cg")
        total += part * tl.load(epilogue.weights + first + slot)
    place = row.to(tl.int64) * N + column
    before = tl.load(epilogue.rows + place, mask=is_column, other=0.0)
    out = (total * sizes.factor + before.to(tl.float32)).to(stream.rows.dtype.element_ty)
    tl.store(stream.rows + place, out, mask=is_column)
    out = out.to(tl.float32)
    if sizes.is_scaled:
        norm = tl.load(epilogue.norm + column, mask=is_column, other=0.0).to(tl.float32)
        scaled = (out * norm).to(stream.scaled.dtype.element_ty)
        tl.store(stream.scaled + place, scaled, mask=is_column)
    squares = tl.where(is_column, out * out, 0.0)
    squares = add_up(tl.reshape(squares, (parts, sums.length)), sums.digits)
    chunk = block * parts + tl.arange(0, parts)
    tl.store(stream.squares + row.to(tl.int64) * chunks + chunk, squares, mask=chunk < chunks)
