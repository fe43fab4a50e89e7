"""NEXTN (MTP), EAGLE and EAGLE-3 heads; same as `shared.spec.eagle`.

The heads differ in the hidden states of the target that they read, in how these and the embedding
enter the first layer, and in the LM head. `torch_impl.drafters.eagle` drafts with them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.boundary.tp_group import TPGroup
from shared.models.config import ModelConfig
from shared.models.layers import LayerConfig
from shared.models.mixers import SelfAttentionConfig
from shared.models.mtp import MTP_FC
from torch_impl.adapters import with_adapters, with_row_adapters
from torch_impl.layers import (
    FEEDS,
    AttentionContext,
    Hidden,
    attention,
    output_and_mlp,
    rotary_frequencies,
)
from torch_impl.model import Forward, Model, lm_head_input
from torch_impl.model_weights import BlockWeights, HeadWeights, Layer
from torch_impl.ops.attention.attention import KV, AttentionRows
from torch_impl.ops.collectives import all_gather
from torch_impl.ops.gemm import linear
from torch_impl.ops.gemm.layers import ImageEmbeds, embed_tokens, rms_norm
from torch_impl.ops.gemm.linear import NormedStream, product, rmsnorm_linear
from torch_impl.ops.sampling import lm_head
from torch_impl.ops.sampling.lm_head import Projection
from torch_impl.ops.sampling.vocab_parallel import Vocabulary, over_tokens, whole

Tokens = Int[Tensor, " R"]
Logits = Float[Tensor, "R vocab"]
Run = Callable[[AttentionRows, Tokens, ImageEmbeds | None, Hidden, KV], Hidden]


@dataclass(frozen=True)
class Head:
    """Draft head with its weights and its target.

    Attributes:
      config: Config of its decoder layers, which also determines the sizes of draft KV and relay.
      num_layers: Number of decoder layers.
      streams: Residual streams of the target that `read` requires, ascending.
      read: Computes the head's input hidden states from a forward pass of the target.
      forward: Runs the head over rows, given their next tokens, image embeddings and hidden states.
        Writes the head's KV and returns the hidden states for the next draft level.
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
    columns: Int[Tensor, " draft_vocab"] | None = None
    bind: Callable[[Int[Tensor, " B"]], Run] | None = None

    def adapted(self, slots: Int[Tensor, " B"] | None) -> "Head":
        """Returns the head with the adapter slot of each request, if it has adapters."""
        if slots is None or self.bind is None:
            return self
        return replace(self, forward=self.bind(slots))

    def logits(self, hidden: Hidden) -> Logits:
        """Returns the logits over the target's vocabulary."""
        whole_rows = whole(lm_head.scores(self.projected(hidden)), self.vocabulary)
        return over_tokens(whole_rows, self.columns, self.config.vocab)


def mtp(model: Model) -> Head:
    """Builds the MTP layer of a checkpoint; embedding and LM head are the target's."""
    config, weights, eps, group = model.config, model.weights.mtp, model.config.rms_eps, model.group
    assert weights is not None  # loaded with the checkpoint
    like = (config.draft_layer,)
    frequencies = model.frequencies[config.attentions[0]]

    def forward(
        adapters: Int[Tensor, " B"] | None,
        rows: AttentionRows,
        tokens: Tokens,
        shown: ImageEmbeds | None,
        hidden: Hidden,
        kv: KV,
    ) -> Hidden:
        slots = None if adapters is None else adapters[rows.request]
        layer = with_adapters(weights.layer, config.draft_place, model.adapters, slots)
        fc = with_row_adapters(weights.fc, MTP_FC, 0, model.adapters, slots)
        embedded = rms_norm(
            embed_tokens(model.weights.embed, tokens, shown), weights.embedding_norm, eps
        )
        normed = rms_norm(hidden, weights.hidden_norm, eps)
        joined = all_gather.all_gather(group, product(torch.cat([embedded, normed], dim=1), fc))
        stream = linear.stream(joined, layer.input_norm, None, group)
        qkv = rmsnorm_linear(stream, eps, layer.mixer.inputs)
        x = _through(config, like, (layer,), frequencies, qkv, stream, rows, kv)
        return rms_norm(x, weights.final_norm, eps)

    def bind(slots: Int[Tensor, " B"]) -> Run:
        return partial(forward, slots)

    run = partial(forward, None)
    return Head(config, 1, (), _final_hidden, run, *_head(model), bind)


