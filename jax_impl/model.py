"""The forward pass of Llama, Qwen3 and Qwen3.5 (dense) over flat rows; as `shared.spec.model`."""

from typing import NamedTuple

import jax
from jaxtyping import Float, Int

from jax_impl import layers
from jax_impl.layers import KV, DeltaMixer, Hidden
from jax_impl.ops.attention import Rows
from jax_impl.ops.layers import rms_norm
from jax_impl.ops.linear import linear_float32
from jax_impl.weights import Model
from shared.models.config import ModelConfig


class Forward(NamedTuple):
    """What a pass gives.

    Attributes:
      hidden: After the final norm.
      streams: The residual stream that enters each layer, and the one that leaves the last.
      kv: The pools with the rows' keys and values.
    """

    hidden: Hidden
    streams: tuple[Hidden, ...]
    kv: KV

    def at(self, rows: Int[jax.Array, " R"]) -> "Forward":
        """What the pass gave of some rows."""
        return Forward(self.hidden[rows], tuple(x[rows] for x in self.streams), self.kv)


def forward(
    config: ModelConfig,
    weights: Model,
    kv: KV,
    rows: Rows,
    tokens: Int[jax.Array, " R"],
    mixer: DeltaMixer | None,
) -> Forward:
    """Runs all layers; which rows see which is said by `rows`, how states run by `mixer`."""
    stack, eps = weights.layers, config.rms_eps
    turn = layers.angles(config, rows.positions)
    x = weights.embed[...][tokens]
    streams, of_kind = [x], {"attention": 0, "gated_delta": 0}
    for layer, kind in enumerate(config.layer_kinds):
        y = rms_norm(x, stack.input_norm[layer], eps)
        place = of_kind[kind]
        if kind == "attention":
            out, kv = layers.attention_layer(config, stack.attention, place, y, rows, turn, kv)
        else:
            assert mixer is not None  # the caller has one for a model with such layers
            out = layers.gated_delta_layer(config, stack.gated_delta, place, y, mixer)
        of_kind[kind] += 1
        x = x + out
        x = x + layers.mlp(stack, layer, rms_norm(x, stack.post_attention_norm[layer], eps))
        streams.append(x)
    return Forward(rms_norm(x, weights.final_norm[...], eps), tuple(streams), kv)


def logits(weights: Model, hidden: Hidden) -> Float[jax.Array, "R vocab"]:
    """Scores of the next token, float32."""
    return linear_float32(hidden, weights.head[...])
