"""The forward pass of Llama, Qwen3, Qwen3.5 and their kin on flat rows; as `shared.spec.model`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jaxtyping import Float, Int

from jax_impl.layers import FEEDS, DeltaMixer, Feed, Hidden, Sight, attention, finished
from jax_impl.model_weights import Layer, Weights
from jax_impl.ops import Norm, Place
from jax_impl.ops.attention.attention import KV, Rows
from jax_impl.ops.gemm import layers, linear
from jax_impl.ops.gemm.layers import Shown
from jax_impl.ops.gemm.linear import Stream
from jax_impl.ops.moe.experts import counted
from jax_impl.ops.sampling import lm_head
from jax_impl.ops.sampling.lm_head import Projection
from jax_impl.ops.sampling.vocab_parallel import Vocabulary
from shared.boundary.tp_group import Ranks
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
    """A decoder layer of a model; `place` counts the layers whose mixer is of its kind."""

    mixer: AttentionConfig | GatedDeltaConfig
    feed: Feed
    place: int
    layer: Layer


class Model(NamedTuple):
    """A model on a device: its settings, its weights and its blocks, of one rank a share.

    Attributes:
      group: The ranks that have the model between them.
    """

    config: ModelConfig
    weights: Weights
    blocks: tuple[Block, ...]
    group: Ranks

    @classmethod
    def of(cls, config: ModelConfig, weights: Weights, group: Ranks) -> "Model":
        """Binds weights to their settings."""
        kinds = config.layer_kinds
        blocks = tuple(
            Block(each.mixer, FEEDS[each.feed.kind], kinds[:i].count(kinds[i]), layer)
            for i, (each, layer) in enumerate(zip(config.layers, weights.layers, strict=True))
        )
        return cls(config, weights, blocks, group)

    @property
    def vocabulary(self) -> Vocabulary:
        """The tokens of its head."""
        return Vocabulary(self.config.vocab, self.group)


def forward(
    model: Model,
    tokens: Int[jax.Array, " R"],
    shown: Shown | None,
    rows: Rows,
    kv: KV,
    mixer: DeltaMixer | None,
    kept_streams: tuple[int, ...],
) -> Forward:
    """Runs all layers over flat rows and writes their KV.

    Args:
      tokens: The token of each row.
      shown: What stands in the place of some tokens'; None of text.
      rows: Where the rows stand and what they see.
      kv: The pools of the attention layers.
      mixer: Runs the gated-delta layers; None for a model without them.
      kept_streams: Residual streams to keep, ascending: number i is what enters layer i.
    """
    config, eps = model.config, model.config.rms_eps
    sights = {each: Sight.of(each, rows, kv, model.group) for each in config.attentions}
    # Layers that are alike share a mixer; those of one kind hand on what it carries.
    mixers: dict[object, Callable[..., tuple[jax.Array, Any]]] = {
        each: partial(attention, config, sight) for each, sight in sights.items()
    }
    carries: dict[str, Any] = {"attention": sights[config.attention].kv}
    if mixer is not None:
        mixers[config.gated_delta], carries["gated_delta"] = mixer, mixer.carry

    # Traced and lowered once for all blocks of a kind, which differ in their arrays alone.
    @partial(jax.jit, static_argnums=(0, 1))
    def run_block(
        like: AttentionConfig | GatedDeltaConfig,
        feed: Feed,
        layer: Layer,
        stream: Stream,
        carry: Any,
        place: Place,
        norm: Norm | None,
    ) -> tuple[Stream, Any]:
        inputs = linear.normed_product(stream, config.input_eps, layer.mixer.inputs)
        mixed, carry = mixers[like](place, layer.mixer, inputs, carry)
        return finished(config, layer, feed, mixed, stream, norm), carry

    embedded = layers.embedded(model.weights.embed, tokens, shown, config.embedding_factor)
    norms = [block.layer.input_norm for block in model.blocks]
    # What leaves the last layer no product reads; with some norm all layers are one trace.
    norms.append(norms[-1])
    stream = linear.stream(embedded, norms[0], rows.row_starts[-1:], model.group)
    if config.experts is not None:
        stream = counted(stream)
    streams = []
    for i, (block, norm) in enumerate(zip(model.blocks, norms[1:], strict=True)):
        kind = block.mixer.kind
        if i in kept_streams:
            streams.append(stream.whole)
        given = (block.layer, stream, carries[kind], block.place, norm)
        stream, carries[kind] = run_block(block.mixer, block.feed, *given)
    if len(model.blocks) in kept_streams:
        streams.append(stream.whole)
    if mixer is not None:
        mixer.carry = carries["gated_delta"]
    hidden = layers.rms_norm(stream.whole, model.weights.final_norm, eps)
    return Forward(hidden, tuple(streams), carries["attention"].pools)


def projected(model: Model, hidden: Hidden) -> Projection:
    """What scores the next token: of the tokens that this rank scores.

    They are filled up to as many as each of the others has; see `ops.vocabulary`.
    """
    return Projection(hidden, model.weights.lm_head, model.config.logits_factor)


def logits(model: Model, hidden: Hidden) -> Float[jax.Array, "R share"]:
    """Those scores, float32."""
    return lm_head.scores(projected(model, hidden))
