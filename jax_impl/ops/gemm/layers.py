"""Row-wise layer operations: float32 inside, dtype of the input outside.

Same as `shared.spec.layers`. On a GPU norms, GELU and `bilinear_pos_embed` are kernels for
bfloat16.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Float, Int

from jax_impl.ops import Kernels, is_bfloat16, kernel_or_reference
from shared.models.activation import GELU_TANH, SCALED_SILU, SILU, Activation
from shared.spec.reduction_order import SQUARES

Array = Float[jax.Array, "..."]

PIECE = 64
"""Outputs of a weight piece on a CPU; the reduction order is fixed within a whole piece."""


def linear(
    x: Float[jax.Array, "R inputs"], weight: Float[jax.Array, "outputs inputs"]
) -> Float[jax.Array, "R outputs"]:
    """Computes a GEMM in float32.

    On a CPU the weight is padded to whole pieces, because the reduction order depends on the number
    of outputs and so on the TP size. The weights of most models need no padding.
    """
    outputs = len(weight)
    weight = jnp.pad(weight, ((0, -outputs % PIECE), (0, 0)))
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    # HIGHEST: float32 precision on a GPU as well (no TF32).
    options = {"precision": lax.Precision.HIGHEST, "preferred_element_type": jnp.float32}
    return lax.dot_general(x, weight, contract, **options)[:, :outputs]


def sigmoid(x: Array) -> Array:
    """Computes 1 / (1 + exp(-x))."""
    return jax.nn.sigmoid(x)


def softplus(x: Array) -> Array:
    """Computes log(1 + exp(x)) without overflow."""
    return jnp.logaddexp(x, jnp.zeros((), x.dtype))


def silu(x: Array) -> Array:
    """Computes x * sigmoid(x)."""
    return x * sigmoid(x)


class ImageEmbeds(NamedTuple):
    """Image embeddings that replace token embeddings.

    Attributes:
      pool: Encoder cache; row 0 is unused.
      sources: Encoder-cache row used for each token, or 0 for the token's own embedding.
    """

    pool: Float[jax.Array, "rows hidden"]
    sources: Int[jax.Array, " R"]


def embed_tokens(
    table: Float[jax.Array, "vocab hidden"],
    tokens: Int[jax.Array, " R"],
    shown: ImageEmbeds | None,
    factor: float = 1.0,
) -> Float[jax.Array, "R hidden"]:
    """Returns each token's embedding times a factor, or the image embedding that replaces it."""
    own = table[tokens]
    if factor != 1:
        own = (own.astype(jnp.float32) * factor).astype(table.dtype)
    if shown is None:
        return own
    return jnp.where(shown.sources[:, None] > 0, shown.pool[shown.sources], own)


def rounded(number: float, like: Array) -> float:
    """Returns a number rounded to the dtype of an array."""
    return float(np.asarray(number, like.dtype))


def plain_rms_norm(
    x: Float[jax.Array, "... size"], weight: Float[jax.Array, " size"] | None, eps: float
) -> Float[jax.Array, "... size"]:
    """Computes RMS norm over the last axis in float32."""
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


rms_norm = kernel_or_reference(kernel_rms_norm, plain_rms_norm, is_bfloat16)


def plain_layer_norm(
    x: Float[jax.Array, "... size"],
    weight: Float[jax.Array, " size"],
    bias: Float[jax.Array, " size"],
    eps: float,
) -> Float[jax.Array, "... size"]:
    """Computes layer norm over the last axis in float32."""
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


layer_norm = kernel_or_reference(kernel_layer_norm, plain_layer_norm, is_bfloat16)


def plain_gelu(x: Array) -> Array:
    """Computes GELU (exact)."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def kernel_gelu(kernels: Kernels, x: Array) -> Array:
    return kernels.layers.gelu(x)


gelu = kernel_or_reference(kernel_gelu, plain_gelu, is_bfloat16)


def plain_gelu_tanh(x: Array) -> Array:
    """Computes GELU (tanh approximation)."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(x.dtype)


def kernel_gelu_tanh(kernels: Kernels, x: Array) -> Array:
    return kernels.layers.gelu_tanh(x)


gelu_tanh = kernel_or_reference(kernel_gelu_tanh, plain_gelu_tanh, is_bfloat16)


def plain_softcap(x: Array, capped: float) -> Array:
    """Computes a soft cap: capped * tanh(x / capped)."""
    return capped * jnp.tanh(x / capped)


def kernel_softcap(kernels: Kernels, x: Array, capped: float) -> Array:
    return kernels.layers.softcap(x, capped)


softcap = kernel_or_reference(kernel_softcap, plain_softcap)


