"""MXFP4 weights on a device, packed as in `shared.models.formats.mxfp4`."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32, UInt8, UInt32

from jax_impl.dummy_weights import top_bits
from jax_impl.formats import four_bit
from shared.models.formats.four_bit import filled
from shared.models.formats.mxfp4 import (
    EXPONENT_SHIFT,
    GROUP,
    MXFP4_INIT,
    MXFP4W4A16,
    NUMBERS,
    MXFP4Encoding,
    dummy_exponents,
)
from shared.models.formats.weight_format import SCALES, VALUES, FormatOps, Planes
from shared.models.parameter import Parameter


def dequantized(planes: Planes) -> Float[jax.Array, "*layers outputs columns"]:
    """Returns numbers times scales; columns that fill the last block are zeros."""
    numbers = jnp.asarray(NUMBERS)[four_bit.unpacked(planes[VALUES])]
    exponents = planes[SCALES].astype(jnp.int32) - EXPONENT_SHIFT
    return _times_powers(numbers, exponents).astype(jnp.bfloat16)


def _times_powers(
    numbers: Float32[jax.Array, "*stack K"], exponents: Int32[jax.Array, "*stack groups"]
) -> Float32[jax.Array, "*stack K"]:
    across = jnp.repeat(exponents, GROUP, axis=-1)[..., : numbers.shape[-1]]
    return jnp.ldexp(numbers, across - 127)


def dummy(parameter: Parameter, format: MXFP4W4A16, device: jax.Device) -> Planes:
    """Generates packed codes and their scales."""
    columns = format.planes(parameter.shape)[SCALES].shape[-1]
    exponents = filled(dummy_exponents(parameter) + EXPONENT_SHIFT, columns)
    return {
        VALUES: four_bit.dummy(parameter, codes, device),
        SCALES: jax.device_put(exponents, device),
    }


def codes(
    key: UInt32[jax.Array, "..."], places: UInt32[jax.Array, "..."]
) -> UInt32[jax.Array, "..."]:
    """Returns the codes of the numbers that `elements` computes for `MXFP4_INIT`."""
    return top_bits(MXFP4_INIT, key, places)


def scaled(
    numbers: Float[jax.Array, "*stack N K"], parameter: Parameter, encoding: MXFP4Encoding
) -> Float[jax.Array, "*stack N K"]:
    """Replaces dummy codes by their numbers times scales."""
    return _of_codes(numbers, dummy_exponents(parameter))


@partial(jax.jit, donate_argnums=0)
def _of_codes(
    numbers: Float[jax.Array, "*stack N K"], exponents: UInt8[jax.Array, "*stack N groups"]
) -> Float[jax.Array, "*stack N K"]:
    found = jnp.asarray(NUMBERS)[numbers.astype(jnp.int32)]
    return _times_powers(found, exponents.astype(jnp.int32)).astype(numbers.dtype)


W4A16 = FormatOps(dequantized=dequantized, converted=four_bit.packed, dummy=dummy)
