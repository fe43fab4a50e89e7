"""Ranking of the candidates of a block's slots after each token that may precede them.

A tree over a DFLASH2 or DSPARK block has a few candidates per slot, and their logits depend on the
token before. All slots are ranked in one call. Logits processing, noise and the softmax read the
candidates alone: all other tokens have probability 0.
"""

import numpy as np
from jaxtyping import Float, Int
from jaxtyping import Int32 as I32

from shared.spec.gumbel_noise import TARGET_STREAM, gumbel_at
from shared.spec.sampling import (
    DRAFT_TAU,
    Sampling,
    draft_weights,
    filtered,
    penalized,
    top_candidates,
)


@np.errstate(invalid="ignore")  # of rows without an allowed candidate
def rank(
    logits: Float[np.ndarray, "R P C"],
    tokens: Int[np.ndarray, "R C"],
    counts: I32[np.ndarray, "slots vocab"],
    slots: Int[np.ndarray, " R"],
    positions: Int[np.ndarray, " R"],
    sampling: Sampling,
    width: int,
) -> tuple[I32[np.ndarray, "R P width"], Float[np.ndarray, "R P width"]]:
    """Ranks candidates as the target will choose among them, see `sampling.rank`.

    Args:
      logits: Logits of each slot's candidates after each of P tokens before.
      tokens: Candidates of each slot, without duplicates; of equal logits the earlier one wins.
      counts: Token counts of all slots of requests, see `sampling.TokenCounts`; tokens of the tree
        are not added to them.
      slots: Request slot of each row.
      positions: Position of each row's candidates.
      sampling: Parameters of each row.
      width: Number of candidates to return, at most C.

    Returns:
      The best tokens, best first, and the log weights of their edges. A row without an allowed
      candidate has weights of NaN.
    """
    R, P, C = logits.shape
    row = np.repeat(np.arange(R), P)
    by_row, at = sampling.rows(row), tokens[row]
    edited = edited_at(logits.reshape(R * P, C), at, counts[slots[row, None], at], by_row)
    is_stop = (by_row.stop_ids[:, :, None] == at[:, None]).any(axis=1)
    is_early = (positions < sampling.min_length)[row, None]
    scores = filtered(np.where(is_stop & is_early, np.float32(-np.inf), edited), by_row)
    noise = gumbel_at(sampling.seed, positions, tokens, TARGET_STREAM)[row]
    noisy = scores + np.where(by_row.temperature[:, None] > 0, noise, np.float32(0))
    places = top_candidates(noisy, width)
    weights = draft_weights(noisy, by_row.temperature, DRAFT_TAU)
    ids, weights = (np.take_along_axis(x, places, axis=1) for x in (at, weights))
    return ids.astype(np.int32).reshape(R, P, width), weights.reshape(R, P, width)


def edited_at(
    logits: Float[np.ndarray, "R C"],
    tokens: Int[np.ndarray, "R C"],
    seen: I32[np.ndarray, "R C"],
    sampling: Sampling,
) -> Float[np.ndarray, "R C"]:
    """Applies penalties and biases to the logits of some tokens.

    Args:
      logits, tokens: Logits, and the token of each.
      seen: Counts of these tokens.
      sampling: Parameters of each row.
    """
    is_biased = sampling.bias_ids[:, :, None] == tokens[:, None]
    bias = np.where(is_biased, sampling.bias_values[:, :, None], np.float32(0)).sum(axis=1)
    return penalized(logits, seen, sampling) + bias
