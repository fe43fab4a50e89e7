"""Brackets of the top-k / top-p threshold, from maxima and a sample (Triton).

The bracket is nearly always right. A wrong bracket costs time only, so results need not match the
Pallas kernel bit for bit.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.triton_gpu.sampling.logits_processing import (
    LOWEST,
    key_of,
    score_of,
    scores_of,
    sums_of,
    weight_of,
)

_RUN = tl.constexpr(8)  # consecutive tokens of a sample: 32 bytes
_STEPS = tl.constexpr(13)
_SIGMAS = tl.constexpr(4.0)
_ROUNDING = tl.constexpr(1e-5)  # far above the rounding error of the sums


class _Sample(NamedTuple):
    """Logits and weights of sampled tokens."""

    x: Any
    weights: Any


@triton.jit
def bracket_threshold(peaks, masses, bounds, source, sampled: tl.constexpr, sizes: tl.constexpr):
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
      sizes: Sizes of the arrays.
    """
    weight, highest = bounds.weight, bounds.highest
    low, high = bounds.low, bounds.high
    best = score_of(peaks)
    best_weight = tl.where(peaks > LOWEST, weight_of(best, highest, 1.0), 0.0)
    whole = best_weight * masses
    sample, scale = _sample(source, bounds, sampled, sizes)
    tail = tl.maximum(bounds.total - weight, 0.0)
    # No token of the sample is below the floor, and the threshold seldom is.
    floor = tl.min(tl.where(sample.x > -float("inf"), sample.x, highest))
    floor = tl.maximum(floor, score_of(bounds.low))
    below, above = floor, highest  # bracket of the threshold that is too low
    under, over = floor, highest  # bracket of the threshold that is high enough
    for _ in range(_STEPS):
        lower, upper = (below + above) * 0.5, (under + over) * 0.5
        is_peak = best > lower
        num_peaks, peak_weight, whole_weight, _ = sums_of(
            is_peak.to(tl.float32),
            tl.where(is_peak, best_weight, 0.0),
            tl.where(best > upper, whole, 0.0),
            best_weight,
        )
        below_lower, above_lower, below_upper, above_upper = sums_of(
            tl.where(sample.x <= lower, sample.weights, 0.0),
            (sample.x > lower).to(tl.float32),
            tl.where(sample.x <= upper, sample.weights, 0.0),
            (sample.x > upper).to(tl.float32),
        )
        _, max_below, fewest, _ = _estimate(lower, below_lower, above_lower, scale, bounds, tail)
        is_low = (num_peaks >= bounds.most) | (fewest >= bounds.most) | (max_below < tail)
        is_low |= peak_weight > weight * (1 + _ROUNDING)
        low = tl.where(is_low, key_of(lower) + 1, low)
        below, above = tl.where(is_low, lower, below), tl.where(is_low, above, lower)

        least, _, _, largest = _estimate(upper, below_upper, above_upper, scale, bounds, tail)
        is_high = (whole_weight < weight * (1 - _ROUNDING)) | (least > tail)
        is_high &= largest < bounds.most
        high = tl.where(is_high, key_of(upper), high)
        under, over = tl.where(is_high, under, upper), tl.where(is_high, upper, over)
    return tl.minimum(tl.maximum(low, bounds.low), high), high


@triton.jit
def _sample(source, bounds, sampled: tl.constexpr, sizes: tl.constexpr):
    """Loads a sample of a row, and the number of tokens that each sampled token represents."""
    lane = tl.arange(0, sampled)
    ids = lane // _RUN * (_RUN * tl.cdiv(sizes.vocab, sampled)) + lane % _RUN
    raw, x = scores_of(ids, source.inputs, source.row, source.params, sizes)
    is_token = ids < sizes.vocab
    x = tl.where(is_token, x, -float("inf"))
    scale = sizes.vocab / tl.sum(is_token.to(tl.int32)).to(tl.float32)
    return _Sample(x, weight_of(x, bounds.highest, 1.0)), scale


@triton.jit
def _estimate(threshold, below, above, scale, bounds, tail):
    """Estimates bounds of the weight below a threshold and of the number of tokens above it.

    Args:
      threshold: The threshold, as a logit.
      below, above: Weight of the sample up to the threshold, and number of its tokens above it.
      scale: Number of tokens that each sampled token represents.
      bounds: Result of `bounds_of`.
      tail: Total weight minus the weight bound of the threshold.
    """
    below, above = scale * below, scale * above
    error = _SIGMAS * tl.sqrt((scale - 1) * weight_of(threshold, bounds.highest, 1.0) * tail)
    error += _ROUNDING * 0.2 * bounds.total
    spread = _SIGMAS * tl.sqrt((scale - 1) * bounds.most.to(tl.float32))
    return below - error, below + error, above - spread, above + spread
