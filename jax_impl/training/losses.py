"""Losses over batches of sequences, with training metrics.

The logits of a whole batch are never stored: they are computed in blocks of rows, and again for the
gradient. A mask has the weight of each token as a label: 1 for tokens of answers, less for prompts,
0 for padding. Rates are counted over the tokens of weight 1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from jax_impl.training import experts, heads
from jax_impl.training.forward import Hidden, Passed, Tokens, forward, logits
from jax_impl.training.heads import Head, later
from jax_impl.training.nnx_modules import DraftModel, ModelModule, Mtp
from shared.drafts.config import DraftConfig
from shared.models.config import ModelConfig

Mask = Float[jax.Array, "B T"]
Scalar = Float[jax.Array, ""]
Metrics = dict[str, Scalar]

BLOCK_SCORES = 2**26
"""Logits in a block of rows: 256 MiB, enough to occupy a GPU and little of its memory."""

Z_WEIGHT = 1e-4
"""Weight of the z-loss, the squared log of the softmax denominator; it keeps logits small."""

STEP_DECAY = 0.8
"""Weight of a draft step's loss relative to the previous step, as in EAGLE-3."""


def language_model_loss(
    config: ModelConfig,
    weights: ModelModule,
    tokens: Tokens,
    loss_mask: Mask,
    compute_dtype: DTypeLike,
    mtp_weight: float,
    balance_weight: float,
    remat: bool,
) -> tuple[Scalar, Metrics]:
    """Computes the cross-entropy of the next token, and of the one after it with an MTP layer.

    Args:
      mtp_weight: Weight of the MTP layer's cross-entropy; 0 skips the layer.
      balance_weight: Weight of `experts.balance`, over the tokens with a weight as labels.
    """
    passed = forward(config, weights, tokens, compute_dtype, remat)
    label_loss = partial(_cross_entropy, tokens=tokens, loss_mask=loss_mask, vocab=config.vocab)
    loss, metrics = label_loss(
        lambda rows: logits(weights, rows, compute_dtype), passed.hidden, ahead=1
    )
    if mtp_weight and weights.has_mtp:
        head = heads.mtp(config, weights.mtp, weights, compute_dtype)
        hidden, *_ = heads.unroll(head, tokens, passed.hidden, 1, compute_dtype, remat)
        mtp_loss, mtp_metrics = label_loss(head.scores, hidden, ahead=2)
        loss += mtp_weight * mtp_loss
        metrics |= {f"mtp_{name}": value for name, value in mtp_metrics.items()}
    if passed.routed:
        balance_loss, min_load = experts.balance(passed.routed, loss_mask.reshape(-1) > 0)
        loss += balance_weight * balance_loss
        metrics |= {"experts_balance": balance_loss, "experts_min_used": min_load}
    return loss, metrics | {"loss": loss}


def adapter_loss(
    config: ModelConfig,
    weights: ModelModule,
    tokens: Tokens,
    loss_mask: Mask,
    compute_dtype: DTypeLike,
    mtp_weight: float,
    depth: int,
    remat: bool,
) -> tuple[Scalar, Metrics]:
    """Computes the cross-entropy of the next token, and the loss of the MTP layer's drafts.

    The MTP layer drafts `depth` tokens, and an `mtp_weight` of 0 skips it. The drafts are compared
    with the model itself, which their loss does not change.
    """
    passed = forward(config, weights, tokens, compute_dtype, remat)
    loss, metrics = _cross_entropy(
        lambda rows: logits(weights, rows, compute_dtype),
        passed.hidden,
        tokens,
        loss_mask,
        config.vocab,
        ahead=1,
    )
    if mtp_weight and weights.has_mtp:
        frozen, outputs = jax.tree.map(lax.stop_gradient, (weights, passed))
        head = heads.mtp(config, weights.mtp, frozen, compute_dtype)
        mtp_loss, mtp_metrics = chain_loss(
            head, frozen, outputs, tokens, loss_mask, depth, compute_dtype, remat
        )
        loss += mtp_weight * mtp_loss
        metrics |= {name: value for name, value in mtp_metrics.items() if name != "loss"}
    return loss, metrics | {"loss": loss}


