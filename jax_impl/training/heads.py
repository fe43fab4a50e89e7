"""Training passes of the draft heads MTP, EAGLE and EAGLE-3 over whole sequences.

Row p of a head pairs the hidden state of token p with the embedding of token p + 1, and its logits
predict token p + 2, as in `shared.spec.eagle`. Step 0 reads the target's hidden states at every
row. Step u reads the head's own outputs of step u - 1, shifted by one row. Row p of step u thus
equals draft step u + 1 of serving after a request of p - u + 1 tokens. It attends to the same rows
as in serving: the true rows up to p - u, and the rows of steps 1 to u of its own chain, at
positions p - u + 1 to p.

Source: training-time test of EAGLE-3, Li et al. 2025, arXiv:2503.01840.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Float, Int, Shaped

from jax_impl.layers import angles
from jax_impl.ops.attention.attention_layer import Angles
from jax_impl.ops.gemm.layers import plain_rms_norm
from jax_impl.training import layers
from jax_impl.training.forward import Hidden, Passed, Tokens, embedded
from jax_impl.training.layers import Keys, Queries, Rows, normed
from jax_impl.training.nnx_modules import DraftModel, Layers, ModelModule, Mtp
from shared.drafts.config import DraftConfig
from shared.models.config import ModelConfig


class Head(NamedTuple):
    """A head bound to its weights.

    Attributes:
      layer: Sizes of its layer.
      layers: The stack of its one layer.
      table: The embedding that it reads.
      read: Maps the outputs of a target pass to the hidden states that the head reads.
      enter: Maps flat rows of embeddings and hidden states to the residual of the layer, float32,
        and to the input of its attention.
      leave: Maps the residual after the layer to the hidden state that the next step reads.
      scores: Maps that hidden state to float32 logits of the draft vocabulary.
      draft_ids: Target token of each draft token (`d2t`); None without a draft vocabulary.
    """

    layer: ModelConfig
    layers: Layers
    table: Float[jax.Array, "vocab hidden"]
    read: Callable[[Passed], Hidden]
    enter: Callable[[Rows, Rows], tuple[Rows, Float[jax.Array, "R inputs"]]]
    leave: Callable[[Rows], Rows]
    scores: Callable[[Rows], Float[jax.Array, "R draft_vocab"]]
    draft_ids: Int[jax.Array, " draft_vocab"] | None


def mtp(config: ModelConfig, weights: Mtp, target: ModelModule, compute_dtype: DTypeLike) -> Head:
    """Binds the MTP layer; it shares the embedding and the LM head with the target."""
    eps = config.rms_eps

    def enter(embeddings: Rows, hidden: Rows) -> tuple[Rows, Rows]:
        pairs = ((embeddings, weights.embedding_norm), (hidden, weights.hidden_norm))
        both = [normed(x, weight[...], eps, compute_dtype) for x, weight in pairs]
        x = layers.linear(jnp.concatenate(both, axis=1), weights.fc[...]).astype(jnp.float32)
        return x, normed(x, weights.layers.input_norm[0], eps, compute_dtype)

    def leave(x: Rows) -> Rows:
        return plain_rms_norm(x, weights.final_norm[...], eps)

    def scores(hidden: Rows) -> Float[jax.Array, "R vocab"]:
        return layers.linear_float32(hidden.astype(compute_dtype), target.head[...])

    table = target.embed[...]
    return Head(config, weights.layers, table, _final_hidden, enter, leave, scores, None)


def eagle(
    config: DraftConfig, weights: DraftModel, target: ModelModule, compute_dtype: DTypeLike
) -> Head:
    """Binds an EAGLE-1 or EAGLE-2 head; it shares the embedding and LM head with the target."""

    def enter(embeddings: Rows, hidden: Rows) -> tuple[Rows, Rows]:
        both = jnp.concatenate([embeddings, hidden], axis=1).astype(compute_dtype)
        x = _fc(weights, both)
        return x, x.astype(compute_dtype)

    def scores(hidden: Rows) -> Float[jax.Array, "R vocab"]:
        return layers.linear_float32(hidden.astype(compute_dtype), target.head[...])

    table = target.embed[...]
    return Head(config.layer, weights.layers, table, _final_hidden, enter, _identity, scores, None)


def eagle3(
    config: DraftConfig, weights: DraftModel, target: ModelModule, compute_dtype: DTypeLike
) -> Head:
    """Binds an EAGLE-3 head, with or without a draft vocabulary."""
    eps, stack = config.layer.rms_eps, weights.layers

    def read(passed: Passed) -> Hidden:
        aux = [passed.streams[i] for i in config.aux_streams]
        if config.norm_aux:
            norms = zip(aux, weights.aux_norm[...], strict=True)
            aux = [plain_rms_norm(stream, norm, eps) for stream, norm in norms]
        joined = jnp.concatenate(aux, axis=-1)
        if config.norm_input:
            joined = plain_rms_norm(joined, weights.input_norm[...], eps)
        return _fc(weights, joined.astype(compute_dtype))

    def enter(embeddings: Rows, hidden: Rows) -> tuple[Rows, Float[jax.Array, "R inputs"]]:
        pairs = ((embeddings, stack.input_norm[0]), (hidden, stack.hidden_norm[0]))
        both = [normed(x, weight, eps, compute_dtype) for x, weight in pairs]
        return hidden, jnp.concatenate(both, axis=1)

    def final(x: Rows) -> Rows:
        return plain_rms_norm(x, weights.final_norm[...], eps)

    def scores(hidden: Rows) -> Float[jax.Array, "R draft_vocab"]:
        out = (hidden if config.norm_output else final(hidden)).astype(compute_dtype)
        matrix = weights.lm_head if config.own_lm_head else target.head
        return layers.linear_float32(out, matrix[...])

    table = weights.embed[...] if config.own_embed else target.embed[...]
    leave = final if config.norm_output else _identity
    draft_ids = weights.draft_ids[...] if config.has_draft_vocab else None
    return Head(config.layer, stack, table, read, enter, leave, scores, draft_ids)


def unroll(
    head: Head, tokens: Tokens, hidden: Hidden, depth: int, compute_dtype: DTypeLike, remat: bool
) -> list[Hidden]:
    """Returns the hidden states of the head in steps 0 to depth - 1, before `Head.scores`.

    Row p of step u is valid if p >= u. The last row has no next token.

    Args:
      hidden: Result of `Head.read`.
      remat: Same as in `forward`, for each step.
    """
    B, T = tokens.shape
    rotary = angles(head.layer.attention, layers.flat_positions(B, T))
    embeddings = embedded(head.table, jnp.roll(tokens, -1, axis=1).reshape(-1))
    outputs, chain = [], _Chain((), ())
    for step in range(depth):

        def run(hidden: Hidden, chain: _Chain, step: int = step) -> tuple[Hidden, Keys, Keys]:
            return _step(head, embeddings, hidden, chain, step, rotary, compute_dtype)

        out, k, v = (jax.checkpoint(run) if remat else run)(hidden, chain)
        outputs.append(out)
        chain = _Chain((*chain.keys, k), (*chain.values, v))
        hidden = later(out, 1)
    return outputs


def later(x: Shaped[jax.Array, "B T *rest"], rows: int) -> Shaped[jax.Array, "B T *rest"]:
    """Shifts the values by `rows` along T; the first rows become zeros."""
    return jnp.pad(x, ((0, 0), (rows, 0), *[(0, 0)] * (x.ndim - 2)))[:, : x.shape[1]]


class _Chain(NamedTuple):
    """Keys and values of the previous steps; entry 0 has the keys and values of the true rows."""

    keys: tuple[Keys, ...]
    values: tuple[Keys, ...]


def _step(
    head: Head,
    embeddings: Rows,
    hidden: Hidden,
    chain: _Chain,
    step: int,
    rotary: Angles,
    compute_dtype: DTypeLike,
) -> tuple[Hidden, Keys, Keys]:
    """Runs the head's layer once; returns its outputs, keys and values."""
    B, T, _ = hidden.shape
    x, y = head.enter(embeddings, hidden.reshape(B * T, -1))
    config, stack = head.layer, head.layers
    q, *kv, gate = layers.project(config, stack.attention, 0, y, rotary)
    k, v = (part.reshape(B, T, *part.shape[1:]) for part in kv)
    grouped = q.reshape(B, T, *q.shape[1:])
    out = chain_attention(grouped, (*chain.keys, k), (*chain.values, v), step)
    x = x + layers.merge(stack.attention, 0, out.reshape(q.shape), gate)
    y = normed(x, stack.post_attention_norm[0], config.rms_eps, compute_dtype)
    return head.leave(x + layers.mlp(stack, 0, y)).reshape(B, T, -1), k, v


