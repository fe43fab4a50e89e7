"""Log-probabilities of emitted tokens and of the best; as `shared.spec.logprobs`."""

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float, Int

from jax_impl.ops import when_any
from jax_impl.ops.sampling import log_softmax, top_candidates

Reported = tuple[Float[jax.Array, "B W"], Int[jax.Array, "B W k"], Float[jax.Array, "B W k"]]

Scored = tuple[
    Float[jax.Array, " R"], Int[jax.Array, " R"], Int[jax.Array, "R k"], Float[jax.Array, "R k"]
]


def chosen(
    logits: Float[jax.Array, "R vocab"], ids: Int[jax.Array, " R"]
) -> Float[jax.Array, " R"]:
    """The log-probability of one token of each row."""
    return jnp.take_along_axis(log_softmax(logits), ids[:, None], axis=1)[:, 0]


def top(
    logits: Float[jax.Array, "R vocab"], k: int
) -> tuple[Int[jax.Array, "R k"], Float[jax.Array, "R k"]]:
    """The k most likely tokens of each row, and their log-probabilities."""
    ids = top_candidates(logits, k)
    return ids, jnp.take_along_axis(log_softmax(logits), ids, axis=1)


def reported(
    logits: Float[jax.Array, "R vocab"],
    row_of: Int[jax.Array, "B W"],
    tokens: Int[jax.Array, "B W"],
    counts: Int[jax.Array, " B"],
    reports: Bool[jax.Array, " B"],
    k: int,
) -> Reported:
    """What a step reports of its tokens, else 0; where no row reports, a CPU computes nothing."""
    B, W = tokens.shape
    is_reported = (jnp.arange(W) < counts[:, None]) & reports[:, None]

    def of_rows(logits: Float[jax.Array, "R vocab"]) -> Reported:
        rows = logits[row_of.reshape(-1)]
        logprob = chosen(rows, tokens.reshape(-1)).reshape(B, W)
        ids, values = (x.reshape(B, W, k) for x in top(rows, k))
        is_top = is_reported[:, :, None]
        return (
            jnp.where(is_reported, logprob, 0),
            jnp.where(is_top, ids, 0),
            jnp.where(is_top, values, 0),
        )

    def nothing(logits: Float[jax.Array, "R vocab"]) -> Reported:
        zeros = jnp.zeros((B, W, k), logits.dtype)
        return zeros[:, :, 0], jnp.zeros((B, W, k), jnp.int32), zeros

    return when_any(is_reported, of_rows, nothing, logits)


def scored(logits: Float[jax.Array, "R vocab"], ids: Int[jax.Array, " R"], k: int) -> Scored:
    """The log-probability and the rank of one token of each row, and both parts of `top`."""
    logit = jnp.take_along_axis(logits, ids[:, None], axis=1)
    is_before = (logits == logit) & (jnp.arange(logits.shape[1]) < ids[:, None])
    ranks = 1 + ((logits > logit) | is_before).sum(axis=1, dtype=jnp.int32)
    return chosen(logits, ids), ranks, *top(logits, k)
