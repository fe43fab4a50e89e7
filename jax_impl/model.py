"""Forward pass of decoder-only models (Llama, Qwen3, Qwen3.5, ...) on flat rows.

Same results as `shared.spec.model`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Float, Int

from jax_impl.adapters import NO_ADAPTERS, Adapters, with_adapters
from jax_impl.layers import (
    FEEDS,
    AttentionContext,
    Feed,
    Hidden,
    RecurrentMixer,
    attention,
    layer_end,
    output_and_mlp,
    with_parallel,
)
from jax_impl.model_weights import Layer, Weights
from jax_impl.ops import Norm, Place
from jax_impl.ops.attention.attention import AttentionRows, Pools
from jax_impl.ops.attention.attention_layer import PagedKV
from jax_impl.ops.gemm import layers, linear, per_layer
from jax_impl.ops.gemm.layers import ImageEmbeds
from jax_impl.ops.gemm.linear import NormedStream
from jax_impl.ops.gemm.lora import PassAdapters
from jax_impl.ops.moe.experts import counted
from jax_impl.ops.sampling import lm_head
from jax_impl.ops.sampling.lm_head import Projection
from jax_impl.ops.sampling.vocab_parallel import Vocabulary
from shared.boundary.tp_group import TPGroup
from shared.models.config import ModelConfig
from shared.models.groups import LayerPlace
from shared.models.mixers import MixerConfig, NoMixer, SelfAttentionConfig


class Forward(NamedTuple):
    """Result of a forward pass.

    Attributes:
      hidden: Hidden states after the final norm.
      streams: Requested residual streams.
      kv: KV pools that include the keys and values of the rows.
    """

    hidden: Hidden
    streams: tuple[Hidden, ...]
    kv: Pools

    def at(self, rows: Int[jax.Array, " some"]) -> "Forward":
        """Returns the result for some rows."""
        return Forward(self.hidden[rows], tuple(x[rows] for x in self.streams), self.kv)


class DecoderLayer(NamedTuple):
    """Decoder layer; `pool` and `place` are the cache pool that it reads, and its index in it.

    `parallel_place` is the index of its parallel mixer among the recurrent layers.
    """

    mixer: MixerConfig
    feed: Feed
    pool: int
    place: int
    parallel_place: int
    layer: Layer


class Model(NamedTuple):
    """Model on a device: config, weights and decoder layers; with TP, the shard of one rank.

    Attributes:
      group: Tensor-parallel group of the model.
      adapters: LoRA adapters of this rank; none if the model has none.
    """

    config: ModelConfig
    weights: Weights
    blocks: tuple[DecoderLayer, ...]
    group: TPGroup
    adapters: Adapters

    @classmethod
    def of(
        cls, config: ModelConfig, weights: Weights, group: TPGroup, adapters: Adapters = NO_ADAPTERS
    ) -> "Model":
        """Builds the model from its config and weights."""
        model = cls.reading(config, weights, group, config.places)
        return model._replace(adapters=adapters)

    @classmethod
    def reading(
        cls, config: ModelConfig, weights: Weights, group: TPGroup, places: Sequence[LayerPlace]
    ) -> "Model":
        """Builds a model of layers that read the pools at the given places."""
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
        return cls(config, weights, blocks, group, NO_ADAPTERS)

    @property
    def vocabulary(self) -> Vocabulary:
        """Returns the vocabulary of the LM head."""
        return Vocabulary(self.config.vocab, self.group)


def forward(
    model: Model,
    tokens: Int[jax.Array, " R"],
    shown: ImageEmbeds | None,
    rows: AttentionRows,
    kv: Pools,
    mixer: RecurrentMixer | None,
    kept_streams: tuple[int, ...],
    slots: Int[jax.Array, " R"] | None = None,
) -> Forward:
    """Runs all layers over flat rows and writes their KV.

    Args:
      tokens: Token of each row.
      shown: Image embeddings that replace token embeddings; None for text.
      rows: Positions and visible KV of the rows.
      kv: KV pools.
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
    parts: Float[jax.Array, "R L size"] | None,
    rows: AttentionRows,
    kv: Pools,
    mixer: RecurrentMixer | None,
    kept_streams: tuple[int, ...],
    slots: Int[jax.Array, " R"] | None = None,
) -> Forward:
    """Runs all layers from the inputs of the first on; see `forward`.

    `parts` are the per-layer embeddings; None without them.
    """
    config = model.config
    # Layers of one configuration share a mixer, and a context with those that read their KV; layers
    # of one pool pass its carry on.
    contexts: dict[SelfAttentionConfig, AttentionContext] = {}
    carries: dict[tuple[str, int], Any] = {}
    for block in model.blocks:
        each = block.mixer
        if isinstance(each, SelfAttentionConfig) and each.with_kv not in contexts:
            context = AttentionContext.of(each, rows, kv[block.pool], model.group)
            contexts[each.with_kv] = context
            carries.setdefault((each.kind, block.pool), context.kv)
    mixers: dict[object, Callable[..., tuple[jax.Array, Any]]] = {
        each: partial(attention, config, each, contexts[each.with_kv]) for each in config.attentions
    }
    states = "" if config.recurrent is None else config.recurrent.kind, 0  # one pool
    if mixer is not None:
        mixers[config.recurrent], carries[states] = mixer, mixer.carry

    # Traced and lowered once for all layers of a kind, which differ only in their arrays.
    @partial(jax.jit, static_argnums=(0, 1))
    def run_block(
        like: MixerConfig,
        feed: Feed,
        layer: Layer,
        stream: NormedStream,
        carry: Any,
        beside_carry: Any,
        place: Place,
        parallel_place: Place,
        part: Float[jax.Array, "R size"] | None,
        norm: Norm | None,
    ) -> tuple[NormedStream, Any, Any]:
        if isinstance(like, NoMixer):
            stream = feed(config, layer, stream, norm)
            return layer_end(config, layer, part, stream, norm), carry, beside_carry
        inputs = linear.rmsnorm_linear(stream, config.input_norm_eps, layer.mixer.inputs)
        if (own := layer.parallel) is not None:
            own_inputs = linear.rmsnorm_linear(stream, config.input_norm_eps, own.inputs)
            beside, beside_carry = mixers[config.recurrent](
                parallel_place, own, own_inputs, beside_carry
            )
            stream = with_parallel(config, own, beside, stream)
        mixed, carry = mixers[like](place, layer.mixer, inputs, carry)
        stream = output_and_mlp(config, layer, feed, mixed, stream, norm)
        return layer_end(config, layer, part, stream, norm), carry, beside_carry

    norms = [block.layer.input_norm for block in model.blocks]
    # No GEMM reads the normed output of the last layer; any norm gives all layers one trace.
    norms.append(norms[-1])
    stream = linear.stream(embedded, norms[0], rows.row_starts[-1:], model.group)
    if config.experts is not None:
        stream = counted(stream)
    streams, adapted = [], PassAdapters.of(slots, model.adapters, embedded)
    for i, (block, norm) in enumerate(zip(model.blocks, norms[1:], strict=True)):
        pool = block.mixer.kind, block.pool
        if i in kept_streams:
            streams.append(stream.whole)
        part = None if parts is None else parts[:, i]
        beside_carry = None if block.layer.parallel is None else carries[states]
        carry = (carries.get(pool), beside_carry, block.place, block.parallel_place)
        layer = with_adapters(block.layer, config.places[i], model.adapters, adapted)
        given = (layer, stream, *carry, part, norm)
        stream, carries[pool], beside_carry = run_block(block.mixer, block.feed, *given)
        if block.layer.parallel is not None:
            carries[states] = beside_carry
    if len(model.blocks) in kept_streams:
        streams.append(stream.whole)
    if mixer is not None:
        mixer.carry = carries[states]
    hidden = layers.rms_norm(stream.whole, model.weights.final_norm, config.rms_eps)
    pools = list(kv)
    for (_, pool), carry in carries.items():
        if isinstance(carry, PagedKV):
            pools[pool] = carry.pools
    return Forward(hidden, tuple(streams), tuple(pools))


def embedding_factor(config: ModelConfig, embed: Float[jax.Array, "vocab hidden"]) -> float:
    """Returns the multiplier of embeddings, rounded to their dtype if the model requires it."""
    factor = config.embedding_factor
    return layers.rounded(factor, embed) if config.rounds_embedding_factor else factor


def lm_head_input(model: Model, hidden: Hidden) -> Projection:
    """Returns the LM-head projection of this rank's vocabulary shard.

    Shards are padded to equal size; see `ops.sampling.vocab_parallel`.
    """
    config = model.config
    return Projection(hidden, model.weights.lm_head, config.logits_factor, config.logits_softcap)


def logits(model: Model, hidden: Hidden) -> Float[jax.Array, "R share"]:
    """Returns the logits of this rank's vocabulary shard, float32."""
    return lm_head.scores(lm_head_input(model, hidden))