def act_and_mul(gate: Array, up: Array, activation: Activation) -> Array:
    """Applies the activation of a gated MLP."""
    if activation.kind == GELU_TANH:
        return plain_gelu_tanh(gate) * up
    if activation.kind == SILU:
        return silu(gate) * up
    if activation.kind == SCALED_SILU:
        return silu(gate * activation.alpha) * up * activation.factor
    gate = jnp.minimum(gate, activation.limit)
    up = jnp.clip(up, -activation.limit, activation.limit)
    return gate * sigmoid(activation.alpha * gate) * (up + 1)


def activated(x: Array, activation: Activation) -> Array:
    """Applies the activation of an MLP to its first product: gate and up, or up alone."""
    if not activation.is_gated:
        return jnp.square(jnp.maximum(x, 0))
    gate, up = jnp.split(x, 2, axis=-1)
    return act_and_mul(gate, up, activation)


def plain_bilinear_pos_embed(
    table: Float[jax.Array, "places hidden"],
    corners: Int[jax.Array, "R 4"],
    shares: Float[jax.Array, "R 4"],
) -> Float[jax.Array, "R hidden"]:
    """Interpolates between four rows of a table with the given weights."""
    return (table[corners].astype(jnp.float32) * shares[..., None]).sum(axis=1).astype(table.dtype)


def kernel_bilinear_pos_embed(
    kernels: Kernels,
    table: Float[jax.Array, "places hidden"],
    corners: Int[jax.Array, "R 4"],
    shares: Float[jax.Array, "R 4"],
) -> Float[jax.Array, "R hidden"]:
    return kernels.layers.bilinear_pos_embed(table, corners, shares)


bilinear_pos_embed = kernel_or_reference(
    kernel_bilinear_pos_embed, plain_bilinear_pos_embed, is_bfloat16
)


def l2norm(x: Float[jax.Array, "... size"]) -> Float[jax.Array, "... size"]:
    """Scales the last axis to unit length; 1e-6 is added inside the square root."""
    return x / _root(_sums_of_squares(x) + 1e-6)


def summed(x: Float[jax.Array, "... size"]) -> Float[jax.Array, "... 1"]:
    """Sums over the last axis in float32.

    XLA's reduction order depends on all sizes of an array, and so on the number of heads of a rank.
    The sum is therefore a GEMM, whose order is fixed; see `linear`.
    """
    rows, ones = x.astype(jnp.float32).reshape(-1, x.shape[-1]), jnp.ones((1, x.shape[-1]))
    return linear(ones, rows).reshape(*x.shape[:-1], 1)


def _root(x: Float[jax.Array, "... 1"]) -> Float[jax.Array, "... 1"]:
    """Computes the square root of a divisor.

    XLA would replace the division by a product with the inverse root, which vectorised CPU code
    only estimates.
    """
    return lax.optimization_barrier(jnp.sqrt(x))


def _sums_of_squares(x: Float[jax.Array, "... size"]) -> Float[jax.Array, "... 1"]:
    """Sums squares over whole rows, or over heads that are sharded over ranks."""
    return summed(x * x) if x.ndim > 2 else jnp.sum(x * x, axis=-1, keepdims=True)


def rotary_angles(
    positions: Int[jax.Array, "R ..."], frequencies: Float[jax.Array, " half"], factor: float
) -> tuple[Float[jax.Array, "R half"], Float[jax.Array, "R half"]]:
    """Computes RoPE cos and sin of each position, times the attention factor.

    Args:
      positions: Position of each row, or of each rotary pair of a row.
    """
    angles = positions.astype(jnp.float32).reshape(len(positions), -1) * frequencies
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def query_scaling(
    positions: Int[jax.Array, " R"], beta: float, context: int
) -> Float[jax.Array, " R"]:
    """Computes the long-context query scale of each position; 1 below position `context`."""
    return 1 + beta * jnp.log(1 + jnp.floor(positions.astype(jnp.float32) / context))


def apply_rotary_interleaved(
    x: Float[jax.Array, "R H D"],
    cos: Float[jax.Array, "R half"],
    sin: Float[jax.Array, "R half"],
) -> Float[jax.Array, "R H D"]:
    """Rotates dimension 2 i with dimension 2 i + 1."""
    wide = x.astype(jnp.float32)
    first, second = wide[..., ::2], wide[..., 1::2]
    cos, sin = cos[:, None], sin[:, None]
    turned = (first * cos - second * sin, second * cos + first * sin)
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)


def apply_rotary(
    x: Float[jax.Array, "R H D"],
    cos: Float[jax.Array, "R half"],
    sin: Float[jax.Array, "R half"],
) -> Float[jax.Array, "R H D"]:
    """Rotates dimension i with dimension i + half; dimensions past 2 * half are unchanged."""
    half = cos.shape[-1]
    wide = x.astype(jnp.float32)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    cos, sin = cos[:, None], sin[:, None]
    turned = (first * cos - second * sin, second * cos + first * sin, rest)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
