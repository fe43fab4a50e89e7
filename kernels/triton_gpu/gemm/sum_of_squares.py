"""Order-independent sums of squares in fixed point (Triton).

Implements `shared.spec.reduction_order.SquaresOrder`. A sum has three steps, so that callers can
combine partial sums: the exponent of the largest term, the terms as integers, and the integer sum
as a float.
"""

import triton
import triton.language as tl


@triton.jit
def exponent_of(largest, digits: tl.constexpr):
    """Returns the exponent for non-negative terms, from the largest of them."""
    return tl.minimum(tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, digits + 1), 254)


@triton.jit
def units_of(terms, exponent, digits: tl.constexpr):
    """Converts terms to integers in fixed-point units."""
    scale = ((digits + 254 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.floor(terms * scale + 0.5).to(tl.int32)


@triton.jit
def in_floats(units, exponent, digits: tl.constexpr):
    """Converts a fixed-point sum to a float."""
    return units.to(tl.float32) * ((exponent - digits) << 23).to(tl.float32, bitcast=True)


@triton.jit
def add_up(terms, digits: tl.constexpr):
    """Adds the terms of each row, [rows, terms], none of them negative."""
    exponent = exponent_of(tl.max(terms, 1), digits)
    return in_floats(tl.sum(units_of(terms, exponent[:, None], digits), 1), exponent, digits)


@triton.jit
def squares_of(squares_at, row, is_row, squares: tl.constexpr):
    """Loads the sums of squares of some rows, [rows, spread]."""
    chunks: tl.constexpr = squares.count
    place = tl.arange(0, squares.spread)
    mask = is_row[:, None] & (place < chunks)[None, :]
    at = squares_at + row.to(tl.int64)[:, None] * chunks + place[None, :]
    return tl.load(at, mask=mask, other=0.0)


@triton.jit
def chunks_of(out, is_column, squares: tl.constexpr):
    """Computes the sums of squares of a block of a result, [rows, chunks of the block]."""
    length: tl.constexpr = squares.length
    parts: tl.constexpr = out.shape[1] // length
    terms = out.to(tl.float32)
    terms = tl.where(is_column[None, :], terms * terms, 0.0)
    terms = tl.reshape(terms, (terms.shape[0] * parts, length))
    return tl.reshape(add_up(terms, squares.digits), (out.shape[0], parts))
