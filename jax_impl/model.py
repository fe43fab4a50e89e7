"""The forward pass of Llama, Qwen3, Qwen3.5 and their kin on flat rows; as `shared.spec.model`."""

from functools import partial
from typing import NamedTuple

import jax
from jaxtyping import Float, Int

from jax_impl.layers import (
    DeltaMixer,
    Hidden,
    LayerCarry,
    Sight,
    attention_layer,
    gated_delta_layer,
)
from jax_impl.ops import Place, layers, linear
from jax_impl.ops.attention import KV, Rows
from jax_impl.ops.linear import Norm, Stream
from jax_impl.ops.mix import PagedKV
from jax_impl.weights import Layer, Weights
from shared.models.config import ModelConfig
from shared.models.layers import AttentionConfig, GatedDeltaConfig


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


class Block(NamedTuple):
    """A decoder layer of a model; `place` counts the layers of its kind."""

    mixer: AttentionConfig | GatedDeltaConfig
    place: int
    layer: Layer


class Model(NamedTuple):
    """A model on a device: its settings, its weights and its blocks."""

    config: ModelConfig
    weights: Weights
    blocks: tuple[Block, ...]

    @classmethod
    def of(cls, config: ModelConfig, weights: Weights) -> "Model":
        """Binds weights to their settings."""
        kinds, blocks = config.layer_kinds, []
        for number, (kind, each) in enumerate(zip(kinds, config.layers, strict=True)):
            place = kinds[:number].count(kind)
            blocks.append(Block(each.mixer, place, weights.layers[number]))
        return cls(config, weights, tuple(blocks))


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
    config, eps, before = model.config, model.config.rms_eps, model.config.input_eps
    sights = {each: Sight.of(each, rows, kv) for each in config.attentions}

    # Traced and lowered once for all blocks of a kind, which differ in their arrays alone.
    @partial(jax.jit, static_argnums=0)
    def attention_block(
        mixer: AttentionConfig,
        layer: Layer,
        stream: Stream,
        paged: PagedKV,
        place: Place,
        norm: Norm | None,
    ) -> tuple[Stream, PagedKV]:
        qkv = linear.normed_product(stream, before, layer.mixer.inputs)
        sight = sights[mixer]._replace(kv=paged)
        return attention_layer(config, layer, qkv, stream, sight, place, norm)

    @jax.jit
    def delta_block(
        layer: Layer, stream: Stream, carry: LayerCarry, place: Place, norm: Norm | None
    ) -> tuple[Stream, LayerCarry]:
        assert mixer is not None  # the caller has one for a model with such layers
        inputs = linear.normed_product(stream, before, layer.mixer.inputs)
        return gated_delta_layer(config, layer, inputs, stream, mixer, carry, place, norm)

    embedded = layers.embedded(model.weights.embed, tokens, config.embedding_factor)
    norms = [block.layer.input_norm for block in model.blocks]
    # What leaves the last layer no product reads; with some norm all layers are one trace.
    norms.append(norms[-1])
    stream = linear.stream(embedded, norms[0])
    streams, paged = [stream.rows], {each: sight.kv for each, sight in sights.items()}
    for block, norm in zip(model.blocks, norms[1:], strict=True):
        if isinstance(block.mixer, AttentionConfig):
            own = paged[block.mixer]._replace(pools=kv)
            given = (block.layer, stream, own, block.place, norm)
            stream, own = attention_block(block.mixer, *given)
            paged[block.mixer], kv = own, own.pools
        else:
            assert mixer is not None
            given = (block.layer, stream, mixer.carry, block.place, norm)
            stream, mixer.carry = delta_block(*given)
        streams.append(stream.rows)
    hidden = layers.rms_norm(stream.rows, model.weights.final_norm, eps)
    return Forward(hidden, tuple(streams[i] for i in kept_streams), kv)


def logits(model: Model, hidden: Hidden) -> Float[jax.Array, "R vocab"]:
    """Scores of the next token, float32."""
    return linear.product_float32(hidden, model.weights.lm_head, model.config.logits_factor)
