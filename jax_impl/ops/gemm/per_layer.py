"""Per-layer embeddings; same as `shared.spec.per_layer`. All ranks compute them whole."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.ops import Norm
from jax_impl.ops.gemm import layers, linear
from jax_impl.ops.gemm.added_norm import added_norm
from jax_impl.ops.gemm.linear import Matrix, NormedStream
from shared.spec.per_layer import SHARE


class PerLayerTable(NamedTuple):
    """Weights that compute the parts of all layers."""

    embed: Float[jax.Array, "vocab parts"]
    projection: Matrix
    norm: Float[jax.Array, " size"]


class PerLayerInput(NamedTuple):
    """Weights with which one layer adds its part."""

    gate: Matrix
    out: Matrix
    norm: Norm


def per_layer_parts(
    tokens: Int[jax.Array, " R"],
    embedded: Float[jax.Array, "R hidden"],
    table: PerLayerTable,
    eps: float,
) -> Float[jax.Array, "R layers size"]:
    """Computes the part of each layer for each row."""
    R, size = len(tokens), table.norm.shape[-1]
    factor = layers.rounded(size**0.5, table.embed)
    own = layers.embed_tokens(table.embed, tokens, None, factor).reshape(R, -1, size)
    projected = linear.product(embedded, table.projection)
    projected = (projected.astype(jnp.float32) * embedded.shape[1] ** -0.5).astype(own.dtype)
    projected = layers.rms_norm(projected.reshape(own.shape), table.norm, eps)
    return ((projected.astype(jnp.float32) + own.astype(jnp.float32)) * SHARE).astype(own.dtype)


def added_part(
    stream: NormedStream,
    part: Float[jax.Array, "R size"],
    weights: PerLayerInput,
    eps: float,
    scalar: Norm | None,
    norm: Norm | None,
) -> NormedStream:
    """Adds a layer's part to the residual stream, gated by the stream."""
    gated = layers.gelu_tanh(linear.product(stream.whole, weights.gate)) * part
    x = linear.product(gated, weights.out)
    return added_norm(x, weights.norm, eps, stream, scalar, norm)
