"""FP8 activations (W8A8): dynamic quantisation of rows; same as `shared.spec.fp8_activations`."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float8e4m3fn, Float32

from jax_impl.ops.gemm import layers
from shared.models.formats.fp8 import BLOCK, OF_LARGEST


class Quantised(NamedTuple):
    """Rows quantised to e4m3.

    Attributes:
      scales: Scale of each block of 128 inputs; the last block may be smaller.
    """

    codes: Float8e4m3fn[jax.Array, "R inputs"]
    scales: Float32[jax.Array, "R blocks"]


def quantised(x: Float[jax.Array, "R inputs"]) -> Quantised:
    """Quantises each row, with rounding to nearest even."""
    blocks = _in_blocks(x.astype(jnp.float32))
    scales = jnp.abs(blocks).max(axis=2) * OF_LARGEST
    scales = jnp.where(scales == 0, 1.0, scales)
    codes = (blocks / scales[:, :, None]).astype(jnp.float8_e4m3fn)
    return Quantised(codes.reshape(len(x), -1)[:, : x.shape[1]], scales)


def product(
    x: Quantised,
    codes: Float8e4m3fn[jax.Array, "outputs inputs"],
    scales: Float32[jax.Array, "outputs blocks"],
) -> Float32[jax.Array, "R outputs"]:
    """Same as the specification, but scales multiply quantised values before the sums."""
    return layers.linear(numbers(*x), numbers(codes, scales))


def numbers(
    codes: Float8e4m3fn[jax.Array, "R inputs"], scales: Float32[jax.Array, "R blocks"]
) -> Float32[jax.Array, "R inputs"]:
    """Dequantises values with their scales."""
    across = jnp.repeat(scales, BLOCK, axis=1)[:, : codes.shape[1]]
    return codes.astype(jnp.float32) * across


def _in_blocks(x: Float32[jax.Array, "R inputs"]) -> Float32[jax.Array, "R blocks block"]:
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
    return padded.reshape(len(x), -1, BLOCK)
