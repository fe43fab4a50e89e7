"""Per-layer embeddings: a second embedding of each token, of which each layer adds its part to the
residual stream after its MLP.

Source: Gemma 4 (transformers, `modeling_gemma4`), following Gemma 3n.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from shared.spec import layers, linear
from shared.spec.added_norm import added_norm
from shared.spec.linear import Matrix, NormedStream

SHARE = 2.0**-0.5
"""Multiplier of the sum of both embeddings."""


@dataclass(frozen=True)
class PerLayerTable:
    """Weights that compute the parts of all layers.

    Attributes:
      embed: Second embedding of each token: the parts of layer after layer.
      projection: Projection of the first embedding to the same columns.
      norm: Scale of the RMS norm of a projected part.
    """

    embed: Float[np.ndarray, "vocab parts"]
    projection: Matrix
    norm: Float[np.ndarray, " size"]


@dataclass(frozen=True)
class PerLayerInput:
    """Weights with which one layer adds its part.

    Attributes:
      gate: Projection of the residual stream to the size of a part.
      out: Projection of the gated part to the hidden size.
      norm: Scale of the RMS norm of the result.
    """

    gate: Matrix
    out: Matrix
    norm: Float[np.ndarray, " hidden"]


def per_layer_parts(
    tokens: Int[np.ndarray, " R"],
    embedded: Float[np.ndarray, "R hidden"],
    table: PerLayerTable,
    eps: float,
) -> Float[np.ndarray, "R layers size"]:
    """Computes the part of each layer for each row.

    Args:
      tokens: Token of each row.
      embedded: First embedding of each row, with its factor.
      table: Weights.
      eps: Epsilon of the norm.
    """
    R, size = len(tokens), len(table.norm)
    own = layers.embed_tokens(table.embed, tokens, None, size**0.5).reshape(R, -1, size)
    projected = linear.product(embedded, table.projection)
    projected = projected * np.float32(embedded.shape[1] ** -0.5)
    projected = layers.rms_norm(projected.reshape(own.shape), table.norm, eps)
    return (projected + own) * np.float32(SHARE)


def added_part(
    stream: NormedStream,
    part: Float[np.ndarray, "R size"],
    weights: PerLayerInput,
    eps: float,
    scalar: Float[np.ndarray, " 1"] | None,
    norm: Float[np.ndarray, " hidden"] | None,
) -> NormedStream:
    """Adds a layer's part to the residual stream, gated by the stream.

    Args:
      stream: Residual stream after the MLP.
      part: The layer's part of each row.
      weights: Weights of the layer.
      eps: Epsilon of the norm.
      scalar, norm: Layer scalar, and scale of the next norm; see `added_norm`.
    """
    gated = layers.gelu_tanh(linear.product(stream.rows, weights.gate)) * part
    x = linear.product(gated, weights.out)
    return added_norm(x, weights.norm, eps, stream, scalar, norm)
