"""Parts of layers in training: mixed-precision GEMMs, and attention over whole sequences.

Rows are flat as in serving, R = B * T of them. Each sequence is complete, and no KV is paged.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Float, Int

from jax_impl.ops.attention.attention_layer import Angles
from jax_impl.ops.gemm import layers
from jax_impl.training.nnx_modules import AttentionStack, Layers
from shared.models.config import ModelConfig

Rows = Float[jax.Array, "R hidden"]
Queries = Float[jax.Array, "B T Hq D"]
Keys = Float[jax.Array, "B T Hk D"]

NEVER = -1e30
"""Attention logit of masked positions; finite, so that its softmax is 0 and not NaN."""


def linear(
    x: Float[jax.Array, "*rows inputs"], weight: Float[jax.Array, "outputs inputs"]
) -> Float[jax.Array, "*rows outputs"]:
    """Multiplies in the dtype of `x` by a weight of any dtype; the result has the dtype of `x`."""
    return _product(x, weight, x.dtype)


def linear_float32(
    x: Float[jax.Array, "*rows inputs"], weight: Float[jax.Array, "outputs inputs"]
) -> Float[jax.Array, "*rows outputs"]:
    """Same as `linear`, but returns the float32 sums; for logits."""
    return _product(x, weight, jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: jax.Array, weight: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Multiplies, with gradients in the dtype of `x` too; JAX's own would widen both factors."""
    return _dot(x, weight.astype(x.dtype), (x.ndim - 1, 1), dtype)


def _product_forward(
    x: jax.Array, weight: jax.Array, dtype: DTypeLike
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, weight, dtype), (x, weight)


def _product_backward(
    dtype: DTypeLike, saved: tuple[jax.Array, jax.Array], slope: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    slope = slope.astype(x.dtype)
    along = _dot(slope, weight.astype(x.dtype), (slope.ndim - 1, 0), x.dtype)
    flat_slope, flat_x = slope.reshape(-1, slope.shape[-1]), x.reshape(-1, x.shape[-1])
    return along, _dot(flat_slope, flat_x, (0, 0), jnp.float32).astype(weight.dtype)


_product.defvjp(_product_forward, _product_backward)


def _dot(a: jax.Array, b: jax.Array, axes: tuple[int, int], dtype: DTypeLike) -> jax.Array:
    # HIGHEST: float32 precision on a GPU as well (no TF32).
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    contract = (((axes[0],), (axes[1],)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=dtype)


def normed(
    x: Float[jax.Array, "R hidden"],
    weight: Float[jax.Array, " hidden"],
    eps: float,
    compute_dtype: DTypeLike,
) -> Float[jax.Array, "R hidden"]:
    """Returns the RMS norm of a residual stream in the compute dtype."""
    return layers.plain_rms_norm(x, weight, eps).astype(compute_dtype)


def project(
    config: ModelConfig,
    weights: AttentionStack,
    layer: int,
    x: Float[jax.Array, "R inputs"],
    rotary: Angles,
) -> tuple[
    Float[jax.Array, "R Hq D"],
    Float[jax.Array, "R Hk D"],
    Float[jax.Array, "R Hk D"],
    Float[jax.Array, "R Hq D"] | None,
]:
    """Returns queries and keys after norm and RoPE, values, and the output gate or None."""
    qkv, attention = linear(x, weights.inputs[layer]), config.attention
    D, Hq, Hk = attention.head_size, attention.num_heads, attention.num_kv_heads
    q, k, v = jnp.split(qkv, [qkv.shape[1] - 2 * Hk * D, qkv.shape[1] - Hk * D], axis=1)
    q, k, v = q.reshape(len(x), Hq, -1), k.reshape(-1, Hk, D), v.reshape(-1, Hk, D)
    q, gate = (q[..., :D], q[..., D:]) if attention.has_gate else (q, None)
    if attention.qk_norm:
        q = layers.plain_rms_norm(q, weights.q_norm[layer], config.rms_eps)
        k = layers.plain_rms_norm(k, weights.k_norm[layer], config.rms_eps)
    return layers.apply_rotary(q, *rotary), layers.apply_rotary(k, *rotary), v, gate


def keys_and_values(
    config: ModelConfig,
    weights: AttentionStack,
    layer: int,
    x: Float[jax.Array, "R inputs"],
    rotary: Angles,
) -> tuple[Float[jax.Array, "R Hk D"], Float[jax.Array, "R Hk D"]]:
    """Returns keys and values as in `project`, for rows without queries."""
    D, Hk = config.attention.head_size, config.attention.num_kv_heads
    both = linear(x, weights.inputs[layer][-2 * Hk * D :]).reshape(len(x), 2, Hk, D)
    k, v = both[:, 0], both[:, 1]
    if config.attention.qk_norm:
        k = layers.plain_rms_norm(k, weights.k_norm[layer], config.rms_eps)
    return layers.apply_rotary(k, *rotary), v


def merge(
    weights: AttentionStack,
    layer: int,
    out: Float[jax.Array, "R Hq D"],
    gate: Float[jax.Array, "R Hq D"] | None,
) -> Rows:
    """Applies the output gate, if any, and the output projection of attention."""
    if gate is not None:
        out = out * layers.sigmoid(gate)
    return linear(out.reshape(len(out), -1), weights.out[layer])


def mlp(weights: Layers, layer: int, x: Rows) -> Rows:
    """Computes the gated MLP of one layer of a stack."""
    gate, up = jnp.split(linear(x, weights.gate_up[layer]), 2, axis=-1)
    return linear(layers.silu(gate) * up, weights.down[layer])


def flat_positions(B: int, T: int) -> Int[jax.Array, " R"]:
    """Returns the position of each row of B sequences of T tokens."""
    return jnp.tile(jnp.arange(T, dtype=jnp.int32), B)


def causal(q: Queries, k: Keys, v: Keys) -> Queries:
    """Computes causal attention within each sequence."""
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def scores(q: Queries, k: Float[jax.Array, "B J Hk D"]) -> Float[jax.Array, "B Hk group T J"]:
    """Computes the attention logits, float32; query heads are grouped by their KV head (GQA)."""
    precision = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    B, T, _, D = q.shape
    grouped = q.reshape(B, T, k.shape[2], -1, D)
    wide = {"precision": precision, "preferred_element_type": jnp.float32}
    return jnp.einsum("bthgd,bjhd->bhgtj", grouped, k, **wide) * jnp.float32(D**-0.5)


def read(
    shares: Float[jax.Array, "B Hk group T J"], v: Float[jax.Array, "B J Hk D"]
) -> Float[jax.Array, "B T Hq D"]:
    """Returns the sums of the values, weighted by the given shares."""
    precision = lax.Precision.HIGHEST if v.dtype == jnp.float32 else None
    out = jnp.einsum("bhgtj,bjhd->bthgd", shares.astype(v.dtype), v, precision=precision)
    B, T, Hk, group, D = out.shape
    return out.reshape(B, T, Hk * group, D)
