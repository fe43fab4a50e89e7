"""The forward pass of Llama, Qwen3 and Qwen3.5 (dense) over flat rows."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from shared.models.config import ModelConfig
from torch_impl.layers import (
    DeltaMixer,
    Hidden,
    Pools,
    angles,
    attention_layer,
    gated_delta_layer,
    rotary_frequencies,
)
from torch_impl.ops import layers, linear
from torch_impl.ops.attention import Rows
from torch_impl.ops.mix import PagedKV
from torch_impl.weights import Layer, Weights


@dataclass(frozen=True)
class Forward:
    """What a pass gives: the hidden states after the final norm, and the streams that were kept."""

    hidden: Hidden
    streams: tuple[Hidden, ...]

    def at(self, rows: Int[Tensor, " some"]) -> "Forward":
        """What the pass gave for some of its rows."""
        return Forward(self.hidden[rows], tuple(stream[rows] for stream in self.streams))


@dataclass(frozen=True)
class Block:
    """A decoder layer of a model; `place` counts the layers of its kind."""

    kind: str
    place: int
    layer: Layer


@dataclass(frozen=True)
class Model:
    """A model on a device: its settings, its weights, its rotary frequencies and its blocks."""

    config: ModelConfig
    weights: Weights
    frequencies: Float[Tensor, " half"]
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, config: ModelConfig, weights: Weights) -> "Model":
        """Binds weights to their settings."""
        kinds = config.layer_kinds
        blocks = tuple(
            Block(kind, kinds[:i].count(kind), weights.layers[i]) for i, kind in enumerate(kinds)
        )
        return cls(config, weights, rotary_frequencies(config, weights.embed.device), blocks)


def forward(
    model: Model,
    tokens: Int[Tensor, " R"],
    rows: Rows,
    kv: Pools,
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
    turn = angles(config, model.frequencies, rows)
    stream, streams = linear.stream(layers.embedded(weights.embed, tokens)), []
    paged = PagedKV.of(kv, rows)
    for i, block in enumerate(model.blocks):
        if i in kept_streams:
            streams.append(stream.rows)
        layer, place = block.layer, block.place
        inputs = linear.normed_product(stream, layer.input_norm, config.rms_eps, layer.mixer.inputs)
        if block.kind == "attention":
            stream = attention_layer(config, layer, inputs, stream, turn, rows, paged, place)
        else:
            assert mixer is not None  # the caller has one for a model with such layers
            stream = gated_delta_layer(config, layer, inputs, stream, mixer, place)
    if len(model.blocks) in kept_streams:
        streams.append(stream.rows)
    hidden = layers.rms_norm(stream.rows, weights.final_norm, config.rms_eps)
    return Forward(hidden, tuple(streams))


def logits(model: Model, hidden: Hidden) -> Float[Tensor, "R vocab"]:
    """Scores of the next token, float32."""
    return linear.product_float32(hidden, model.weights.lm_head)
