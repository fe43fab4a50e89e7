"""What a text tells of its tokens: their log-probabilities, and those of the best there were.

They are the raw logits' own: no penalty, bias or filter, and no noise, has touched them.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int
from jaxtyping import Int32 as I32

from shared.spec.sampling import log_softmax, top_candidates

SCORED_ROWS = 128
"""Rows whose logits a step over prompts has at a time, where all rows are scored."""


@dataclass(frozen=True)
class Logprobs:
    """What a step reports of its B requests' tokens: of the chosen ones, and of the best K."""

    chosen: Float32[np.ndarray, "B W"]
    top_ids: I32[np.ndarray, "B W K"]
    top_values: Float32[np.ndarray, "B W K"]


class Scores(NamedTuple):
    """What a text's own tokens were to the model, each by the logits of the token before it.

    Attributes:
      chosen: The log-probability of the token.
      ranks: Its place among all tokens, the best first and from 1 on; equal ones by the lower id.
      top_ids, top_values: The k most likely tokens there, and their log-probabilities.
    """

    chosen: Float32[np.ndarray, " R"]
    ranks: I32[np.ndarray, " R"]
    top_ids: I32[np.ndarray, "R k"]
    top_values: Float32[np.ndarray, "R k"]


def chosen(
    logits: Float[np.ndarray, "R vocab"], ids: Int[np.ndarray, " R"]
) -> Float[np.ndarray, " R"]:
    """The log-probability of one token of each row."""
    return log_softmax(logits)[np.arange(len(ids)), ids]


def top(
    logits: Float[np.ndarray, "R vocab"], k: int
) -> tuple[I32[np.ndarray, "R k"], Float[np.ndarray, "R k"]]:
    """The k most likely tokens of each row, and their log-probabilities."""
    ids = top_candidates(logits, k)
    return ids, np.take_along_axis(log_softmax(logits), ids, axis=1)


def reported(
    logits: Float[np.ndarray, "R vocab"],
    row_of: Int[np.ndarray, "B W"],
    tokens: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
    reports: Bool[np.ndarray, " B"],
    k: int,
) -> tuple[Float[np.ndarray, "B W"], I32[np.ndarray, "B W k"], Float[np.ndarray, "B W k"]]:
    """What a step reports of the tokens that it emits.

    Args:
      row_of: The row of `logits` that chose each token.
      tokens, counts: What each request emits; of a token past the counts nothing is reported.
      reports: Whether a request asked for it; of the others nothing is reported.
      k: How many of the best are named.

    Returns:
      `chosen` of the tokens, and both parts of `top`; 0 where nothing is reported.
    """
    B, W = tokens.shape
    rows = logits[row_of.reshape(-1)]
    ids, values = top(rows, k)
    is_told = (np.arange(W) < counts[:, None]) & reports[:, None]
    is_top = is_told[:, :, None]
    return (
        np.where(is_told, chosen(rows, tokens.reshape(-1)).reshape(B, W), 0),
        np.where(is_top, ids.reshape(B, W, k), 0),
        np.where(is_top, values.reshape(B, W, k), 0),
    )


def scored(
    logits: Float[np.ndarray, "R vocab"], ids: Int[np.ndarray, " R"], k: int
) -> tuple[
    Float[np.ndarray, " R"],
    I32[np.ndarray, " R"],
    I32[np.ndarray, "R k"],
    Float[np.ndarray, "R k"],
]:
    """The fields of `Scores`, of one token for each row of logits."""
    logit = np.take_along_axis(logits, ids[:, None], axis=1)
    is_before = (logits == logit) & (np.arange(logits.shape[1]) < ids[:, None])
    ranks = 1 + ((logits > logit) | is_before).sum(axis=1, dtype=np.int32)
    return chosen(logits, ids), ranks, *top(logits, k)
