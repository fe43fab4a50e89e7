"""Ranking of a block's candidates after each token before; same as `shared.spec.candidate_lists`.

On a GPU the kernels of `sampling.rank` rank them; see `jax_impl.ops`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.ops import Kernels, kernel_or_reference
from jax_impl.ops.sampling.gumbel_noise import gumbel_at
from jax_impl.ops.sampling.sampling import (
    Sampling,
    counts_alone,
    draft_weights,
    penalized,
    supported,
)
from jax_impl.ops.sampling.vocab_parallel import ALL, best_of
from shared.spec.gumbel_noise import TARGET_STREAM
from shared.spec.sampling import DRAFT_TAU


def plain_rank(
    logits: Float[jax.Array, "R P C"],
    tokens: Int[jax.Array, "R C"],
    counts: Int[jax.Array, "slots vocab"],
    slots: Int[jax.Array, " R"],
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    width: int,
) -> tuple[Int[jax.Array, "R P width"], Float[jax.Array, "R P width"]]:
    R, P, C = logits.shape
    row = jnp.repeat(jnp.arange(R), P)
    by_row, at = sampling.rows(row), tokens[row]
    edited = edited_at(logits.reshape(R * P, C), at, counts[slots[row, None], at], by_row)
    is_stop = (by_row.stop_ids[:, :, None] == at[:, None]).any(axis=1)
    is_early = (positions < sampling.min_length)[row, None]
    scores = supported(jnp.where(is_stop & is_early, -jnp.inf, edited), sampling, row, ALL)
    noise = gumbel_at(sampling.seed, positions, tokens, TARGET_STREAM)[row]
    noisy = scores + jnp.where(by_row.temperature[:, None] > 0, noise, 0)
    values, places = best_of(noisy, width, ALL)
    weights = draft_weights(noisy, values, by_row.temperature, DRAFT_TAU)
    ids = jnp.take_along_axis(at, places, axis=1)
    return ids.reshape(R, P, width), weights.reshape(R, P, width)


def edited_at(
    logits: Float[jax.Array, "R C"],
    tokens: Int[jax.Array, "R C"],
    seen: Int[jax.Array, "R C"],
    sampling: Sampling,
) -> Float[jax.Array, "R C"]:
    """Applies penalties and biases to the logits of some tokens."""
    is_biased = sampling.bias_ids[:, :, None] == tokens[:, None]
    bias = jnp.where(is_biased, sampling.bias_values[:, :, None], 0).sum(axis=1)
    return penalized(logits, seen, sampling) + bias


def kernel_rank(
    kernels: Kernels,
    logits: Float[jax.Array, "R P C"],
    tokens: Int[jax.Array, "R C"],
    counts: Int[jax.Array, "slots vocab"],
    slots: Int[jax.Array, " R"],
    positions: Int[jax.Array, " R"],
    sampling: Sampling,
    width: int,
) -> tuple[Int[jax.Array, "R P width"], Float[jax.Array, "R P width"]]:
    R, P, _ = logits.shape
    seen = counts_alone(counts, jnp.repeat(slots, P))
    ids, weights, _ = kernels.sampling.rank(
        *(logits, seen, positions, sampling, positions, TARGET_STREAM, width, False, tokens),
        tau=DRAFT_TAU,
        tiles=kernels.tiles.sampling.of(rows=R * P),
    )
    return ids, weights


rank = kernel_or_reference(kernel_rank, plain_rank)
