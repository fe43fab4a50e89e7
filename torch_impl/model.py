"""Forward pass of decoder-only models (Llama, Qwen3, Qwen3.5, ...) on flat rows.

Same results as `shared.spec.model`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from jaxtyping import Float, Int
from torch import Tensor

from shared.boundary.tp_group import TPGroup
from shared.models.config import ModelConfig
from shared.models.groups import LayerPlace
from shared.models.mixers import MixerConfig, NoMixer, SelfAttentionConfig
from torch_impl.adapters import NO_ADAPTERS, Adapters, with_adapters
from torch_impl.layers import (
    FEEDS,
    AttentionContext,
    Feed,
    Hidden,
    RecurrentMixer,
    attention,
    layer_end,
    output_and_mlp,
    rotary_frequencies,
    with_parallel,
)
from torch_impl.model_weights import Layer, Weights
from torch_impl.ops.attention.attention import AttentionRows, Pools
from torch_impl.ops.gemm import layers, linear, per_layer
from torch_impl.ops.gemm.layers import ImageEmbeds
from torch_impl.ops.moe.experts import counted
from torch_impl.ops.sampling import lm_head
from torch_impl.ops.sampling.lm_head import Projection
from torch_impl.ops.sampling.vocab_parallel import Vocabulary


@dataclass(frozen=True)
class Forward:
    """Result of a forward pass.

    Attributes:
      hidden: Hidden states after the final norm.
      streams: Requested residual streams.
    """

    hidden: Hidden
    streams: tuple[Hidden, ...]

    def at(self, rows: Int[Tensor, " some"]) -> "Forward":
        """Returns the result for some rows."""
        return Forward(self.hidden[rows], tuple(stream[rows] for stream in self.streams))


@dataclass(frozen=True)
class DecoderLayer:
    """Decoder layer; `pool` and `place` are the cache pool that it reads, and its index in it.

    `parallel_place` is the index of its parallel mixer among the recurrent layers.
    """

    mixer: MixerConfig
    feed: Feed
    pool: int
    place: int
    parallel_place: int
    layer: Layer


@dataclass(frozen=True)
class Model:
    """Model on a device: config, weights and decoder layers; with TP, the shard of one rank.

    Attributes:
      frequencies: RoPE frequencies of each kind of attention layer; the kind of drafters is first.
      group: Tensor-parallel group of the model.
      adapters: LoRA adapters of this rank; none if the model has none.
    """

    config: ModelConfig
    weights: Weights
    frequencies: Mapping[SelfAttentionConfig, Float[Tensor, " half"]]
    blocks: tuple[DecoderLayer, ...]
    group: TPGroup
    adapters: Adapters

    @classmethod
    def of(
        cls, config: ModelConfig, weights: Weights, group: TPGroup, adapters: Adapters = NO_ADAPTERS
    ) -> "Model":
        """Builds the model from its config and weights."""
        model = cls.reading(config, weights, group, config.places)
        return replace(model, adapters=adapters)

    @classmethod
    def reading(
        cls, config: ModelConfig, weights: Weights, group: TPGroup, places: Sequence[LayerPlace]
    ) -> "Model":
        """Builds a model of layers that read the pools at the given places."""
        device = weights.embed.device
        blocks = tuple(
            DecoderLayer(
                mixer=each.mixer,
                feed=FEEDS[each.mlp.kind],
                pool=at.pool,
                place=at.pool_index,
                parallel_place=at.parallel_index,
                layer=layer,
            )
            for each, at, layer in zip(config.layers, places, weights.layers, strict=True)
        )
        frequencies = {each: rotary_frequencies(each, device) for each in config.attentions}
        return cls(config, weights, frequencies, blocks, group, NO_ADAPTERS)

    @property
    def vocabulary(self) -> Vocabulary:
        """Returns the vocabulary of the LM head."""
        return Vocabulary(self.config.vocab, self.group)


def forward(
    model: Model,
    tokens: Int[Tensor, " R"],
    shown: ImageEmbeds | None,
    rows: AttentionRows,
    kv: Pools,
    mixer: RecurrentMixer | None,
    kept_streams: tuple[int, ...],
    slots: Int[Tensor, " R"] | None = None,
) -> Forward:
    """Runs all layers over flat rows and writes their KV.

    Args:
      tokens: Token of each row.
      shown: Image embeddings that replace token embeddings; None for text.
      rows: Positions and visible KV of the rows.
      kv: KV pools, written in place.
      mixer: Runs the GDN layers; None for a model without them.
      kept_streams: Residual streams to return, ascending; stream i is the input of layer i.
      slots: Adapter slot of each row, 0 for none; None for a pass without adapters.
    """
    weights, parts = model.weights, None
    factor = embedding_factor(model.config, weights.embed)
    embedded = layers.embed_tokens(weights.embed, tokens, shown, factor)
    if weights.per_layer is not None:
        eps = model.config.rms_eps
        parts = per_layer.per_layer_parts(tokens, embedded, weights.per_layer, eps)
    return run_layers(model, embedded, parts, rows, kv, mixer, kept_streams, slots)


def run_layers(
    model: Model,
    embedded: Hidden,
    parts: Float[Tensor, "R L size"] | None,
    rows: AttentionRows,
    kv: Pools,
    mixer: RecurrentMixer | None,
    kept_streams: tuple[int, ...],
    slots: Int[Tensor, " R"] | None = None,
) -> Forward:
    """Runs all layers from the inputs of the first on; see `forward`.

    `parts` are the per-layer embeddings; None without them.
    """
    config, weights = model.config, model.weights
    # Layers of one configuration share a mixer, and a context with those that read their KV.
    contexts: dict[SelfAttentionConfig, AttentionContext] = {}
    for block in model.blocks:
        each = block.mixer
        if isinstance(each, SelfAttentionConfig) and each.with_kv not in contexts:
            given = (model.frequencies[each], rows, kv[block.pool], model.group)
            contexts[each.with_kv] = AttentionContext.of(each, *given)
    mixers: dict[object, Callable[..., Tensor]] = {
        each: partial(attention, config, each, contexts[each.with_kv]) for each in config.attentions
    }
    if mixer is not None:
        mixers[config.recurrent] = mixer
    norms = [*(block.layer.input_norm for block in model.blocks), None]  # none after the last
    stream, streams = linear.stream(embedded, norms[0], rows.row_starts[-1:], model.group), []
    if config.experts is not None or config.ends_with_norms:
        stream = counted(stream)
    for i, block in enumerate(model.blocks):
        layer = with_adapters(block.layer, config.places[i], model.adapters, slots)
        if i in kept_streams:
            streams.append(stream.whole)
        if isinstance(block.mixer, NoMixer):
            stream = block.feed(config, layer, stream, norms[i + 1])
        else:
            inputs = linear.rmsnorm_linear(stream, config.input_norm_eps, layer.mixer.inputs)
            if (own := layer.parallel) is not None:
                own_inputs = linear.rmsnorm_linear(stream, config.input_norm_eps, own.inputs)
                beside = mixers[config.recurrent](block.parallel_place, own, own_inputs)
                stream = with_parallel(config, own, beside, stream)
            mixed = mixers[block.mixer](block.place, layer.mixer, inputs)
            stream = output_and_mlp(config, layer, block.feed, mixed, stream, norms[i + 1])
        part = None if parts is None else parts[:, i]
        stream = layer_end(config, layer, part, stream, norms[i + 1])
    if len(model.blocks) in kept_streams:
        streams.append(stream.whole)
    hidden = layers.rms_norm(stream.whole, weights.final_norm, config.rms_eps)
    return Forward(hidden, tuple(streams))


def embedding_factor(config: ModelConfig, embed: Float[Tensor, "vocab hidden"]) -> float:
    """Returns the multiplier of embeddings, rounded to their dtype if the model requires it."""
    factor = config.embedding_factor
    return layers.rounded(factor, embed) if config.rounds_embedding_factor else factor


def lm_head_input(model: Model, hidden: Hidden) -> Projection:
    """Returns the LM-head projection of this rank's vocabulary shard.

    Shards are padded to equal size; see `ops.sampling.vocab_parallel`.
    """
    config = model.config
    return Projection(hidden, model.weights.lm_head, config.logits_factor, config.logits_softcap)


def logits(model: Model, hidden: Hidden) -> Float[Tensor, "R share"]:
    """Returns the logits of this rank's vocabulary shard, float32."""
    return lm_head.scores(lm_head_input(model, hidden))