def eagle(model: Model, weights: HeadWeights) -> Head:
    config, embed, group = weights.config.layer, embedding(model, weights), model.group
    frequencies = rotary_frequencies(config.attention, embed.device)

    def forward(
        rows: AttentionRows, tokens: Tokens, shown: ImageEmbeds | None, hidden: Hidden, kv: KV
    ) -> Hidden:
        x = product(torch.cat([embed_tokens(embed, tokens, shown), hidden], dim=1), weights.fc)
        x = all_gather.all_gather(group, x)
        if weights.fc_bias is not None:
            x = x + weights.fc_bias
        qkv = product(x, weights.layers[0].mixer.inputs)
        stream = NormedStream(x, group=group)
        return _through(config, config.layers, weights.layers, frequencies, qkv, stream, rows, kv)

    return Head(config, config.num_layers, (), _final_hidden, forward, *_head(model))


def eagle3(model: Model, weights: HeadWeights) -> Head:
    config, embed, group = weights.config.layer, embedding(model, weights), model.group
    frequencies, eps = rotary_frequencies(config.attention, embed.device), config.rms_eps
    norm_output, norm_residual = weights.config.norm_output, weights.config.norm_residual
    first, hidden_norm, final_norm = weights.layers[0], weights.hidden_norm, weights.final_norm
    assert first.input_norm is not None  # an EAGLE-3 head has all three
    assert hidden_norm is not None
    assert final_norm is not None

    def forward(
        rows: AttentionRows, tokens: Tokens, shown: ImageEmbeds | None, hidden: Hidden, kv: KV
    ) -> Hidden:
        embedded = rms_norm(embed_tokens(embed, tokens, shown), first.input_norm, eps)
        normed = rms_norm(hidden, hidden_norm, eps)
        qkv = product(torch.cat([embedded, normed], dim=1), first.mixer.inputs)
        stream = NormedStream(normed if norm_residual else hidden, group=group)
        x = _through(config, config.layers, weights.layers, frequencies, qkv, stream, rows, kv)
        return rms_norm(x, final_norm, eps) if norm_output else x

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
) -> tuple[Callable[[Hidden], Projection], Vocabulary, Int[Tensor, " draft_vocab"] | None]:
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
    joined = torch.cat(aux, dim=1)
    if weights.input_norm is not None:
        joined = rms_norm(joined, weights.input_norm, eps)
    projected = all_gather.all_gather(group, product(joined, weights.fc))
    return projected if weights.fc_bias is None else projected + weights.fc_bias


def embedding(model: Model, weights: HeadWeights | BlockWeights) -> Float[Tensor, "vocab hidden"]:
    """Returns the embedding table of the head, or of its target if the head has none."""
    return model.weights.embed if weights.embed is None else weights.embed


def _through(
    config: ModelConfig,
    like: Sequence[LayerConfig],
    layers: Sequence[Layer],
    frequencies: Float[Tensor, " half"],
    qkv: Float[Tensor, "R outputs"],
    stream: NormedStream,
    rows: AttentionRows,
    kv: KV,
) -> Hidden:
    """Runs the head's layers after the QKV projection of the first.

    Args:
      like: Configs of the layers, all with attention and the same RoPE.
    """
    contexts: dict[object, AttentionContext] = {
        each.mixer: AttentionContext.of(each.mixer, frequencies, rows, kv, stream.group)
        for each in like
        if isinstance(each.mixer, SelfAttentionConfig)
    }
    norms = [*(layer.input_norm for layer in layers[1:]), None]
    for place, (each, layer, norm) in enumerate(zip(like, layers, norms, strict=True)):
        if place:
            qkv = rmsnorm_linear(stream, config.rms_eps, layer.mixer.inputs)
        mixer, context = each.mixer, contexts[each.mixer]
        assert isinstance(mixer, SelfAttentionConfig)  # a head has attention layers only
        mixed = attention(config, mixer, context, place, layer.mixer, qkv)
        stream = output_and_mlp(config, layer, FEEDS[each.mlp.kind], mixed, stream, norm)
    return stream.whole
