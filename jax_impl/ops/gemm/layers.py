"""The small operations that every layer is made of: float32 inside, the input's dtype outside.

As `shared.spec.layers`; on a GPU norms, GELUs and blends of bfloat16 are kernels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Float, Int

from jax_impl.ops import Kernels, is_bfloat16, kernel_or_plain
from shared.spec.reduction_order import SQUARES

Array = Float[jax.Array, "..."]

PIECE = 64
"""Of so many outputs a CPU makes whole pieces, in which each output's sum has one order."""


def linear(
    x: Float[jax.Array, "R inputs"], weight: Float[jax.Array, "outputs inputs"]
) -> Float[jax.Array, "R outputs"]:
    """The products of rows with each output's weights, as float32.

    On a CPU an output's bits would else follow from how many stand beside it, and so from the
    number of ranks; the weights of most models are whole pieces, to which nothing is done.
    """
    outputs = len(weight)
    weight = jnp.pad(weight, ((0, -outputs % PIECE), (0, 0)))
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    # HIGHEST: a float32 product is a float32 product, on a GPU as well (no tf32).
    options = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    return lax.dot_general(x, weight, contract, **options)[:, :outputs]


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x))."""
    return jax.nn.sigmoid(x)


def softplus(x: Array) -> Array:
    """log(1 + exp(x)), without overflow."""
    return jnp.logaddexp(x, jnp.zeros((), x.dtype))


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


class Shown(NamedTuple):
    """Rows of pictures, some of which stand in the place of tokens'.

    Attributes:
      pool: Of all pictures; row 0 is nobody's.
      sources: The row that stands in the place of each token's own; 0: none does.
    """

    pool: Float[jax.Array, "rows hidden"]
    sources: Int[jax.Array, " R"]


def embedded(
    table: Float[jax.Array, "vocab hidden"],
    tokens: Int[jax.Array, " R"],
    shown: Shown | None,
    factor: float = 1.0,
) -> Float[jax.Array, "R hidden"]:
    """The stored vector of each token, times a factor; or a picture's row that stands there."""
    own = table[tokens]
    if factor != 1:
        own = (own.astype(jnp.float32) * factor).astype(table.dtype)
    if shown is None:
        return own
    return jnp.where(shown.sources[:, None] > 0, shown.pool[shown.sources], own)


def plain_rms_norm(
    x: Float[jax.Array, "... size"], weight: Float[jax.Array, " size"] | None, eps: float
) -> Float[jax.Array, "... size"]:
    """Divides by the root mean square over the last axis and scales by `weight`, in float32."""
    wide = x.astype(jnp.float32)
    normed = wide / _root(_sums_of_squares(wide) / x.shape[-1] + eps)
    return (normed if weight is None else normed * weight).astype(x.dtype)


def kernel_rms_norm(
    kernels: Kernels,
    x: Float[jax.Array, "... size"],
    weight: Float[jax.Array, " size"] | None,
    eps: float,
) -> Float[jax.Array, "... size"]:
    rows = x.reshape(-1, x.shape[-1])
    return kernels.layers.rms_norm(rows, weight, eps, order=SQUARES).reshape(x.shape)


rms_norm = kernel_or_plain(kernel_rms_norm, plain_rms_norm, is_bfloat16)


def plain_layer_norm(
    x: Float[jax.Array, "... size"],
    weight: Float[jax.Array, " size"],
    bias: Float[jax.Array, " size"],
    eps: float,
) -> Float[jax.Array, "... size"]:
    """Takes the mean off, divides by the deviation over the last axis, scales and shifts."""
    wide = x.astype(jnp.float32)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    deviation = _root((centred * centred).mean(axis=-1, keepdims=True) + eps)
    return (centred / deviation * weight + bias).astype(x.dtype)


def kernel_layer_norm(
    kernels: Kernels,
    x: Float[jax.Array, "... size"],
    weight: Float[jax.Array, " size"],
    bias: Float[jax.Array, " size"],
    eps: float,
) -> Float[jax.Array, "... size"]:
    rows = x.reshape(-1, x.shape[-1])
    return kernels.layers.layer_norm(rows, weight, bias, eps, order=SQUARES).reshape(x.shape)


