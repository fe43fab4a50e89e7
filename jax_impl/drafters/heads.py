"""The heads of the EAGLE kind: NEXTN (MTP), EAGLE and EAGLE-3; as `shared.spec.eagle`.

They differ in what they read of the target, in how a row's embedding and hidden state enter their
one layer, and in whose matrix gives their logits. How they draft is in `jax_impl.drafters.eagle`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl import layers, model
from jax_impl.layers import KV, Hidden
from jax_impl.model import Forward
from jax_impl.ops.attention import Rows
from jax_impl.ops.layers import rms_norm
from jax_impl.ops.linear import linear, linear_float32
from jax_impl.weights import DraftModel, Layers, Model
from shared.drafts.config import DraftConfig
from shared.models.config import ModelConfig

Inputs = Float[jax.Array, "R inputs"]
Tokens = Int[jax.Array, " R"]
Logits = Float[jax.Array, "R vocab"]


class Head(NamedTuple):
    """A head bound to its weights.

    Attributes:
      read: From a pass of the target, the hidden states of its rows as the head reads them.
      forward: From rows, each row's next token and hidden state, and the head's KV: the hidden
        state that the next draft step reads, and the KV.
      logits: Scores over the target's vocabulary, from that hidden state.
    """

    read: Callable[[Forward], Hidden]
    forward: Callable[[Rows, Tokens, Hidden, KV], tuple[Hidden, KV]]
    logits: Callable[[Hidden], Logits]


def mtp(config: ModelConfig, weights: Model) -> Head:
    """The MTP layer of a Qwen3.5 checkpoint; it shares embedding and head with the model."""
    own, eps = weights.mtp, config.rms_eps

    def forward(rows: Rows, tokens: Tokens, hidden: Hidden, kv: KV) -> tuple[Hidden, KV]:
        embedded = rms_norm(weights.embed[...][tokens], own.embedding_norm[...], eps)
        normed = rms_norm(hidden, own.hidden_norm[...], eps)
        x = linear(jnp.concatenate([embedded, normed], axis=1), own.fc[...])
        y = rms_norm(x, own.layers.input_norm[0], eps)
        x, kv = _decoder_layer(config, own.layers, x, y, rows, kv)
        return rms_norm(x, own.final_norm[...], eps), kv

    return Head(_final_hidden, forward, lambda hidden: model.logits(weights, hidden))


def eagle(config: DraftConfig, weights: DraftModel, target: Model) -> Head:
    """An EAGLE-1 or EAGLE-2 head: one layer without an input norm, no final norm.

    It shares embedding and head with the target.
    """

    def forward(rows: Rows, tokens: Tokens, hidden: Hidden, kv: KV) -> tuple[Hidden, KV]:
        x = _fc(weights, jnp.concatenate([target.embed[...][tokens], hidden], axis=1))
        return _decoder_layer(config.layer, weights.layers, x, x, rows, kv)

    return Head(_final_hidden, forward, lambda hidden: model.logits(target, hidden))


def eagle3(config: DraftConfig, weights: DraftModel, target: Model) -> Head:
    """An EAGLE-3 head: one layer whose attention reads embedding and hidden state side by side."""
    eps, layer = config.layer.rms_eps, weights.layers
    embed = weights.embed if config.own_embed else target.embed

    def read(passed: Forward) -> Hidden:
        aux = [passed.streams[i] for i in config.aux_streams]
        if config.norm_aux:
            norms = zip(aux, weights.aux_norm[...], strict=True)
            aux = [rms_norm(stream, norm, eps) for stream, norm in norms]
        joined = jnp.concatenate(aux, axis=1)
        if config.norm_input:
            joined = rms_norm(joined, weights.input_norm[...], eps)
        return _fc(weights, joined)

    def forward(rows: Rows, tokens: Tokens, hidden: Hidden, kv: KV) -> tuple[Hidden, KV]:
        embedded = rms_norm(embed[...][tokens], layer.input_norm[0], eps)
        normed = rms_norm(hidden, layer.hidden_norm[0], eps)
        y = jnp.concatenate([embedded, normed], axis=1)
        x, kv = _decoder_layer(config.layer, layer, hidden, y, rows, kv)
        return rms_norm(x, weights.final_norm[...], eps) if config.norm_output else x, kv

    def logits(hidden: Hidden) -> Logits:
        if not config.norm_output:
            hidden = rms_norm(hidden, weights.final_norm[...], eps)
        if not config.own_lm_head:
            return model.logits(target, hidden)
        return _over_target(weights, linear_float32(hidden, weights.lm_head[...]), target)

    return Head(read, forward, logits)


HEADS = {"EAGLE": eagle, "EAGLE3": eagle3}
"""Heads with a checkpoint of their own, by the kind that `DraftConfig` names."""


def _final_hidden(passed: Forward) -> Hidden:
    return passed.hidden


def _fc(weights: DraftModel, x: Inputs) -> Hidden:
    x = linear(x, weights.fc[...])
    return x + weights.fc_bias[...] if hasattr(weights, "fc_bias") else x


def _decoder_layer(
    config: ModelConfig, weights: Layers, x: Hidden, y: Inputs, rows: Rows, kv: KV
) -> tuple[Hidden, KV]:
    """One layer with the residual `x`, whose attention reads `y`; angles are the head's own."""
    turn = layers.angles(config, rows.positions)
    out, kv = layers.attention_layer(config, weights.attention, 0, y, rows, turn, kv)
    x = x + out
    normed = rms_norm(x, weights.post_attention_norm[0], config.rms_eps)
    return x + layers.mlp(weights, 0, normed), kv


def _over_target(
    weights: DraftModel, scores: Float[jax.Array, "R draft_vocab"], target: Model
) -> Logits:
    """Scores over the target's vocabulary; -inf where the head has no token."""
    if not hasattr(weights, "draft_ids"):
        return scores
    nothing = jnp.full((len(scores), len(target.embed)), -jnp.inf, scores.dtype)
    return nothing.at[:, weights.draft_ids[...]].set(scores)