def chain_attention(
    q: Queries, keys: tuple[Keys, ...], values: tuple[Keys, ...], step: int
) -> Queries:
    """Attends row p of a step to the true rows up to p - step, and to its own chain.

    The keys and values are those of steps 0 to `step`.
    """
    if step == 0:
        return layers.causal(q, keys[0], values[0])
    T = q.shape[1]
    is_visible = jnp.arange(T)[:, None] - step >= jnp.arange(T)
    logits = [jnp.where(is_visible, layers.scores(q, keys[0]), layers.NEVER)]
    distances = range(step - 1, -1, -1)  # rows from the chain's row of step 1, 2, .. to row p
    for distance, k in zip(distances, keys[1:], strict=True):
        logits.append(_own_scores(q, later(k, distance))[..., None])
    shares = jax.nn.softmax(jnp.concatenate(logits, axis=-1), axis=-1)
    out = layers.read(shares[..., :T], values[0])
    for distance, v in zip(distances, values[1:], strict=True):
        out += _own_read(shares[..., T + step - 1 - distance], later(v, distance), q)
    return out


def _own_scores(q: Queries, k: Keys) -> Float[jax.Array, "B Hk group T"]:
    """Computes the attention logits of each row's queries with the keys of the same row."""
    B, T, _, D = q.shape
    grouped = q.reshape(B, T, k.shape[2], -1, D).astype(jnp.float32)
    logits = (grouped * k[:, :, :, None].astype(jnp.float32)).sum(axis=-1)
    return jnp.moveaxis(logits, 1, -1) * jnp.float32(D**-0.5)


def _own_read(shares: Float[jax.Array, "B Hk group T"], v: Keys, like: Queries) -> Queries:
    """Returns the values of each row, weighted by the given shares."""
    return (
        (jnp.moveaxis(shares, -1, 1)[..., None] * v[:, :, :, None])
        .reshape(like.shape)
        .astype(like.dtype)
    )


def _final_hidden(passed: Passed) -> Hidden:
    return passed.hidden


def _identity(x: Rows) -> Rows:
    return x


def _fc(
    weights: DraftModel, x: Float[jax.Array, "*rows inputs"]
) -> Float[jax.Array, "*rows hidden"]:
    """Computes the head's `fc`; its result is part of a residual stream, so it is float32."""
    out = layers.linear_float32(x, weights.fc[...])
    return out + weights.fc_bias[...] if hasattr(weights, "fc_bias") else out