layer_norm = kernel_or_plain(kernel_layer_norm, plain_layer_norm, is_bfloat16)


def plain_gelu(x: Array) -> Array:
    """x times the share of a normal distribution that lies below x."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def kernel_gelu(kernels: Kernels, x: Array) -> Array:
    return kernels.layers.gelu(x)


gelu = kernel_or_plain(kernel_gelu, plain_gelu, is_bfloat16)


def plain_gelu_tanh(x: Array) -> Array:
    """`gelu` by an approximation of that share."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def kernel_gelu_tanh(kernels: Kernels, x: Array) -> Array:
    return kernels.layers.gelu_tanh(x)


gelu_tanh = kernel_or_plain(kernel_gelu_tanh, plain_gelu_tanh, is_bfloat16)


def plain_blended(
    table: Float[jax.Array, "places hidden"],
    corners: Int[jax.Array, "R 4"],
    shares: Float[jax.Array, "R 4"],
) -> Float[jax.Array, "R hidden"]:
    """What lies between four rows of a table, of each of which a row has a share."""
    return (table[corners].astype(jnp.float32) * shares[..., None]).sum(axis=1).astype(table.dtype)


def kernel_blended(
    kernels: Kernels,
    table: Float[jax.Array, "places hidden"],
    corners: Int[jax.Array, "R 4"],
    shares: Float[jax.Array, "R 4"],
) -> Float[jax.Array, "R hidden"]:
    return kernels.layers.blended(table, corners, shares)


blended = kernel_or_plain(kernel_blended, plain_blended, is_bfloat16)


def l2norm(x: Float[jax.Array, "... size"]) -> Float[jax.Array, "... size"]:
    """Scales the last axis to unit length; the 1e-6 stands inside the root."""
    return x / _root(_sums_of_squares(x) + 1e-6)


def summed(x: Float[jax.Array, "... size"]) -> Float[jax.Array, "... 1"]:
    """The sum over the last axis, float32.

    XLA adds in an order that follows from all sizes of an array, and so from how many heads a rank
    has. As a product a sum is one of many outputs, see `linear`, whatever stands beside it.
    """
    rows, ones = x.astype(jnp.float32).reshape(-1, x.shape[-1]), jnp.ones((1, x.shape[-1]))
    return linear(ones, rows).reshape(*x.shape[:-1], 1)


def _root(x: Float[jax.Array, "... 1"]) -> Float[jax.Array, "... 1"]:
    """The square root to divide by.

    XLA would make a product of the division, with an inverse root that a CPU only estimates where
    it works on several numbers at once.
    """
    return lax.optimization_barrier(jnp.sqrt(x))


def _sums_of_squares(x: Float[jax.Array, "... size"]) -> Float[jax.Array, "... 1"]:
    """Of whole rows, or of the heads of rows, of which ranks have some each."""
    return summed(x * x) if x.ndim > 2 else jnp.sum(x * x, axis=-1, keepdims=True)


def rotary_angles(
    positions: Int[jax.Array, "R ..."], frequencies: Float[jax.Array, " half"], factor: float
) -> tuple[Float[jax.Array, "R half"], Float[jax.Array, "R half"]]:
    """Cosine and sine of each position's angles, times the attention factor.

    Args:
      positions: Of each row, or of each pair of its dimensions.
    """
    angles = positions.astype(jnp.float32).reshape(len(positions), -1) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def query_growth(
    positions: Int[jax.Array, " R"], beta: float, context: int
) -> Float[jax.Array, " R"]:
    """By how much queries grow with their position: not at all before the first `context`."""
    return 1 + beta * jnp.log(1 + jnp.floor(positions.astype(jnp.float32) / context))


def apply_rotary(
    x: Float[jax.Array, "R H D"],
    cos: Float[jax.Array, "R half"],
    sin: Float[jax.Array, "R half"],
) -> Float[jax.Array, "R H D"]:
    """Turns dimension i with dimension i + half; dimensions past 2 * half pass through."""
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
