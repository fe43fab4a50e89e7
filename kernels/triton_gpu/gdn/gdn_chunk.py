"""Intra-chunk operations of gated delta net chunked prefill (Triton).

A float32 operand is split into two bfloat16 parts for the tensor cores: 16 significant bits.
"""

import triton
import triton.language as tl

CHUNK = 64
"""Rows of a chunk, equal to `shared.spec.gated_delta.CHUNK`."""

SIZE = tl.constexpr(CHUNK)
_BLOCK = tl.constexpr(16)  # rows of a diagonal block, which is inverted directly
_BLOCKS = tl.constexpr(CHUNK // 16)
NOTHING = tl.constexpr(-100.0)  # base-2 log of the smallest decay; smaller ones count as 0
_HIGH_BITS = tl.constexpr(-65536)  # bits of a float32 that a bfloat16 keeps


@triton.jit
def inverse_of(lower):
    """Returns the inverse of I + `lower`, where `lower` is strictly lower triangular.

    The diagonal blocks are inverted first, all at once; pairs of blocks are then merged into blocks
    of twice the size. With keys of unit length the entries of an inverse are at most 1, which does
    not hold for powers of `lower`.
    """
    inverse = _merge_blocks(_inverse_of_blocks(lower), lower, _BLOCK)
    return _merge_blocks(inverse, lower, 2 * _BLOCK)


@triton.jit
def _merge_blocks(inverse, lower, size: tl.constexpr):
    """Merges inverses of blocks of `size` rows into inverses of blocks of twice the size."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    is_between = (row // (2 * size) == column // (2 * size)) & (row // size != column // size)
    between = _product(tl.where(is_between, lower, 0.0), inverse)
    return inverse - _product(inverse, between)


@triton.jit
def _inverse_of_blocks(lower):
    """Returns the inverse of the diagonal blocks by forward substitution."""
    row = tl.arange(0, _BLOCK)[None, :, None]
    column = tl.arange(0, _BLOCK)[None, None, :]
    block, other = (
        tl.arange(0, _BLOCKS)[:, None, None, None],
        tl.arange(0, _BLOCKS)[None, None, :, None],
    )
    is_own = block == other
    whole = tl.reshape(lower, (_BLOCKS, _BLOCK, _BLOCKS, _BLOCK))
    # Sums of one number and zeros, here and below, which are exact in any order.
    blocks = tl.sum(tl.where(is_own, whole, 0.0), 2)
    inverse = tl.where(row == column, 1.0, 0.0) + tl.zeros_like(blocks)
    for i in tl.static_range(_BLOCK - 1):
        factor = tl.sum(tl.where(column == i, blocks, 0.0), 2)
        known = tl.sum(tl.where(row == i, inverse, 0.0), 1)
        inverse -= factor[:, :, None] * known[:, None, :]
    whole = tl.where(is_own, inverse[:, :, None, :], 0.0)
    return tl.reshape(whole, (SIZE, SIZE))


@triton.jit
def _product(x, y):
    """Returns the product of float32 operands at 16 significant bits."""
    x_high, x_low = parts_of(x)
    y_high, y_low = parts_of(y)
    return add_product(tl.zeros_like(x), x_high, x_low, y_high, y_low)


@triton.jit
def add_product(total, x_high, x_low, y_high, y_low):
    """Adds a product of split operands to `total`, the smallest parts first."""
    return total + tl.dot(x_low, y_high) + tl.dot(x_high, y_low) + tl.dot(x_high, y_high)


@triton.jit
def parts_of(x):
    """Splits a number into two bfloat16 values; no compiler drops the bitwise truncation."""
    high = (x.to(tl.int32, bitcast=True) & _HIGH_BITS).to(tl.float32, bitcast=True)
    return high.to(tl.bfloat16), (x - high).to(tl.bfloat16)


@triton.jit
def share_of(log):
    """Returns the decay factor 2^log, for a log of at most 0; negligible factors are 0."""
    return tl.where(log > NOTHING, tl.exp2(tl.maximum(log, NOTHING)), 0.0)
