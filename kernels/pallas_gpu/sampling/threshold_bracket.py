"""Brackets of the top-k / top-p threshold, from maxima and a sample (Pallas, Triton backend).

The bracket is nearly always right. A wrong bracket costs time only, so results need not match the
Triton kernel bit for bit.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels.pallas_gpu.sampling.logits_processing import (
    LOWEST,
    key_of,
    score_of,
    scores_of,
    weight_of,
)

_RUN = 8  # consecutive tokens of a sample: 32 bytes
_STEPS = 13
_SIGMAS = 4.0
_ROUNDING = 1e-5  # far above the rounding error of the sums


class _Sample(NamedTuple):
    """Logits and weights of tokens from all over the vocabulary, and the number that each
    represents.
    """

    x: Any
    weights: Any
    scale: Any


def bracket_threshold(peaks, masses, bounds, source, sampled):
    """Returns two keys that bracket the threshold.

    A threshold is too low if too many groups have their best token above it, or too much weight. It
    is high enough if all groups together weigh too little. Group maxima do not decide if all tokens
    are about equally likely; then the sample estimates the weight below a threshold. The sample has
    many tokens, none of them heavier than the threshold's own, so its error is bounded.

    Args:
      peaks, masses: Maxima and weights of all groups, see `store_groups`.
      bounds: Result of `bounds_of`.
      source: Source of the logits.
      sampled: Maximum number of sampled tokens.
    """
    best = score_of(peaks)
    best_weight = jnp.where(peaks > LOWEST, weight_of(best, bounds.highest, 1.0), 0.0)
    whole = best_weight * masses
    sample = _sample(source, bounds, sampled)
    tail = jnp.maximum(bounds.total - bounds.weight, 0.0)
    # No token of the sample is below the floor, and the threshold seldom is.
    floor = jnp.min(jnp.where(sample.x > -jnp.inf, sample.x, bounds.highest))
    floor = jnp.maximum(floor, score_of(bounds.low))

    def step(_, spans):
        below, above, low, under, over, high = spans
        middle = (below + above) * 0.5
        _, max_below, fewest, _ = _estimate(middle, sample, bounds, tail)
        is_peak = best > middle
        is_low = is_peak.astype(jnp.int32).sum() >= bounds.most
        is_low |= (fewest >= bounds.most.astype(jnp.float32)) | (max_below < tail)
        is_low |= jnp.where(is_peak, best_weight, 0.0).sum() > bounds.weight * (1 + _ROUNDING)
        low = jnp.where(is_low, key_of(middle) + 1, low)
        below, above = jnp.where(is_low, middle, below), jnp.where(is_low, above, middle)

        middle = (under + over) * 0.5
        least, _, _, largest = _estimate(middle, sample, bounds, tail)
        is_high = jnp.where(best > middle, whole, 0.0).sum() < bounds.weight * (1 - _ROUNDING)
        is_high = (is_high | (least > tail)) & (largest < bounds.most.astype(jnp.float32))
        high = jnp.where(is_high, key_of(middle), high)
        under, over = jnp.where(is_high, under, middle), jnp.where(is_high, middle, over)
        return below, above, low, under, over, high

    spans = (floor, bounds.highest, bounds.low, floor, bounds.highest, bounds.high)
    _, _, low, _, _, high = lax.fori_loop(0, _STEPS, step, spans)
    return jnp.minimum(jnp.maximum(low, bounds.low), high), high


def _sample(source, bounds, sampled):
    vocab, lane = source.sizes.vocab, lax.iota(jnp.int32, sampled)
    ids = lax.div(lane, _RUN) * (_RUN * pl.cdiv(vocab, sampled)) + lax.rem(lane, _RUN)
    _, x = scores_of(ids, source.inputs, source.row, source.params, source.sizes)
    is_token = ids < vocab
    x = jnp.where(is_token, x, -jnp.inf)
    scale = vocab / is_token.astype(jnp.int32).sum().astype(jnp.float32)
    return _Sample(x, weight_of(x, bounds.highest, 1.0), scale)


def _estimate(threshold, sample, bounds, tail):
    """Estimates bounds of the weight below a threshold and of the number of tokens above it."""
    x, weights, scale = sample
    below = scale * jnp.where(x <= threshold, weights, 0.0).sum()
    error = _SIGMAS * jnp.sqrt((scale - 1) * weight_of(threshold, bounds.highest, 1.0) * tail)
    error += _ROUNDING * 0.2 * bounds.total
    above = scale * (x > threshold).astype(jnp.int32).sum().astype(jnp.float32)
    spread = _SIGMAS * jnp.sqrt((scale - 1) * bounds.most.astype(jnp.float32))
    return below - error, below + error, above - spread, above + spread
