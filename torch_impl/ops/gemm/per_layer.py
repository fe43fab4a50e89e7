"""Per-layer embeddings; same as `shared.spec.per_layer`. All ranks compute them whole."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from shared.spec.per_layer import SHARE
from torch_impl.ops.gemm import layers, linear
from torch_impl.ops.gemm.added_norm import added_norm
from torch_impl.ops.gemm.linear import Matrix, NormedStream


@dataclass(frozen=True)
class PerLayerTable:
    """Weights that compute the parts of all layers."""

    embed: Float[Tensor, "vocab parts"]
    projection: Matrix
    norm: Float[Tensor, " size"]


@dataclass(frozen=True)
class PerLayerInput:
    """Weights with which one layer adds its part."""

    gate: Matrix
    out: Matrix
    norm: Float[Tensor, " hidden"]


def per_layer_parts(
    tokens: Int[Tensor, " R"],
    embedded: Float[Tensor, "R hidden"],
    table: PerLayerTable,
    eps: float,
) -> Float[Tensor, "R layers size"]:
    """Computes the part of each layer for each row."""
    R, size = len(tokens), table.norm.shape[-1]
    factor = layers.rounded(size**0.5, table.embed)
    own = layers.embed_tokens(table.embed, tokens, None, factor).reshape(R, -1, size)
    projected = linear.product(embedded, table.projection)
    projected = (projected.float() * embedded.shape[1] ** -0.5).to(own.dtype)
    projected = layers.rms_norm(projected.reshape(own.shape), table.norm, eps)
    return ((projected.float() + own.float()) * SHARE).to(own.dtype)


def added_part(
    stream: NormedStream,
    part: Float[Tensor, "R size"],
    weights: PerLayerInput,
    eps: float,
    scalar: Float[Tensor, " 1"] | None,
    norm: Float[Tensor, " hidden"] | None,
) -> NormedStream:
    """Adds a layer's part to the residual stream, gated by the stream."""
    gated = layers.gelu_tanh(linear.product(stream.whole, weights.gate)) * part
    x = linear.product(gated, weights.out)
    return added_norm(x, weights.norm, eps, stream, scalar, norm)