def head_loss(
    kind: str,
    config: DraftConfig | None,
    head: DraftModel | Mtp,
    target_config: ModelConfig,
    target: ModelModule,
    tokens: Tokens,
    loss_mask: Mask,
    depth: int,
    compute_dtype: DTypeLike,
    remat: bool,
) -> tuple[Scalar, Metrics]:
    """Computes the cross-entropy of a draft head's steps against the target; see `chain_loss`.

    Args:
      kind: "mtp", "eagle" or "eagle3".
      config: Config of the head; None for "mtp", which has the layer sizes of the target.
      head: The trained head; the target is frozen.
      depth: Steps of a chain; each reads the outputs of the previous one.
    """
    frozen = jax.tree.map(lax.stop_gradient, target)
    passed = jax.tree.map(
        lax.stop_gradient, forward(target_config, frozen, tokens, compute_dtype, remat)
    )
    bound = bind(kind, config, head, target_config, frozen, compute_dtype)
    return chain_loss(bound, frozen, passed, tokens, loss_mask, depth, compute_dtype, remat)


def bind(
    kind: str,
    config: DraftConfig | None,
    head: DraftModel | Mtp,
    target_config: ModelConfig,
    target: ModelModule,
    compute_dtype: DTypeLike,
) -> Head:
    """Binds a head of the kind "mtp", "eagle" or "eagle3" to its weights and its target.

    Raises:
      ValueError: The kind is unknown or does not match the head.
    """
    if kind == "mtp" and isinstance(head, Mtp):
        return heads.mtp(target_config, head, target, compute_dtype)
    kinds = {"eagle": heads.eagle, "eagle3": heads.eagle3}
    if kind in kinds and config is not None and isinstance(head, DraftModel):
        return kinds[kind](config, head, target, compute_dtype)
    raise ValueError(f"kind must be mtp, eagle or eagle3 and match the head, got {kind!r}")


def chain_loss(
    head: Head,
    target: ModelModule,
    passed: Passed,
    tokens: Tokens,
    loss_mask: Mask,
    depth: int,
    compute_dtype: DTypeLike,
    remat: bool,
) -> tuple[Scalar, Metrics]:
    """Computes the loss of a head: each step's cross-entropy, weighted by `STEP_DECAY ** step`.

    With a draft vocabulary, the target's probabilities of its tokens are not renormalised to 1. The
    weight of a position is thus the target's probability mass within the draft vocabulary.
    """
    steps = heads.unroll(head, tokens, head.read(passed), depth, compute_dtype, remat)
    # The label of row p is the target's distribution after token p + 1.
    ahead = jnp.roll(passed.hidden, -1, axis=1)
    return weigh(_steps_scored(head, target, ahead, steps, compute_dtype), loss_mask)


def weigh(
    scored: list[tuple[Float[jax.Array, "B T"], Bool[jax.Array, "B T"]]], loss_mask: Mask
) -> tuple[Scalar, Metrics]:
    """Adds up the steps: cross-entropies to a loss, and agreements to the acceptance length.

    Args:
      scored: For each step the cross-entropy of each row, and True if its draft token agrees.
      loss_mask: Weight of each token as a label.

    Returns:
      The loss and metrics. `agreement_i` is the share of chains in which the first i draft tokens
      all equal the target's greedy tokens. `acceptance_length` is one more than their sum.
    """
    label_mask, rows = _ahead(loss_mask, 2), jnp.arange(loss_mask.shape[1])
    loss, rates = jnp.zeros(()), []
    counts = alive = jnp.ones(loss_mask.shape, bool)
    for step, (cross_entropy, agrees) in enumerate(scored):
        mask = label_mask * (rows >= step)
        loss += STEP_DECAY**step * mean(cross_entropy, mask)
        if step:
            counts, alive = later(counts, 1), later(alive, 1)
        counts = counts & (mask >= 1)
        alive = alive & agrees & counts
        rates.append(mean(alive, counts))
    return loss, acceptance(rates) | {"loss": loss}


def acceptance(rates: list[Scalar]) -> Metrics:
    """Returns the agreement rates by name, and the acceptance length with the bonus token."""
    named = {f"agreement_{i}": rate for i, rate in enumerate(rates, start=1)}
    return named | {"acceptance_length": 1 + sum(rates, jnp.zeros(()))}


