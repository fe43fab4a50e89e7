"""Sums of squares that no order changes, in Triton; see `shared.spec.reduction_order.SquaresOrder`.

Terms are added in three steps, so that a caller can add parts that it holds apart: the exponent of
the largest term, whole numbers of units, and their sum as a float again.
"""

import triton
import triton.language as tl


@triton.jit
def exponent_of(largest, digits: tl.constexpr):
    """Of terms whose largest is given, none of them negative."""
    return tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, digits + 1), 254)


@triton.jit
def units_of(terms, exponent, digits: tl.constexpr):
    """Terms as whole numbers of units."""
    scale = ((digits + 254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.floor(terms * scale + 0.5).to(tl.int32)


@triton.jit
def in_floats(units, exponent, digits: tl.constexpr):
    """A sum of units as the float that it stands for."""
    return units.to(tl.float32) * ((exponent - digits) << 23).to(tl.float32, bitcast=True)


@triton.jit
def add_up(terms, digits: tl.constexpr):
    """Adds the terms of each row, [rows, terms], none of them negative."""
    exponent = exponent_of(tl.max(terms, 1), digits)
    return in_floats(tl.sum(units_of(terms, exponent[:, None], digits), 1), exponent, digits)


@triton.jit
def squares_of(squares_at, row, is_row, squares: tl.constexpr):
    """The squares of some rows, [rows, spread]."""
    chunks: tl.constexpr = squares.count
    place = tl.arange(0, squares.spread)
    mask = is_row[:, None] & (place < chunks)[None, :]
    at = squares_at + row.to(tl.int64)[:, None] * chunks + place[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def chunks_of(out, is_column, squares: tl.constexpr):
    """The squares of a block of a result, [rows, chunks of the block]."""
    length: tl.constexpr = squares.length
    parts: tl.constexpr = out.shape[1] // length
    terms = out.to(tl.float32)
    terms = tl.where(is_column[None, :], terms * terms, 0.0)
    terms = tl.reshape(terms, (terms.shape[0] * parts, length))
    return tl.reshape(add_up(terms, squares.digits), (out.shape[0], parts))
