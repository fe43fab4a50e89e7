"""Intra-chunk operations of gated delta net chunked prefill (Pallas, Triton backend).

A float32 operand is split into two bfloat16 parts for the tensor cores: 16 significant bits.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

CHUNK = 64
"""Rows of a chunk, equal to `shared.spec.gated_delta.CHUNK`."""

_BLOCK = 16  # rows of a diagonal block, which is inverted directly
_BLOCKS = CHUNK // _BLOCK
NOTHING = -100.0  # base-2 log of the smallest decay; smaller ones count as 0
_HIGH_BITS = -65536  # bits of a float32 that a bfloat16 keeps


def inverse_of(lower):
    """Returns the inverse of I + `lower`, where `lower` is strictly lower triangular.

    The diagonal blocks are inverted first, all at once; pairs of blocks are then merged into blocks
    of twice the size. With keys of unit length the entries of an inverse are at most 1, which does
    not hold for powers of `lower`.
    """
    inverse = _merge_blocks(_inverse_of_blocks(lower), lower, _BLOCK)
    return _merge_blocks(inverse, lower, 2 * _BLOCK)


def _merge_blocks(inverse, lower, size):
    """Merges inverses of blocks of `size` rows into inverses of blocks of twice the size."""
    row, column = lax.iota(jnp.int32, CHUNK)[:, None], lax.iota(jnp.int32, CHUNK)[None, :]
    is_pair = lax.div(row, 2 * size) == lax.div(column, 2 * size)
    is_between = is_pair & (lax.div(row, size) != lax.div(column, size))
    between = _product(jnp.where(is_between, lower, 0.0), inverse)
    return inverse - _product(inverse, between)


def _inverse_of_blocks(lower):
    """Returns the inverse of the diagonal blocks by forward substitution."""
    row, column = (lax.iota(jnp.int32, _BLOCK)[at] for at in (_MIDDLE, _LAST))
    block = lax.iota(jnp.int32, _BLOCKS)
    is_own = block[:, None, None, None] == block[None, None, :, None]
    whole = lower.reshape(_BLOCKS, _BLOCK, _BLOCKS, _BLOCK)
    # Sums of one number and zeros, here and below, which are exact in any order.
    blocks = jnp.sum(jnp.where(is_own, whole, 0.0), axis=2)
    inverse = jnp.where(row == column, 1.0, 0.0) + jnp.zeros_like(blocks)
    for i in range(_BLOCK - 1):
        factor = jnp.sum(jnp.where(column == i, blocks, 0.0), axis=2)
        known = jnp.sum(jnp.where(row == i, inverse, 0.0), axis=1)
        inverse -= factor[:, :, None] * known[:, None, :]
    return jnp.where(is_own, inverse[:, :, None, :], 0.0).reshape(CHUNK, CHUNK)


_MIDDLE, _LAST = (None, slice(None), None), (None, None, slice(None))


def _product(x, y):
    """Returns the product of float32 operands at 16 significant bits."""
    return add_product(jnp.zeros_like(x), parts_of(x), parts_of(y))


def add_product(total, x, y):
    """Adds a product of split operands to `total`, the smallest parts first."""
    (x_high, x_low), (y_high, y_low) = x, y
    return total + dot(x_low, y_high) + dot(x_high, y_low) + dot(x_high, y_high)


def parts_of(x):
    """Splits a number into two bfloat16 values; no compiler drops the bitwise truncation."""
    high = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(_HIGH_BITS)
    high = lax.bitcast_convert_type(high, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def dot(x, y):
    """Multiplies on the tensor cores, accumulating in float32."""
    return pltriton.dot(x, y, precision=lax.Precision.HIGHEST)


def share_of(log):
    """Returns the decay factor 2^log, for a log of at most 0; negligible factors are 0."""
    return jnp.where(log > NOTHING, jnp.exp2(jnp.maximum(log, NOTHING)), 0.0)
