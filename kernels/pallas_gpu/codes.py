"""Blocks of codes of FP8: how rows become some, and how their products are added, for Pallas."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as pltriton

from shared.models.fp8 import OF_LARGEST


def quantise(x, is_compiled):
    """The codes of a block of inputs of some rows, [rows, 128] in float32, and its scales."""
    scale = jnp.max(jnp.abs(x), axis=1) * OF_LARGEST
    scale = jnp.where(scale == 0, 1.0, scale)
    across = jnp.broadcast_to(scale[:, None], x.shape)
    return _divide(x, across, is_compiled).astype(jnp.float8_e4m3fn), scale


def _divide(x, by, is_compiled):
    """Rounded to the nearest, as no division of Triton is by itself."""
    if not is_compiled:
        return x / by
    shape = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    how = {"constraints": "=f,f,f", "pack": 1, "result_shape_dtypes": [shape]}
    return pltriton.elementwise_inline_asm("div.rn.f32 $0, $1, $2;", args=[x, by], **how)[0]


def add_codes(total, x, weight, scale, is_swapped):
    """Adds the products of a block's codes, times its scale of each row; for a CPU.

    A GPU's matrix unit adds codes as `linear_described` has it alone.
    """
    x, weight = x.astype(jnp.float32), weight.astype(jnp.float32)
    if is_swapped:
        return total + pltriton.dot(weight, x.T) * scale[None, :]
    return total + pltriton.dot(x, weight.T) * scale[:, None]
