"""Codes of four bits on a device, packed as in `shared.models.formats.four_bit`."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int32, UInt8

from shared.models.formats.four_bit import PARTS, block_of


def packed(words: Int32[jax.Array, "*stack N words"]) -> Int32[jax.Array, "*stack N words"]:
    """Reorders codes from eight neighbours in an int32 to blocks of inputs."""
    width = block_of(PARTS * words.shape[-1]) // PARTS
    pairs = lax.bitcast_convert_type(words, jnp.uint8)
    codes = jnp.stack([pairs & 15, pairs >> 4], axis=-1)
    blocks = codes.reshape((*words.shape[:-1], -1, PARTS, width))
    joined = blocks[..., ::2, :] | blocks[..., 1::2, :] << 4
    return lax.bitcast_convert_type(joined.swapaxes(-1, -2), jnp.int32).reshape(words.shape)


def unpacked(words: Int32[jax.Array, "*stack N words"]) -> UInt8[jax.Array, "*stack N K"]:
    """Same as `shared.models.formats.four_bit.unpack`."""
    *stack, count = words.shape
    width = block_of(PARTS * count) // PARTS
    pairs = lax.bitcast_convert_type(words, jnp.uint8).reshape((*stack, -1, width, PARTS // 2))
    pairs = pairs.swapaxes(-1, -2)
    return jnp.stack([pairs & 15, pairs >> 4], axis=-2).reshape((*stack, PARTS * count))
