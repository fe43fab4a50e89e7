"""Log-probabilities of output and prompt tokens, and of the top tokens at their positions.

They are computed from raw logits, without penalties, biases, filters or noise.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float32, Int
from jaxtyping import Int32 as I32

from shared.spec.sampling import log_softmax, top_candidates

SCORED_ROWS = 128
"""Rows of logits that a prefill computes at a time for prompt logprobs."""


@dataclass(frozen=True)
class Logprobs:
    """Logprobs of the output tokens of B requests, and the top K at each position."""

    chosen: Float32[np.ndarray, "B W"]
    top_ids: I32[np.ndarray, "B W K"]
    top_values: Float32[np.ndarray, "B W K"]


class PromptLogprobs(NamedTuple):
    """Prompt logprobs: each token is scored by the logits of the token before it.

    Attributes:
      chosen: Log-probability of the token.
      ranks: Rank of the token, from 1; ties go to the lower id.
      top_ids, top_values: The k most likely tokens, and their log-probabilities.
    """

    chosen: Float32[np.ndarray, " R"]
    ranks: I32[np.ndarray, " R"]
    top_ids: I32[np.ndarray, "R k"]
    top_values: Float32[np.ndarray, "R k"]


def chosen(
    logits: Float[np.ndarray, "R vocab"], ids: Int[np.ndarray, " R"]
) -> Float[np.ndarray, " R"]:
    """Returns the log-probability of one token per row."""
    return log_softmax(logits)[np.arange(len(ids)), ids]


def top(
    logits: Float[np.ndarray, "R vocab"], k: int
) -> tuple[I32[np.ndarray, "R k"], Float[np.ndarray, "R k"]]:
    """Returns the k most likely tokens of each row, and their log-probabilities."""
    ids = top_candidates(logits, k)
    return ids, np.take_along_axis(log_softmax(logits), ids, axis=1)


def output_logprobs(
    logits: Float[np.ndarray, "R vocab"],
    row_of: Int[np.ndarray, "B W"],
    tokens: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
    reports: Bool[np.ndarray, " B"],
    k: int,
) -> tuple[Float[np.ndarray, "B W"], I32[np.ndarray, "B W k"], Float[np.ndarray, "B W k"]]:
    """Returns the logprobs of the output tokens of a step.

    Args:
      logits: Raw logits.
      row_of: Row of `logits` that each token was sampled from.
      tokens, counts: Output tokens of each request, and their number; entries past it return 0.
      reports: True for requests with logprobs; others return 0.
      k: Number of top tokens.

    Returns:
      Result of `chosen` for the tokens, and both results of `top`.
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


def prompt_logprobs(
    logits: Float[np.ndarray, "R vocab"], ids: Int[np.ndarray, " R"], k: int
) -> tuple[
    Float[np.ndarray, " R"],
    I32[np.ndarray, " R"],
    I32[np.ndarray, "R k"],
    Float[np.ndarray, "R k"],
]:
    """Returns the fields of `PromptLogprobs` for one token per row."""
    logit = np.take_along_axis(logits, ids[:, None], axis=1)
    is_before = (logits == logit) & (np.arange(logits.shape[1]) < ids[:, None])
    ranks = 1 + ((logits > logit) | is_before).sum(axis=1, dtype=np.int32)
    return chosen(logits, ids), ranks, *top(logits, k)
