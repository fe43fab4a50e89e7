"""NEXTN (MTP), EAGLE and EAGLE-3 heads; same as `shared.spec.eagle`.

The heads differ in the hidden states of the target that they read, in how these and the embedding
enter the first layer, and in the LM head. `jax_impl.drafters.eagle` drafts with them.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.adapters import with_adapters, with_row_adapters
from jax_impl.layers import FEEDS, AttentionContext, Hidden, attention, output_and_mlp
from jax_impl.model import Forward, Model, lm_head_input
from jax_impl.model_weights import BlockWeights, HeadWeights, Layer
from jax_impl.ops import alone
from jax_impl.ops.attention.attention import KV, AttentionRows
from jax_impl.ops.collectives import all_gather
from jax_impl.ops.gemm import linear
from jax_impl.ops.gemm.layers import ImageEmbeds, embed_tokens, rms_norm
from jax_impl.ops.gemm.linear import NormedStream, product, rmsnorm_linear
from jax_impl.ops.gemm.lora import PassAdapters
from jax_impl.ops.sampling import lm_head
from jax_impl.ops.sampling.lm_head import Projection
from jax_impl.ops.sampling.vocab_parallel import Vocabulary, over_tokens, whole
from shared.boundary.tp_group import TPGroup
from shared.models.config import ModelConfig
from shared.models.layers import LayerConfig
from shared.models.mixers import SelfAttentionConfig
from shared.models.mtp import MTP_FC

Inputs = Float[jax.Array, "R inputs"]
Tokens = Int[jax.Array, " R"]
Logits = Float[jax.Array, "R vocab"]
Run = Callable[[AttentionRows, Tokens, ImageEmbeds | None, Hidden, KV], tuple[Hidden, KV]]


class Head(NamedTuple):
    """Draft head with its weights and its target.

    Attributes:
      config: Config of its decoder layers, which also determines the sizes of draft KV and relay.
      num_layers: Number of decoder layers.
      streams: Residual streams of the target that `read` requires, ascending.
      read: Computes the head's input hidden states from a forward pass of the target.
      forward: Runs the head over rows, given their next tokens, image embeddings and hidden states.
        Returns the hidden states for the next draft level, and the head's KV.
      projected: Returns the LM-head projection of this rank's shard from the output of `forward`.
      vocabulary: Vocabulary of the head.
      columns: Target token of each logit; None if the vocabularies are equal.
      bind: Returns `forward` with the adapter slot of each request; None for a head without
        adapters.
    """

    config: ModelConfig
    num_layers: int
    streams: tuple[int, ...]
    read: Callable[[Forward], Hidden]
    forward: Run
    projected: Callable[[Hidden], Projection]
    vocabulary: Vocabulary
    columns: Int[jax.Array, " draft_vocab"] | None = None
    bind: Callable[[Int[jax.Array, " B"]], Run] | None = None

    def adapted(self, slots: Int[jax.Array, " B"] | None) -> "Head":
        """Returns the head with the adapter slot of each request, if it has adapters."""
        if slots is None or self.bind is None:
            return self
        return self._replace(forward=self.bind(slots))

    def logits(self, hidden: Hidden) -> Logits:
        """Returns the logits over the target's vocabulary."""
        whole_rows = whole(lm_head.scores(self.projected(hidden)), self.vocabulary)
        return over_tokens(whole_rows, self.columns, self.config.vocab)


def mtp(model: Model) -> Head:
    """Builds the MTP layer of a checkpoint; embedding and LM head are the target's."""
    config, weights, eps, group = model.config, model.weights.mtp, model.config.rms_eps, model.group
    assert weights is not None  # loaded with the checkpoint
    like = (config.draft_layer,)

    def forward(
        adapters: Int[jax.Array, " B"] | None,
        rows: AttentionRows,
        tokens: Tokens,
        shown: ImageEmbeds | None,
        hidden: Hidden,
        kv: KV,
    ) -> tuple[Hidden, KV]:
        slots = None if adapters is None else adapters[rows.request]
        adapted = PassAdapters.of(slots, model.adapters, hidden)
        layer = with_adapters(weights.layer, config.draft_place, model.adapters, adapted)
        fc = with_row_adapters(weights.fc, MTP_FC, 0, model.adapters, adapted)
        embedded = rms_norm(
            embed_tokens(model.weights.embed, tokens, shown), weights.embedding_norm, eps
        )
        normed = rms_norm(hidden, weights.hidden_norm, eps)
        joined = product(jnp.concatenate([embedded, normed], axis=1), fc)
        joined = all_gather.all_gather(group, joined)
        stream = linear.stream(joined, layer.input_norm, None, group)
        qkv = rmsnorm_linear(stream, eps, layer.mixer.inputs)
        x, kv = _through(config, like, (layer,), qkv, stream, rows, kv)
        return rms_norm(x, weights.final_norm, eps), kv

    def bind(slots: Int[jax.Array, " B"]) -> Run:
        return partial(forward, slots)

    run = partial(forward, None)
    return Head(config, 1, (), _final_hidden, run, *_head(model), bind)


def eagle(model: Model, weights: HeadWeights) -> Head:
    """Builds an EAGLE-1 or EAGLE-2 head: no input norm in its first layer and no final norm.

    The `lm_head` is the target's.
    """
    config, embed, group = weights.config.layer, embedding(model, weights), model.group

    def forward(
        rows: AttentionRows, tokens: Tokens, shown: ImageEmbeds | None, hidden: Hidden, kv: KV
    ) -> tuple[Hidden, KV]:
        x = _fc(
            group, weights, jnp.concatenate([embed_tokens(embed, tokens, shown), hidden], axis=1)
        )
        qkv = product(x, weights.layers[0].mixer.inputs)
        stream = NormedStream(x, group=group)
        return _through(config, config.layers, weights.layers, qkv, stream, rows, kv)

    return Head(config, config.num_layers, (), _final_hidden, forward, *_head(model))


