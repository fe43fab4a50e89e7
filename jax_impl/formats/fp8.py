"""FP8 weights on a device, packed as in `shared.models.formats.fp8_w8a16`, or in input order."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Float8e4m3fn, Float32, Int32, UInt8, UInt32

from jax_impl.dummy_weights import top_bits, word_array
from shared.models.formats.fp8 import BLOCK, Granularity
from shared.models.formats.fp8_encoding import (
    CODES,
    FP8_INIT,
    FP8Encoding,
    code_scales,
    scales_of_outputs,
)
from shared.models.formats.fp8_w8a8 import FP8W8A8
from shared.models.formats.fp8_w8a16 import (
    FP8_BLOCK,
    FP8W8A16,
    SCALE_FACTOR,
    packed_scales,
    shape_of_words,
    shares_of,
)
from shared.models.formats.weight_format import SCALES, VALUES, FormatOps, Planes
from shared.models.parameter import Parameter


def packed(codes: UInt8[jax.Array, "*stack N K"]) -> Int32[jax.Array, "*stack N words"]:
    """Same as `shared.models.formats.fp8_w8a16.packed`, for FP8 values without NaN."""
    blocks = codes.reshape(*codes.shape[:-1], -1, 4, FP8_BLOCK // 4).swapaxes(-1, -2)
    return lax.bitcast_convert_type(blocks, jnp.int32).reshape(shape_of_words(codes.shape))


@jax.jit
def unpacked(words: Int32[jax.Array, "*stack N words"]) -> Float8e4m3fn[jax.Array, "*stack N K"]:
    """Same as `shared.models.formats.fp8_w8a16.unpacked`."""
    codes = lax.bitcast_convert_type(words, jnp.float8_e4m3fn)  # [.., N, words, 4]
    blocks = codes.reshape(*words.shape[:-1], -1, FP8_BLOCK // 4, 4)
    return blocks.swapaxes(-1, -2).reshape(*words.shape[:-1], -1)


@jax.jit
def in_order(codes: UInt8[jax.Array, "*stack N K"]) -> Float8e4m3fn[jax.Array, "*stack N K"]:
    """Returns the FP8 values of their bits."""
    return lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)


def dequantized_words(planes: Planes) -> Float[jax.Array, "*layers outputs inputs"]:
    """Returns packed values times scales, rounded to bfloat16."""
    words, scales = planes[VALUES], planes[SCALES].astype(jnp.float32) * (1 / SCALE_FACTOR)
    layout = shares_of(words.shape, scales.shape)
    if layout.outputs > 1:
        scales = jnp.repeat(scales, FP8_BLOCK, axis=-2)
    if layout.scales_in > 1:
        scales = jnp.repeat(scales, FP8_BLOCK, axis=-1)
    codes = lax.bitcast_convert_type(words, jnp.float8_e4m3fn)  # [.., outputs, words, 4]
    *stack, count = words.shape
    blocks = codes.reshape(*stack, -1, FP8_BLOCK // 4, 4)
    numbers = blocks.swapaxes(-1, -2).reshape(*stack, 4 * count)
    return (numbers.astype(jnp.float32) * scales).astype(jnp.bfloat16)


def dequantized_values(planes: Planes) -> Float32[jax.Array, "*layers outputs inputs"]:
    """Returns values in input order times scales."""
    values, scales = planes[VALUES], planes[SCALES]
    rows = jnp.repeat(scales, values.shape[-2] // scales.shape[-2], axis=-2)
    across = jnp.repeat(rows, BLOCK, axis=-1)[..., : values.shape[-1]]
    return values.astype(jnp.float32) * across


def dummy_words(parameter: Parameter, format: FP8W8A16, device: jax.Device) -> Planes:
    """Generates packed values and their scales; fills the last block layer by layer."""
    scales_of = scales_of_outputs if format.by_output else code_scales
    scales = packed_scales(scales_of(parameter, format.granularity)).astype(format.scale_dtype)
    block = 4 if format.padding else FP8_BLOCK
    words = word_array(parameter, codes, 4, block, device)
    values = _packed_layers(words, format.padding) if format.padding else words
    return {VALUES: values, SCALES: jax.device_put(scales, device)}


@partial(jax.jit, static_argnums=1)
def _packed_layers(
    words: Int32[jax.Array, "L *stack N words"], padding: int
) -> Int32[jax.Array, "L *stack N blocks"]:
    def pack(layer: Int32[jax.Array, "*stack N words"]) -> Int32[jax.Array, "*stack N blocks"]:
        values = lax.bitcast_convert_type(layer, jnp.uint8).reshape(*layer.shape[:-1], -1)
        return packed(jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, padding)]))

    return lax.map(pack, words)


def dummy_values(parameter: Parameter, format: FP8W8A8, device: jax.Device) -> Planes:
    """Generates values in input order and their scales."""
    scales = (scales_of_outputs if format.by_output else code_scales)(parameter, Granularity.BLOCK)
    values = unpacked(word_array(parameter, codes, 4, FP8_BLOCK, device))
    return {VALUES: values, SCALES: jax.device_put(scales, device)}


def codes(
    key: UInt32[jax.Array, "..."], places: UInt32[jax.Array, "..."]
) -> UInt32[jax.Array, "..."]:
    """Returns the FP8 values of the numbers that `elements` computes for `FP8_INIT`."""
    tops, half = top_bits(FP8_INIT, key, places), np.uint32(2 ** (FP8_INIT.bits - 1))
    is_negative = tops < half
    place = jnp.where(is_negative, half - 1 - tops, tops - half)  # among 1, 3, 5 and so on
    fours = jnp.where(place < 4, np.uint32(CODES[0]), np.uint32(CODES[1]))
    return ((fours >> (8 * (place & 3))) & 0xFF) | (is_negative.astype(jnp.uint32) << 7)


def scaled(
    numbers: Float[jax.Array, "*stack N K"], parameter: Parameter, encoding: FP8Encoding
) -> Float[jax.Array, "*stack N K"]:
    """Multiplies dummy FP8 values by their scales."""
    return _scaled(numbers, scales_of_outputs(parameter, encoding.granularity))


@partial(jax.jit, donate_argnums=0)
def _scaled(
    numbers: Float[jax.Array, "*stack N K"], scales: Float[jax.Array, "*stack N scales_in"]
) -> Float[jax.Array, "*stack N K"]:
    across = scales
    if scales.shape[-1] > 1:
        across = jnp.repeat(scales, FP8_BLOCK, axis=-1)[..., : numbers.shape[-1]]
    return (numbers.astype(jnp.float32) * across).astype(numbers.dtype)


W8A16 = FormatOps(dequantized=dequantized_words, converted=packed, dummy=dummy_words)
W8A8 = FormatOps(dequantized=dequantized_values, converted=in_order, dummy=dummy_values)