def _cross_entropy(
    scores: Callable[[Any], Float[jax.Array, "R vocab"]],
    hidden: Hidden,
    tokens: Tokens,
    loss_mask: Mask,
    vocab: int,
    ahead: int,
) -> tuple[Scalar, Metrics]:
    """Computes the cross-entropy of the token `ahead` rows after each row, with its weight."""
    mask = _ahead(loss_mask, ahead)
    labels = jnp.roll(tokens, -ahead, axis=1)

    def score(block: tuple[Hidden, Tokens]) -> tuple[jax.Array, jax.Array, jax.Array]:
        rows, labels = block
        return cross_entropy(scores(rows), labels)

    losses, total, hits = by_blocks(score, (hidden, labels), block_rows(vocab))
    loss = mean(losses, mask)
    metrics = {"cross_entropy": loss, "accuracy": mean(hits, mask >= 1)}
    return loss + Z_WEIGHT * mean(total * total, mask), metrics


def cross_entropy(
    scores: Float[jax.Array, "R vocab"], labels: Int[jax.Array, " R"]
) -> tuple[Float[jax.Array, " R"], Float[jax.Array, " R"], Bool[jax.Array, " R"]]:
    """Returns the cross-entropy, the log denominator, and True if the label is the argmax."""
    total = jax.nn.logsumexp(scores, axis=-1)
    # A sum over a mask, because the gradient of a gather would be a scatter.
    chosen = jnp.where(jnp.arange(scores.shape[1]) == labels[:, None], scores, 0).sum(axis=-1)
    return total - chosen, total, jnp.argmax(scores, axis=-1) == labels


def _steps_scored(
    head: Head, target: ModelModule, ahead: Hidden, steps: list[Hidden], compute_dtype: DTypeLike
) -> list[tuple[Float[jax.Array, "B T"], Bool[jax.Array, "B T"]]]:
    """Returns each step's cross-entropy against the target, and True where the argmax agrees."""

    def score(block: tuple[Hidden, ...]) -> list[tuple[jax.Array, jax.Array]]:
        ahead, *steps = block
        target_logits = lax.stop_gradient(logits(target, ahead, compute_dtype))
        p, best = jax.nn.softmax(target_logits, axis=-1), jnp.argmax(target_logits, axis=-1)
        if head.draft_ids is not None:
            p = p[:, head.draft_ids]
        return [_soft_cross_entropy(head, head.scores(hidden), p, best) for hidden in steps]

    rows = block_rows(len(target.head[...]) * (1 + len(steps)))
    return by_blocks(score, (ahead, *steps), rows)


def _soft_cross_entropy(
    head: Head,
    scores: Float[jax.Array, "R draft_vocab"],
    p: Float[jax.Array, "R draft_vocab"],
    best: Int[jax.Array, " R"],
) -> tuple[Float[jax.Array, " R"], Bool[jax.Array, " R"]]:
    drafted = jnp.argmax(scores, axis=-1)
    if head.draft_ids is not None:
        drafted = head.draft_ids[drafted]
    return -(p * jax.nn.log_softmax(scores, axis=-1)).sum(axis=-1), drafted == best


def by_blocks(function: Callable[[Any], Any], rows: Any, size: int) -> Any:
    """Applies a function to blocks of the rows `[B, T, ...]`; stores no inner activations.

    Args:
      function: Maps a tree of `[size, ...]` to a tree of `[size]`.
      size: Rows of a block.

    Returns:
      The results as `[B, T]`.
    """
    B, T = jax.tree.leaves(rows)[0].shape[:2]
    size = min(size, B * T)
    count = -(-B * T // size)

    def cut(x: jax.Array) -> jax.Array:
        flat = x.reshape(B * T, *x.shape[2:])
        padded = jnp.pad(flat, ((0, count * size - B * T), *[(0, 0)] * (flat.ndim - 1)))
        return padded.reshape(count, size, *flat.shape[1:])

    losses = lax.map(jax.checkpoint(function), jax.tree.map(cut, rows))
    return jax.tree.map(lambda x: x.reshape(-1)[: B * T].reshape(B, T), losses)


def block_rows(vocab: int) -> int:
    """Returns the number of rows in a block of `BLOCK_SCORES` logits."""
    return max(1, BLOCK_SCORES // vocab)


def _ahead(mask: Mask, tokens: int) -> Mask:
    """Shifts the weights back by `tokens`; zeros past the end."""
    return jnp.pad(mask[:, tokens:], ((0, 0), (0, tokens)))


def mean(values: jax.Array, weights: jax.Array) -> Scalar:
    """Returns the weighted mean; 0 if all weights are 0."""
    return (values * weights).sum() / jnp.maximum(weights.sum(), 1e-6)