def eagle3(model: Model, weights: HeadWeights) -> Head:
    """Builds an EAGLE-3 head: its first layer reads embedding and hidden state, concatenated."""
    config, embed, group = weights.config.layer, embedding(model, weights), model.group
    eps, norm_output = config.rms_eps, weights.config.norm_output
    norm_residual, first = weights.config.norm_residual, weights.layers[0]
    hidden_norm, final_norm = weights.hidden_norm, weights.final_norm
    input_norm = first.input_norm
    assert input_norm is not None  # an EAGLE-3 head has all three
    assert hidden_norm is not None
    assert final_norm is not None

    def forward(
        rows: AttentionRows, tokens: Tokens, shown: ImageEmbeds | None, hidden: Hidden, kv: KV
    ) -> tuple[Hidden, KV]:
        embedded = rms_norm(embed_tokens(embed, tokens, shown), alone(input_norm), eps)
        normed = rms_norm(hidden, hidden_norm, eps)
        qkv = product(jnp.concatenate([embedded, normed], axis=1), first.mixer.inputs)
        stream = NormedStream(normed if norm_residual else hidden, group=group)
        x, kv = _through(config, config.layers, weights.layers, qkv, stream, rows, kv)
        return rms_norm(x, final_norm, eps) if norm_output else x, kv

    head, vocabulary, columns = _head(model)
    if weights.lm_head is not None:
        head = partial(Projection, weight=weights.lm_head)
        vocabulary = Vocabulary(weights.config.draft_vocab, group)
        columns = weights.draft_ids

    def own_head(hidden: Hidden) -> Projection:
        return head(hidden if norm_output else rms_norm(hidden, final_norm, eps))

    run = (weights.config.aux_streams, partial(_project, group, weights), forward, own_head)
    return Head(config, config.num_layers, *run, vocabulary, columns)


HEADS = {"EAGLE": eagle, "EAGLE3": eagle3}
"""Heads with a checkpoint of their own, by the kind that `DraftConfig` names."""


def _head(
    model: Model,
) -> tuple[Callable[[Hidden], Projection], Vocabulary, Int[jax.Array, " draft_vocab"] | None]:
    """Returns the target's LM head, or its rows of the draft vocabulary."""
    if (rows := model.weights.draft_rows) is None:
        return partial(lm_head_input, model), model.vocabulary, None
    factor, softcap = model.config.logits_factor, model.config.logits_softcap
    head = partial(Projection, weight=rows.lm_head, factor=factor, softcap=softcap)
    return head, Vocabulary(len(rows.ids), model.group), rows.ids


def _final_hidden(passed: Forward) -> Hidden:
    return passed.hidden


def _project(group: TPGroup, weights: HeadWeights, passed: Forward) -> Hidden:
    """Same as `shared.spec.eagle.eagle3_project`."""
    aux, eps = list(passed.streams), weights.config.layer.rms_eps
    if weights.aux_norm is not None:
        pairs = zip(aux, weights.aux_norm, strict=True)
        aux = [rms_norm(stream, norm, eps) for stream, norm in pairs]
    joined = jnp.concatenate(aux, axis=1)
    if weights.input_norm is not None:
        joined = rms_norm(joined, weights.input_norm, eps)
    return _fc(group, weights, joined)


def _fc(group: TPGroup, weights: HeadWeights, x: Inputs) -> Hidden:
    x = all_gather.all_gather(group, product(x, weights.fc))
    return x if weights.fc_bias is None else x + weights.fc_bias


def embedding(
    model: Model, weights: HeadWeights | BlockWeights
) -> Float[jax.Array, "vocab hidden"]:
    """Returns the embedding table of the head, or of its target if the head has none."""
    return model.weights.embed if weights.embed is None else weights.embed


def _through(
    config: ModelConfig,
    like: Sequence[LayerConfig],
    layers: Sequence[Layer],
    qkv: Float[jax.Array, "R outputs"],
    stream: NormedStream,
    rows: AttentionRows,
    kv: KV,
) -> tuple[Hidden, KV]:
    """Runs the head's layers after the QKV projection of the first; RoPE is the head's own.

    Args:
      like: Configs of the layers, all with attention.
    """
    contexts: dict[object, AttentionContext] = {
        each.mixer: AttentionContext.of(each.mixer, rows, kv, stream.group)
        for each in like
        if isinstance(each.mixer, SelfAttentionConfig)
    }
    paged = contexts[like[0].mixer].kv
    norms = [*(layer.input_norm for layer in layers[1:]), None]
    for place, (each, layer, norm) in enumerate(zip(like, layers, norms, strict=True)):
        if place:
            qkv = rmsnorm_linear(stream, config.rms_eps, layer.mixer.inputs)
        mixer, context = each.mixer, contexts[each.mixer]
        assert isinstance(mixer, SelfAttentionConfig)  # a head has attention layers only
        mixed, paged = attention(config, mixer, context, place, layer.mixer, qkv, paged)
        stream = output_and_mlp(config, layer, FEEDS[each.mlp.kind], mixed, stream, norm)
    return stream.whole, paged.pools
