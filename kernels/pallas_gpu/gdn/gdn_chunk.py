"""Intra-chunk operations of gated delta net chunked prefill (Pallas, Triton backend).

A float32 operand is split into two bfloat16 parts for the tensor cores: 16 significant bits.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

CHUNK = 64
"""Rows, as of `shared.spec.gated_delta`."""

_BLOCK = 16  # of the system, solved by itself
_BLOCKS = CHUNK // _BLOCK
NOTHING = -100.0  # the log of a decay that counts as 0
_HIGH_BITS = -65536  # of a float32 that a bfloat16 has


def inverse_of(among):
    """The inverse of 1 + `among`, which has nothing on its diagonal or above.

    Blocks on the diagonal first, all at once, then pairs of blocks to blocks of twice the size. All
    that is in an inverse is at most 1 where keys have length 1, which powers of `among` are not.
    """
    inverse = _joined(_inverse_of_blocks(among), among, _BLOCK)
    return _joined(inverse, among, 2 * _BLOCK)


def _joined(inverse, among, size):
    """The inverses of blocks of twice the size from those of blocks of a size."""
    row, column = lax.iota(jnp.int32, CHUNK)[:, None], lax.iota(jnp.int32, CHUNK)[None, :]
    is_pair = lax.div(row, 2 * size) == lax.div(column, 2 * size)
    is_between = is_pair & (lax.div(row, size) != lax.div(column, size))
    between = _product(jnp.where(is_between, among, 0.0), inverse)
    return inverse - _product(inverse, between)


def _inverse_of_blocks(among):
    """Returns the inverse of the diagonal blocks by forward substitution."""
    row, column = (lax.iota(jnp.int32, _BLOCK)[at] for at in (_MIDDLE, _LAST))
    block = lax.iota(jnp.int32, _BLOCKS)
    is_own = block[:, None, None, None] == block[None, None, :, None]
    whole = among.reshape(_BLOCKS, _BLOCK, _BLOCKS, _BLOCK)
    # Sums of one number and zeros, here and below, which have one order.
    blocks = jnp.sum(jnp.where(is_own, whole, 0.0), axis=2)
    inverse = jnp.where(row == column, 1.0, 0.0) + jnp.zeros_like(blocks)
    for i in range(_BLOCK - 1):
        share = jnp.sum(jnp.where(column == i, blocks, 0.0), axis=2)
        known = jnp.sum(jnp.where(row == i, inverse, 0.0), axis=1)
        inverse -= share[:, :, None] * known[:, None, :]
    return jnp.where(is_own, inverse[:, :, None, :], 0.0).reshape(CHUNK, CHUNK)


_MIDDLE, _LAST = (None, slice(None), None), (None, None, slice(None))


def _product(x, y):
    """Returns the product of float32 operands at 16 significant bits."""
    return add_product(jnp.zeros_like(x), parts_of(x), parts_of(y))


def add_product(total, x, y):
    """Adds a product of parts; the matrix unit begins with the total, and with the least parts."""
    (x_high, x_low), (y_high, y_low) = x, y
    return total + dot(x_low, y_high) + dot(x_high, y_low) + dot(x_high, y_high)


def parts_of(x):
    """A number as the sum of two in bfloat16; the first is cut off, so no compiler drops it."""
    high = lax.bitcast_convert_type(x, jnp.int32) & jnp.int32(_HIGH_BITS)
    high = lax.bitcast_convert_type(high, jnp.float32)
    return high.astype(jnp.bfloat16), (x - high).astype(jnp.bfloat16)


def dot(x, y):
    """By the matrix unit, in float32."""
    return pltriton.dot(x, y, precision=lax.Precision.HIGHEST)


def share_of(log):
    """What is left after decays, 2 to a power of at most 0; what is too small for digits is 0."""
    return jnp.where(log > NOTHING, jnp.exp2(jnp.maximum(log, NOTHING)), 0.0)
