"""Losses of the token choice of block draft heads, slot by slot.

With `--loss kl` the cross-entropy of a slot's logits is replaced by the forward KL divergence
between the target's distribution of the token and the head's, at temperature 1. The target reads
the true tokens before the label. The other terms keep the label.

- DFlash: the cross-entropy of the slot's logits, which depend on no earlier draft token.
- DSpark: the same with the bias of the Markov head for the true previous token. The confidence has
  a binary cross-entropy; its label is 1 if the draft token equals the true token.
- DFlash2: the cross-entropy of the logits, and the selector's own among the best tokens of the
  slot. A label outside these tokens replaces the last one, so that every slot has a gradient; the
  slot counts as not drafted.

Source: DSpark, arXiv:2607.05147; DFlash2, z-lab; the KL divergence: JetSpec, hao-ai-lab.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from jax_impl.training import layers
from jax_impl.training.forward import logits
from jax_impl.training.losses import cross_entropy
from jax_impl.training.nnx_modules import DraftModel, ModelModule
from shared.drafts.dflash2 import SelectorConfig
from shared.drafts.dflash_config import BlockConfig
from shared.drafts.dspark_config import MarkovConfig

Losses = Float[jax.Array, " R"]
Agrees = Bool[jax.Array, " R"]
Rows = Float[jax.Array, "R hidden"]
Tokens = Int[jax.Array, " R"]
Scores = Float[jax.Array, "R vocab"]

Objective = Literal["cross-entropy", "kl"]
"""Loss of a slot's logits: against the label, or against the target's distribution."""

CROSS_ENTROPY: Objective = "cross-entropy"
KL: Objective = "kl"
OBJECTIVES = (CROSS_ENTROPY, KL)


def loss(
    block: BlockConfig,
    head: DraftModel,
    target: ModelModule,
    hidden: Rows,
    before: Tokens,
    labels: Tokens,
    teacher: Rows | None,
    compute_dtype: DTypeLike,
) -> tuple[Losses, Agrees]:
    """Returns the loss of each slot, and True if its draft equals the label given `before`.

    Args:
      hidden: Hidden states of the slots, after the final norm.
      before: The token before each label.
      teacher: Target's hidden states before each label, for the KL divergence; None for the
        cross-entropy.
    """
    scores = logits(target, hidden, compute_dtype)
    teacher_logits = None if teacher is None else logits(target, teacher, compute_dtype)
    if block.part(MarkovConfig) is not None:
        return _markov_loss(head, scores, hidden, before, labels, teacher_logits, compute_dtype)
    losses, agrees = _token_loss(scores, labels, teacher_logits)
    selector = block.part(SelectorConfig)
    if selector is None:
        return losses, agrees
    k = selector.candidates
    more, agrees = _selector_loss(k, head, scores, hidden, before, labels, compute_dtype)
    return losses + more, agrees


def _token_loss(
    scores: Scores, labels: Tokens, teacher_logits: Scores | None
) -> tuple[Losses, Agrees]:
    """Returns the cross-entropy, or the KL divergence from the teacher, and the agreement."""
    losses, _, agrees = cross_entropy(scores, labels)
    if teacher_logits is None:
        return losses, agrees
    log_p = jax.nn.log_softmax(lax.stop_gradient(teacher_logits), axis=-1)
    return (jnp.exp(log_p) * (log_p - jax.nn.log_softmax(scores, axis=-1))).sum(axis=-1), agrees


def _markov_loss(
    head: DraftModel,
    scores: Scores,
    hidden: Rows,
    before: Tokens,
    labels: Tokens,
    teacher_logits: Scores | None,
    compute_dtype: DTypeLike,
) -> tuple[Losses, Agrees]:
    embedded = head.markov["embed"][before].astype(compute_dtype)
    scores = scores + layers.linear_float32(embedded, head.markov["lm_head"])
    losses, agrees = _token_loss(scores, labels, teacher_logits)
    if not hasattr(head, "confidence"):
        return losses, agrees
    width = head.confidence.shape[1]  # the hidden state, with or without the embedding
    read = jnp.concatenate([hidden.astype(compute_dtype), embedded], axis=1)[:, :width]
    confidence = layers.linear_float32(read, head.confidence[...])[:, 0] + head.confidence_bias[...]
    return losses + jax.nn.softplus(confidence) - agrees * confidence, agrees


def _selector_loss(
    k: int,
    head: DraftModel,
    scores: Scores,
    hidden: Rows,
    before: Tokens,
    labels: Tokens,
    compute_dtype: DTypeLike,
) -> tuple[Losses, Agrees]:
    ids = lax.top_k(lax.stop_gradient(scores), k)[1]
    is_label = ids == labels[:, None]
    has_label = is_label.any(axis=1)
    ids = ids.at[:, -1].set(jnp.where(has_label, ids[:, -1], labels))
    label_index = jnp.where(has_label, is_label.argmax(axis=1), k - 1)
    weighed = layers.linear_float32(hidden.astype(compute_dtype), head.selector["hidden"])
    pairs = head.selector["before"][before] * weighed
    own = jnp.take_along_axis(scores, ids, axis=1)
    own += jnp.einsum("rd,rkd->rk", pairs, head.selector["after"][ids])
    losses, _, agrees = cross_entropy(own, label_index)
    return losses, agrees & has_label
