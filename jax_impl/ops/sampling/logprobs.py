"""Logprobs of output tokens and of the top tokens; same as `shared.spec.logprobs`."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl.ops import cond_any
from jax_impl.ops.sampling.vocab_parallel import (
    ALL,
    Vocabulary,
    added,
    at,
    best_of,
    log_probabilities,
    norm,
    spread,
)

Reported = tuple[Float[jax.Array, "B W"], Int[jax.Array, "B W k"], Float[jax.Array, "B W k"]]

Scored = tuple[
    Float[jax.Array, " R"], Int[jax.Array, " R"], Int[jax.Array, "R k"], Float[jax.Array, "R k"]
]


def chosen(
    rows: Float[jax.Array, "R vocab"], ids: Int[jax.Array, " R"], vocabulary: Vocabulary = ALL
) -> Float[jax.Array, " R"]:
    """Returns the logprob of one token of each row."""
    return log_probabilities(at(rows, ids[:, None], vocabulary), norm(rows, vocabulary))[:, 0]


def top(
    rows: Float[jax.Array, "R vocab"], k: int, vocabulary: Vocabulary = ALL
) -> tuple[Int[jax.Array, "R k"], Float[jax.Array, "R k"]]:
    """Returns the top k tokens of each row and their logprobs."""
    values, ids = best_of(rows, k, vocabulary)
    return ids, log_probabilities(values, norm(rows, vocabulary))


def output_logprobs(
    logits: Float[jax.Array, "R share"],
    row_of: Int[jax.Array, "B W"],
    tokens: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    reports: Bool[jax.Array, " B"],
    k: int,
    vocabulary: Vocabulary = ALL,
) -> Reported:
    """Computes the logprobs of a step's tokens, 0 for other rows; a CPU may skip it.

    Args:
      logits: Whole logits, or this rank's shard.
    """
    B, W = tokens.shape
    is_reported = (jnp.arange(W) < counts[:, None]) & reports[:, None]

    def of_rows(logits: Float[jax.Array, "R share"]) -> Reported:
        rows = spread(logits[row_of.reshape(-1)], vocabulary)
        logprob = chosen(rows, tokens.reshape(-1), vocabulary).reshape(B, W)
        ids, values = (x.reshape(B, W, k) for x in top(rows, k, vocabulary))
        is_top = is_reported[:, :, None]
        return (
            jnp.where(is_reported, logprob, 0),
            jnp.where(is_top, ids, 0),
            jnp.where(is_top, values, 0),
        )

    def nothing(logits: Float[jax.Array, "R share"]) -> Reported:
        zeros = jnp.zeros((B, W, k), logits.dtype)
        return zeros[:, :, 0], jnp.zeros((B, W, k), jnp.int32), zeros

    return cond_any(is_reported, of_rows, nothing, logits)


def prompt_logprobs(
    logits: Float[jax.Array, "R share"],
    ids: Int[jax.Array, " R"],
    k: int,
    vocabulary: Vocabulary = ALL,
) -> Scored:
    """Returns the logprob and the rank of one token of each row, and the results of `top`."""
    rows = spread(logits, vocabulary)
    logit = at(rows, ids[:, None], vocabulary)
    is_before = (rows > logit) | ((rows == logit) & (jnp.arange(rows.shape[1]) < ids[:, None]))
    before = added(is_before.sum(axis=1, keepdims=True, dtype=jnp.int32), vocabulary)
    return chosen(rows, ids, vocabulary), 1 + before[:, 0], *top(rows, k, vocabulary)
