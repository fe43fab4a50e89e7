"""What trains how a head with blocks chooses its drafts, slot by slot.

A DFlash head's slots know no draft: theirs is the cross-entropy of their scores. A DSpark head's
have its Markov step's bias, of the true token before, and the confidence is held against whether
the draft is the label. A DFlash2 head's selector has a cross-entropy of its own, among the best
tokens of the slot; where the label is none of them it stands in the place of the last, so that each
slot teaches, and counts as not drafted.

Source: DSpark, arXiv:2607.05147; DFlash2, z-lab.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from jax_impl.training import layers
from jax_impl.training.forward import logits
from jax_impl.training.losses import cross_entropy
from jax_impl.training.nnx_modules import DraftModel, ModelModule
from shared.drafts.dflash_config import BlockConfig

Losses = Float[jax.Array, " R"]
Agrees = Bool[jax.Array, " R"]
Rows = Float[jax.Array, "R hidden"]
Tokens = Int[jax.Array, " R"]
Scores = Float[jax.Array, "R vocab"]


def loss(
    block: BlockConfig,
    head: DraftModel,
    target: ModelModule,
    hidden: Rows,
    before: Tokens,
    labels: Tokens,
    compute_dtype: DTypeLike,
) -> tuple[Losses, Agrees]:
    """Each slot's loss, and whether its draft is the label where the drafts before it are.

    Args:
      hidden: Of the slots, after the final norm.
      before: The token before each label.
    """
    scores = logits(target, hidden, compute_dtype)
    if block.markov is not None:
        return _marked(head, scores, hidden, before, labels, compute_dtype)
    losses, _, agrees = cross_entropy(scores, labels)
    if block.selector is None:
        return losses, agrees
    k = block.selector.candidates
    more, agrees = _selected(k, head, scores, hidden, before, labels, compute_dtype)
    return losses + more, agrees


def _marked(
    head: DraftModel,
    scores: Scores,
    hidden: Rows,
    before: Tokens,
    labels: Tokens,
    compute_dtype: DTypeLike,
) -> tuple[Losses, Agrees]:
    known = head.markov["embed"][before].astype(compute_dtype)
    scores = scores + layers.linear_float32(known, head.markov["lm_head"])
    losses, _, agrees = cross_entropy(scores, labels)
    if not hasattr(head, "confidence"):
        return losses, agrees
    width = head.confidence.shape[1]  # with what is known of the token before, or without
    read = jnp.concatenate([hidden.astype(compute_dtype), known], axis=1)[:, :width]
    sure = layers.linear_float32(read, head.confidence[...])[:, 0] + head.confidence_bias[...]
    return losses + jax.nn.softplus(sure) - agrees * sure, agrees


def _selected(
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
    place = jnp.where(has_label, is_label.argmax(axis=1), k - 1)
    weighed = layers.linear_float32(hidden.astype(compute_dtype), head.selector["hidden"])
    pairs = head.selector["before"][before] * weighed
    own = jnp.take_along_axis(scores, ids, axis=1)
    own += jnp.einsum("rd,rkd->rk", pairs, head.selector["after"][ids])
    losses, _, agrees = cross_entropy(own, place)
    return losses, agrees & has_label
