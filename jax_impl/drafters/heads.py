"""The heads of the EAGLE kind: NEXTN (MTP), EAGLE and EAGLE-3; as `shared.spec.eagle`.

They differ in what they read of the target, in how a row's embedding and hidden state enter their
one layer, and in whose matrix gives their logits. How they draft is in `jax_impl.drafters.eagle`.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.layers import Hidden, Sight, attention_layer
from jax_impl.model import Forward, Model, logits
from jax_impl.ops import linear
from jax_impl.ops.attention import KV, Rows
from jax_impl.ops.layers import embedded, rms_norm
from jax_impl.ops.linear import Matrix, Stream, normed_product, product, product_float32
from jax_impl.ops.sampling import over_tokens
from jax_impl.weights import DraftModel, Layer, LoadedHead
from shared.models.config import ModelConfig

Inputs = Float[jax.Array, "R inputs"]
Tokens = Int[jax.Array, " R"]
Logits = Float[jax.Array, "R vocab"]


class Head(NamedTuple):
    """A head bound to its weights and its target.

    Attributes:
      config: Settings of its one decoder layer, which also size the draft KV and the relay.
      streams: Residual streams of the target that `read` needs, ascending.
      read: From a pass of the target, the hidden states of its rows as the head reads them.
      forward: Runs the head over rows, each with its next token and its hidden state; gives the
        hidden state that the next draft step reads, and the head's KV.
      scores: Over the head's vocabulary, from what `forward` gives.
      columns: The target's token of each score; None where they are the same.
    """

    config: ModelConfig
    streams: tuple[int, ...]
    read: Callable[[Forward], Hidden]
    forward: Callable[[Rows, Tokens, Hidden, KV], tuple[Hidden, KV]]
    scores: Callable[[Hidden], Logits]
    columns: Int[jax.Array, " draft_vocab"] | None = None

    def logits(self, hidden: Hidden) -> Logits:
        """The scores over the target's vocabulary."""
        return over_tokens(self.scores(hidden), self.columns, self.config.vocab)


def mtp(model: Model) -> Head:
    """The MTP layer of a Qwen3.5 checkpoint; it shares embedding and head with the model."""
    config, weights, eps = model.config, model.weights.mtp, model.config.rms_eps
    layer = weights.layers.layer(0, "attention", 0)

    def forward(rows: Rows, tokens: Tokens, hidden: Hidden, kv: KV) -> tuple[Hidden, KV]:
        embedding = embedded(model.weights.embed[...], tokens)
        fed = rms_norm(embedding, weights.embedding_norm[...], eps)
        normed = rms_norm(hidden, weights.hidden_norm[...], eps)
        joined = jnp.concatenate([fed, normed], axis=1)
        stream = linear.stream(product(joined, Matrix(weights.fc[...])))
        qkv = normed_product(stream, layer.input_norm, eps, layer.mixer.inputs)
        x, kv = _decoder_layer(config, layer, qkv, stream, rows, kv)
        return rms_norm(x, weights.final_norm[...], eps), kv

    return Head(config, (), _final_hidden, forward, partial(logits, model))


def eagle(model: Model, weights: LoadedHead) -> Head:
    """An EAGLE-1 or EAGLE-2 head: one layer without an input norm, no final norm.

    It shares embedding and head with the target.
    """
    config, head = weights.config.layer, weights.weights
    layer = head.layers.layer(0, "attention", 0)

    def forward(rows: Rows, tokens: Tokens, hidden: Hidden, kv: KV) -> tuple[Hidden, KV]:
        fed = embedded(model.weights.embed[...], tokens)
        x = _fc(head, jnp.concatenate([fed, hidden], axis=1))
        qkv = product(x, layer.mixer.inputs)
        return _decoder_layer(config, layer, qkv, Stream(x), rows, kv)

    return Head(config, (), _final_hidden, forward, partial(logits, model))


def eagle3(model: Model, weights: LoadedHead) -> Head:
    """An EAGLE-3 head: one layer whose attention reads embedding and hidden state side by side."""
    config, head, settings = weights.config.layer, weights.weights, weights.config
    eps, layer = config.rms_eps, head.layers.layer(0, "attention", 0)
    embed, input_norm = head.embed if settings.own_embed else model.weights.embed, layer.input_norm
    assert input_norm is not None  # an EAGLE-3 head has one

    def forward(rows: Rows, tokens: Tokens, hidden: Hidden, kv: KV) -> tuple[Hidden, KV]:
        fed = rms_norm(embedded(embed[...], tokens), input_norm, eps)
        normed = rms_norm(hidden, head.layers.hidden_norm[0], eps)
        qkv = product(jnp.concatenate([fed, normed], axis=1), layer.mixer.inputs)
        x, kv = _decoder_layer(config, layer, qkv, Stream(hidden), rows, kv)
        return rms_norm(x, head.final_norm[...], eps) if settings.norm_output else x, kv

    def scores(hidden: Hidden) -> Logits:
        if not settings.norm_output:
            hidden = rms_norm(hidden, head.final_norm[...], eps)
        if not settings.own_lm_head:
            return logits(model, hidden)
        return product_float32(hidden, Matrix(head.lm_head[...]))

    columns = head.draft_ids[...] if settings.has_draft_vocab else None
    return Head(config, settings.aux_streams, partial(_project, weights), forward, scores, columns)


HEADS = {"EAGLE": eagle, "EAGLE3": eagle3}
"""Heads with a checkpoint of their own, by the kind that `DraftConfig` names."""


def _final_hidden(passed: Forward) -> Hidden:
    return passed.hidden


def _project(weights: LoadedHead, passed: Forward) -> Hidden:
    """As `shared.spec.eagle.eagle3_project`."""
    config, head, aux = weights.config, weights.weights, list(passed.streams)
    eps = config.layer.rms_eps
    if config.norm_aux:
        pairs = zip(aux, head.aux_norm[...], strict=True)
        aux = [rms_norm(stream, norm, eps) for stream, norm in pairs]
    joined = jnp.concatenate(aux, axis=1)
    if config.norm_input:
        joined = rms_norm(joined, head.input_norm[...], eps)
    return _fc(head, joined)


def _fc(weights: DraftModel, x: Inputs) -> Hidden:
    x = product(x, Matrix(weights.fc[...]))
    return x + weights.fc_bias[...] if hasattr(weights, "fc_bias") else x


def _decoder_layer(
    config: ModelConfig,
    layer: Layer,
    qkv: Float[jax.Array, "R outputs"],
    stream: Stream,
    rows: Rows,
    kv: KV,
) -> tuple[Hidden, KV]:
    """The head's one layer, from its projection on; angles are the head's own."""
    sight = Sight.of(config.attention, rows, kv)
    stream, paged = attention_layer(config, layer, qkv, stream, sight, 0)
    return stream.rows, paged.pools
