"""INT4 weights on a device, packed as in `shared.models.formats.int4_w4a16`."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Float32, Int32, UInt32

from jax_impl.dummy_weights import top_bits
from jax_impl.formats import four_bit
from shared.models.formats.four_bit import filled
from shared.models.formats.int4_encoding import INT4_INIT, ZERO, Int4Encoding, dummy_scales
from shared.models.formats.int4_w4a16 import Int4W4A16, scale_words
from shared.models.formats.weight_format import SCALES, VALUES, FormatOps, Planes
from shared.models.parameter import Parameter


def dequantized(planes: Planes) -> Float[jax.Array, "*layers outputs inputs"]:
    """Returns (code - zero point) times scale, rounded to bfloat16."""
    codes, scales = four_bit.unpacked(planes[VALUES]).astype(jnp.float32), planes[SCALES]
    if scales.dtype != jnp.int32:
        return ((codes - ZERO) * _spread(scales.astype(jnp.float32), codes)).astype(jnp.bfloat16)
    numbers = codes - _spread((scales & 15).astype(jnp.float32), codes)
    return (numbers * _spread(_scales_of(scales), codes)).astype(jnp.bfloat16)


def _scales_of(words: Int32[jax.Array, "..."]) -> Float32[jax.Array, "..."]:
    upper, rest = words & -0x10000, (words & 0xFFF0) << 16
    as_float = partial(lax.bitcast_convert_type, new_dtype=jnp.float32)
    return as_float(upper) + as_float(rest)


def _spread(
    x: Float32[jax.Array, "*stack groups"], codes: Float32[jax.Array, "*stack K"]
) -> Float32[jax.Array, "*stack K"]:
    return jnp.repeat(x, codes.shape[-1] // x.shape[-1], axis=-1)


def dummy(parameter: Parameter, format: Int4W4A16, device: jax.Device) -> Planes:
    """Generates packed codes and their scales."""
    scales = dummy_scales(parameter, format.group)
    stored = scale_words(scales, None) if format.has_words else scales.astype(jnp.bfloat16)
    stored = filled(stored, format.planes(parameter.shape)[SCALES].shape[-1])
    return {
        VALUES: four_bit.dummy(parameter, codes, device),
        SCALES: jax.device_put(stored, device),
    }


def codes(
    key: UInt32[jax.Array, "..."], places: UInt32[jax.Array, "..."]
) -> UInt32[jax.Array, "..."]:
    """Returns the codes of the numbers that `elements` computes for `INT4_INIT`."""
    return top_bits(INT4_INIT, key, places)


def scaled(
    numbers: Float[jax.Array, "*stack N K"], parameter: Parameter, encoding: Int4Encoding
) -> Float[jax.Array, "*stack N K"]:
    """Multiplies dummy codes minus `ZERO` by their scales."""
    return _scaled(numbers, dummy_scales(parameter, encoding.group))


@partial(jax.jit, donate_argnums=0)
def _scaled(
    numbers: Float[jax.Array, "*stack N K"], scales: Float[jax.Array, "*stack N groups"]
) -> Float[jax.Array, "*stack N K"]:
    width = -(-numbers.shape[-1] // scales.shape[-1])
    across = jnp.repeat(scales, width, axis=-1)[..., : numbers.shape[-1]]
    return (numbers.astype(jnp.float32) * across).astype(numbers.dtype)


W4A16 = FormatOps(dequantized=dequantized, converted=four_bit.packed, dummy=dummy)
