"""Acceptance lengths of a block head as a chain and as draft trees, on training answers.

The head fills blocks after random anchors. Each block gives the candidates of all depths, from
which `shared.spec.best_prefixes` builds the tree that serving drafts at temperature 0. The accepted
path follows the tokens of the answer, which are the target's greedy choice.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Bool, Float, Int

from jax_impl.training.block import BlockHeadConfig, fill_blocks
from jax_impl.training.examples import TrainingBatch
from jax_impl.training.forward import logits
from jax_impl.training.nnx_modules import DraftModel, ModelModule
from shared.models.config import ModelConfig
from shared.spec.best_prefixes import best_prefixes

NODES = (16, 32, 64)
"""Sizes of the trees, including the root."""

WIDTH = 16
"""Candidates of a depth."""

MAX_BLOCKS = 512

Ranks = Int[np.ndarray, " slots"]


def measure(
    block: BlockHeadConfig,
    head: DraftModel,
    target_config: ModelConfig,
    target: ModelModule,
    batch: TrainingBatch,
    seed: int,
    num_anchors: int,
    compute_dtype: DTypeLike,
) -> dict[str, float]:
    """Returns the mean acceptance length, with the bonus token, of each draft shape.

    A block counts if all its labels are tokens of an answer; at most `MAX_BLOCKS` count.

    Args:
      batch: Rows of the training data.
      seed: Seed of the anchors.

    Returns:
      Lengths by "chain" and "tree N"; empty if no answer fills a block.
    """
    function = jax.jit(
        partial(_candidates, block, target_config, num_anchors=num_anchors, dtype=compute_dtype)
    )
    found = function(head, target, batch, jax.random.key(seed))
    weights, ranks, is_whole = (np.asarray(each) for each in found)
    chosen = np.flatnonzero(is_whole)[:MAX_BLOCKS]
    if not chosen.size:
        return {}
    lengths = np.mean([accepted(weights[i], ranks[i]) for i in chosen], axis=0)
    names = ("chain", *(f"tree {nodes}" for nodes in NODES))
    return dict(zip(names, map(float, lengths), strict=True))


def _candidates(
    block: BlockHeadConfig,
    target_config: ModelConfig,
    head: DraftModel,
    target: ModelModule,
    batch: TrainingBatch,
    key: jax.Array,
    *,
    num_anchors: int,
    dtype: DTypeLike,
) -> tuple[
    Float[jax.Array, "blocks slots K"], Int[jax.Array, "blocks slots"], Bool[jax.Array, " blocks"]
]:
    """Returns log probabilities of the best tokens, the label's rank, and True for whole blocks.

    The rank is K if the label is not among the candidates.
    """
    tokens, loss_mask = (jnp.asarray(each) for each in batch)
    filled = fill_blocks(
        block, head, target_config, target, tokens, loss_mask, key, num_anchors, dtype, False
    )
    slots = filled.slots.reshape(-1, *filled.slots.shape[2:])

    def best(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        scores = jax.nn.log_softmax(logits(target, rows, dtype), axis=-1)
        return lax.top_k(scores, min(WIDTH, scores.shape[-1]))

    weights, ids = lax.map(best, slots)  # block by block, because logits need much memory
    is_label = ids == filled.labels.reshape(*slots.shape[:2], 1)
    ranks = jnp.where(is_label.any(-1), is_label.argmax(-1), ids.shape[-1])
    return weights, ranks, filled.is_answer[..., -1].reshape(-1)


def accepted(weights: Float[np.ndarray, "slots K"], ranks: Ranks) -> list[int]:
    """Returns the acceptance length of the chain, and of the tree of each size in `NODES`.

    A smaller tree is the beginning of a larger one.

    Args:
      weights: Log probabilities of the candidates of each depth, descending.
      ranks: Rank of the true token of each depth; K if it is no candidate.
    """
    K = weights.shape[1]
    no_calibration = np.zeros(len(weights), np.float32)
    found = best_prefixes(weights[:, None], None, no_calibration, max(NODES) - 1)
    is_accepted = [True]
    for parent, slot, _ in found:
        is_accepted.append(is_accepted[parent] and ranks[slot // K] == slot % K)
    chain = 1 + int(np.cumprod(ranks == 0).sum())
    return [chain, *(sum(is_accepted[:nodes]) for nodes in NODES)]
