"""The forward pass of Llama, Qwen3 and Qwen3.5 (dense) over flat rows."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from shared.models.config import ModelConfig
from torch_impl.layers import (
    DeltaMixer,
    Hidden,
    attention_layer,
    feed_forward,
    gated_delta_layer,
    rotary_frequencies,
    turn,
)
from torch_impl.ops import layers
from torch_impl.ops.attention import Rows
from torch_impl.ops.linear import linear
from torch_impl.weights import Attention, Weights


@dataclass(frozen=True)
class Forward:
    """What a pass gives: the hidden states after the final norm, and the streams that were kept."""

    hidden: Hidden
    streams: tuple[Hidden, ...]

    def at(self, rows: Int[Tensor, " some"]) -> "Forward":
        """What the pass gave for some of its rows."""
        return Forward(self.hidden[rows], tuple(stream[rows] for stream in self.streams))


@dataclass(frozen=True)
class Model:
    """A model on a device: its settings, its weights and its rotary frequencies."""

    config: ModelConfig
    weights: Weights
    frequencies: Float[Tensor, " half"]

    @classmethod
    def of(cls, config: ModelConfig, weights: Weights) -> "Model":
        """Binds weights to their settings."""
        return cls(config, weights, rotary_frequencies(config, weights.embed.device))


def forward(
    model: Model,
    tokens: Int[Tensor, " R"],
    rows: Rows,
    kv: Float[Tensor, "L 2 pages page H D"],
    mixer: DeltaMixer | None,
    kept_streams: tuple[int, ...],
) -> Forward:
    """Runs all layers over flat rows and writes their KV.

    Args:
      tokens: The token of each row.
      rows: Where the rows stand and what they see.
      kv: The pools of the attention layers, written in place.
      mixer: Runs the gated-delta layers; None for a model without them.
      kept_streams: Residual streams to keep, ascending: number i is what enters layer i.
    """
    config, weights = model.config, model.weights
    turned = turn(config, model.frequencies, rows)
    x, streams = weights.embed[tokens], []
    for i, layer in enumerate(weights.layers):
        if i in kept_streams:
            streams.append(x)
        y = layers.rms_norm(x, layer.input_norm, config.rms_eps)
        if isinstance(layer.mixer, Attention):
            x = x + attention_layer(config, layer.mixer, y, turned, kv[layer.place])
        else:
            x = x + gated_delta_layer(config, layer.mixer, layer.place, y, mixer)
        x = feed_forward(config, layer, x)
    if len(weights.layers) in kept_streams:
        streams.append(x)
    return Forward(layers.rms_norm(x, weights.final_norm, config.rms_eps), tuple(streams))


def logits(model: Model, hidden: Hidden) -> Float[Tensor, "R vocab"]:
    """Scores of the next token, float32."""
    return linear(hidden, model.weights.lm_head).float()
