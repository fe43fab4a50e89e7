"""Codes of four bits on a device, packed as in `shared.models.formats.four_bit`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Int32, UInt8, UInt32

from jax_impl.dummy_weights import word_array
from shared.models.formats.four_bit import PARTS, block_of, padded
from shared.models.parameter import Parameter


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


def dummy(
    parameter: Parameter,
    codes: Callable[[UInt32[jax.Array, "..."], UInt32[jax.Array, "..."]], UInt32[jax.Array, "..."]],
    device: jax.Device,
) -> Int32[jax.Array, "*stack N words"]:
    """Generates packed codes; a partial last block is filled and packed layer by layer.

    Args:
      parameter, codes, device: See `word_array`.
    """
    inputs = parameter.shape[-1]
    if padded(inputs) == inputs:
        return word_array(parameter, codes, PARTS, block_of(inputs), device)
    return _packed_layers(word_array(parameter, codes, PARTS, PARTS, device))


@jax.jit
def _packed_layers(words: Int32[jax.Array, "L *stack N words"]) -> Int32[jax.Array, "L *stack N K"]:
    spare = padded(PARTS * words.shape[-1]) // PARTS - words.shape[-1]

    def pack(layer: Int32[jax.Array, "*stack N words"]) -> Int32[jax.Array, "*stack N K"]:
        return packed(jnp.pad(layer, [(0, 0)] * (layer.ndim - 1) + [(0, spare)]))

    return lax.map(pack, words)
