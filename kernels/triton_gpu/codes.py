"""Blocks of codes of FP8: how rows become some, and how their products are added, in Triton."""

import triton
import triton.language as tl

from kernels.tiles import LinearTiles
from shared.models.fp8 import BLOCK, OF_LARGEST

_BLOCK = tl.constexpr(BLOCK)
_OF_LARGEST = tl.constexpr(OF_LARGEST)


_WIDE = 64
"""Of the sides of a tile one is as wide, or a compiler takes no unit that multiplies codes."""


def rows_of(tiles: LinearTiles, rows: int) -> int:
    """The rows of a tile of codes; all of them where they are the wide side of the matrix unit.

    Args:
      rows: As many as there are to multiply, and at most those of the tiles.

    Raises:
      ValueError: The wide side is not wide enough, so that the bits would be others.
    """
    wide = tiles.columns if tiles.swapped else tiles.rows
    if wide < _WIDE or tiles.columns > BLOCK or tiles.depth != BLOCK:
        raise ValueError(
            f"tiles of codes must be {BLOCK} deep, {_WIDE} wide or more, and have {BLOCK} columns "
            f"at most, got {tiles}"
        )
    return rows if tiles.swapped else tiles.rows


@triton.jit
def quantise(x, is_launched: tl.constexpr):
    """The codes of a block of inputs of some rows, [rows, 128] in float32, and its scales."""
    scale = tl.max(tl.abs(x), 1) * _OF_LARGEST
    scale = tl.where(scale == 0.0, 1.0, scale)
    x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    codes = x.to(tl.float8e4nv)
    if not is_launched:
        codes = _encoded(x).to(tl.float8e4nv, bitcast=True)
    return codes, scale


@triton.jit
def _encoded(x):
    """The nearest codes, for the interpreter, which rounds no number up to a power of two."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    small = ((size * 512.0 + 8388608.0) - 8388608.0).to(tl.int32)  # multiples of 2^-9
    code = tl.where(size < 0.015625, small, normal)
    code = tl.where(x == x, code, 0x7F)
    return (code | tl.where(x < 0.0, 0x80, 0)).to(tl.uint8)


@triton.jit
def scale_of(scales_at, output, at, K: tl.constexpr):
    """The scale of a weight's block, in which some outputs and inputs lie."""
    return tl.load(scales_at + output // _BLOCK * (K // _BLOCK) + at // _BLOCK)


@triton.jit
def add_codes(
    acc, x, weight, scale, is_swapped: tl.constexpr, is_interpreted: tl.constexpr
):  # fmt: skip
    """Adds the products of a block's codes, times its scale of each row, rounded once.

    The matrix unit adds them from zero, and in fewer bits than float32: from 64 on its wide side
    they are the same bits in both languages and for any tile.
    """
    if is_interpreted:  # and it would multiply the codes as whole numbers
        x, weight = x.to(tl.float32), weight.to(tl.float32)
    if is_swapped:
        part, scale = tl.dot(weight, tl.trans(x)), scale[None, :]
    else:
        part, scale = tl.dot(x, tl.trans(weight)), scale[:, None]
    return tl.fma(part, tl.broadcast_to(scale, part.shape), acc)
