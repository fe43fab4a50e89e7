"""Losses over batches of sequences, each with the numbers that tell how far training has come.

No loss holds the logits of a whole batch: they are made, and for the gradient made again, in blocks
of rows. A mask weighs each token as a label: 1 for a token of an answer, less for a prompt's, 0 for
padding; shares are counted over the tokens of weight 1.
"""

from collections.abc import Callable
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
"""Scores in a block of rows: 256 MiB, which fills a GPU and is little of its memory."""

Z_WEIGHT = 1e-4
"""Weight of the squared log of the softmax's denominator, which keeps scores from drifting."""

STEP_DECAY = 0.8
"""Weight of a draft step's loss relative to the step before; EAGLE-3's."""


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
    """Cross-entropy of the next token, and with an MTP layer that of the token after it.

    Args:
      mtp_weight: Weight of the MTP layer's cross-entropy; 0 leaves the layer out.
      balance_weight: Of `experts.balance`, over the tokens that have weight as labels.
    """
    passed = forward(config, weights, tokens, compute_dtype, remat)
    what = (tokens, loss_mask, config.vocab)
    loss, metrics = _cross_entropy(
        lambda rows: logits(weights, rows, compute_dtype), passed.hidden, *what, ahead=1
    )
    if mtp_weight and weights.has_mtp:
        head = heads.mtp(config, weights.mtp, weights, compute_dtype)
        hidden, *_ = heads.unroll(head, tokens, passed.hidden, 1, compute_dtype, remat)
        more, of_mtp = _cross_entropy(head.scores, hidden, *what, ahead=2)
        loss += mtp_weight * more
        metrics |= {f"mtp_{name}": value for name, value in of_mtp.items()}
    if passed.routed:
        unevenness, least = experts.balance(passed.routed, loss_mask.reshape(-1) > 0)
        loss += balance_weight * unevenness
        metrics |= {"experts_balance": unevenness, "experts_least_used": least}
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
    """Cross-entropy of a draft head's steps against the target's distribution; see `chain_loss`.

    Args:
      kind: "mtp", "eagle" or "eagle3".
      config: The head's; None for "mtp", whose layer has the target's sizes.
      head: What is trained; the target stays as it is.
      depth: Steps of a chain, each on the outputs of the one before.
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
    """A head of the kind "mtp", "eagle" or "eagle3", bound to its weights and its target's.

    Raises:
      ValueError: Another kind.
    """
    if kind == "mtp" and isinstance(head, Mtp):
        return heads.mtp(target_config, head, target, compute_dtype)
    kinds = {"eagle": heads.eagle, "eagle3": heads.eagle3}
    if kind in kinds and config is not None and isinstance(head, DraftModel):
        return kinds[kind](config, head, target, compute_dtype)
    raise ValueError(f"kind must be mtp, eagle or eagle3 and fit the head, got {kind!r}")


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
    """Weighs each step's cross-entropy by `STEP_DECAY ** step`.

    A draft vocabulary is held against the target's probabilities of its tokens as they are, not
    scaled up to 1: so a position counts by how much of the target's choice the head can draft.
    """
    steps = heads.unroll(head, tokens, head.read(passed), depth, compute_dtype, remat)
    # Row p is held against what the target says after token p + 1.
    ahead = jnp.roll(passed.hidden, -1, axis=1)
    return weigh(_steps_scored(head, target, ahead, steps, compute_dtype), loss_mask)


def weigh(
    scored: list[tuple[Float[jax.Array, "B T"], Bool[jax.Array, "B T"]]], loss_mask: Mask
) -> tuple[Scalar, Metrics]:
    """Adds up what the rows of each step gave: cross-entropy, and whether its draft agrees.

    Returns:
      The loss, `agreement_i`, the share of chains whose first i drafts are all the target's first
      choice, and `acceptance_length`, one more than their sum.
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
    """Names the shares of chains that agree so far, and their sum with the bonus token."""
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
    """Of the token that lies `ahead` of each row, with the weight of that token."""
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
    """The label's negative log probability, the log denominator, and whether it is the first."""
    total = jax.nn.logsumexp(scores, axis=-1)
    # A sum over a mask, for the gradient of a gather is a scatter.
    chosen = jnp.where(jnp.arange(scores.shape[1]) == labels[:, None], scores, 0).sum(axis=-1)
    return total - chosen, total, jnp.argmax(scores, axis=-1) == labels


def _steps_scored(
    head: Head, target: ModelModule, ahead: Hidden, steps: list[Hidden], compute_dtype: DTypeLike
) -> list[tuple[Float[jax.Array, "B T"], Bool[jax.Array, "B T"]]]:
    """Each step's cross-entropy against the target, and whether the first choices agree."""

    def score(block: tuple[Hidden, ...]) -> list[tuple[jax.Array, jax.Array]]:
        ahead, *steps = block
        whole = lax.stop_gradient(logits(target, ahead, compute_dtype))
        wanted, best = jax.nn.softmax(whole, axis=-1), jnp.argmax(whole, axis=-1)
        if head.draft_ids is not None:
            wanted = wanted[:, head.draft_ids]
        return [_soft(head, head.scores(hidden), wanted, best) for hidden in steps]

    rows = block_rows(len(target.head[...]) * (1 + len(steps)))
    return by_blocks(score, (ahead, *steps), rows)


def _soft(
    head: Head,
    scores: Float[jax.Array, "R draft_vocab"],
    wanted: Float[jax.Array, "R draft_vocab"],
    best: Int[jax.Array, " R"],
) -> tuple[Float[jax.Array, " R"], Bool[jax.Array, " R"]]:
    drafted = jnp.argmax(scores, axis=-1)
    if head.draft_ids is not None:
        drafted = head.draft_ids[drafted]
    return -(wanted * jax.nn.log_softmax(scores, axis=-1)).sum(axis=-1), drafted == best


def by_blocks(function: Callable[[Any], Any], rows: Any, size: int) -> Any:
    """Applies a function of flat rows to blocks of the rows `[B, T, ...]`; keeps no inner values.

    Args:
      function: From a tree of `[size, ...]` to a tree of `[size]`.
      size: Rows of a block.

    Returns:
      The results as `[B, T]`.
    """
    B, T = jax.tree.leaves(rows)[0].shape[:2]
    size = min(size, B * T)
    count = -(-B * T // size)

    def cut(x: jax.Array) -> jax.Array:
        flat = x.reshape(B * T, *x.shape[2:])
        spare = jnp.pad(flat, ((0, count * size - B * T), *[(0, 0)] * (flat.ndim - 1)))
        return spare.reshape(count, size, *flat.shape[1:])

    losses = lax.map(jax.checkpoint(function), jax.tree.map(cut, rows))
    return jax.tree.map(lambda x: x.reshape(-1)[: B * T].reshape(B, T), losses)


def block_rows(vocab: int) -> int:
    """Rows whose scores fill a block."""
    return max(1, BLOCK_SCORES // vocab)


def _ahead(mask: Mask, tokens: int) -> Mask:
    """The weight of the token that lies `tokens` further on; none past the end."""
    return jnp.pad(mask[:, tokens:], ((0, 0), (0, tokens)))


def mean(values: jax.Array, weights: jax.Array) -> Scalar:
    """Of the values in their weights; 0 where nothing has weight."""
    return (values * weights).sum() / jnp.maximum(weights.sum(), 1e-6)
