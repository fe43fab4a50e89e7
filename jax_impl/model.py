"""The forward pass of Llama, Qwen3 and Qwen3.5 (dense) over flat rows; as `shared.spec.model`."""

from typing import NamedTuple

import jax
from jaxtyping import Float, Int

from jax_impl import layers
from jax_impl.layers import DeltaMixer, Hidden
from jax_impl.ops.attention import KV, Rows
from jax_impl.ops.layers import rms_norm
from jax_impl.ops.linear import linear_float32
from jax_impl.weights import Weights
from shared.models.config import ModelConfig


class Forward(NamedTuple):
    """What a pass gives.

    Attributes:
      hidden: After the final norm.
      streams: The residual streams that were kept.
      kv: The pools with the rows' keys and values.
    """

    hidden: Hidden
    streams: tuple[Hidden, ...]
    kv: KV

    def at(self, rows: Int[jax.Array, " some"]) -> "Forward":
        """What the pass gave for some of its rows."""
        return Forward(self.hidden[rows], tuple(x[rows] for x in self.streams), self.kv)


class Model(NamedTuple):
    """A model on a device: its settings and its weights."""

    config: ModelConfig
    weights: Weights


def forward(
    model: Model,
    tokens: Int[jax.Array, " R"],
    rows: Rows,
    kv: KV,
    mixer: DeltaMixer | None,
    kept_streams: tuple[int, ...],
) -> Forward:
    """Runs all layers over flat rows and writes their KV.

    Args:
      tokens: The token of each row.
      rows: Where the rows stand and what they see.
      kv: The pools of the attention layers.
      mixer: Runs the gated-delta layers; None for a model without them.
      kept_streams: Residual streams to keep, ascending: number i is what enters layer i.
    """
    config, stack, eps = model.config, model.weights.layers, model.config.rms_eps
    turn = layers.angles(config, rows.positions)
    x = model.weights.embed[...][tokens]
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
    hidden = rms_norm(x, model.weights.final_norm[...], eps)
    return Forward(hidden, tuple(streams[i] for i in kept_streams), kv)


def logits(model: Model, hidden: Hidden) -> Float[jax.Array, "R vocab"]:
    """Scores of the next token, float32."""
    return linear_float32(hidden, model.weights.head[...])
