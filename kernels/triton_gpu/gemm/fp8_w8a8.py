"""W8A8: quantisation of rows to FP8, and GEMM steps on FP8 blocks (Triton)."""

import triton
import triton.language as tl

from shared.models.formats.fp8 import BLOCK, OF_LARGEST

_BLOCK = tl.constexpr(BLOCK)
_OF_LARGEST = tl.constexpr(OF_LARGEST)


@triton.constexpr_function
def width_of(rows, columns, is_quantised, is_gated):
    """Returns the outputs per GEMM step: half of a 128 x 128 FP8 block.

    The accumulators of a block then need half of the registers, so two programs fit a
    multiprocessor: one multiplies while the other adds. With 64 rows two programs fit anyway.
    """
    is_large = rows == _BLOCK and columns == _BLOCK
    return columns // 2 if is_quantised and not is_gated and is_large else columns


@triton.jit
def quantise(x, is_launched: tl.constexpr):
    """Quantises a block of inputs, [rows, 128] in float32; returns FP8 values and scales."""
    scale = tl.max(tl.abs(x), 1) * _OF_LARGEST
    scale = tl.where(scale == 0.0, 1.0, scale)
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    codes = x.to(tl.float8e4nv)
    if not is_launched:
        codes = _encoded(x).to(tl.float8e4nv, bitcast=True)
    return codes, scale


@triton.jit
def _encoded(x):
    """Rounds to the nearest FP8 values; the interpreter never rounds up to a power of two."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = ((size * 512.0 + 8388608.0) - 8388608.0).to(tl.int32)  # multiples of 2^-9
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | tl.where(x < 0.0, 0x80, 0)).to(tl.uint8)


@triton.jit
def scale_of(scales_at, output, at, K: tl.constexpr):
    """Loads the scale of the weight block that contains some outputs and inputs."""
    return tl.load(scales_at + output // _BLOCK * (K // _BLOCK) + at // _BLOCK)


@triton.jit
def add_codes(acc, x, weight, scale, is_swapped: tl.constexpr, is_interpreted: tl.constexpr):
    """Adds the products of an FP8 block, times its scale per row, with one rounding.

    The tensor core accumulates from zero, in fewer bits than float32. With 64 or more on its wide
    side, the bits are equal in both languages and for every tile.
    """
    if is_interpreted:  # it would multiply FP8 as integers
        x, weight = x.to(tl.float32), weight.to(tl.float32)
    if is_swapped:
        part, scale = tl.dot(weight, tl.trans(x)), scale[None, :]
    else:
        part, scale = tl.dot(x, tl.trans(weight)), scale[:, None]
    return tl.fma(part, tl.broadcast_to(scale, part.shape), acc)
