"""Guesses of two scores around the border of a row's support, in Triton.

They rest on the best token of each group and on a sample of the row, and are right nearly always.
They decide nothing but the time, so nothing here need have the same bits in the other language.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.triton_gpu.scores import LOWEST, key_of, score_of, scores_of, weight_of

_RUN = tl.constexpr(8)  # tokens of a sample that lie side by side: 32 bytes
_STEPS = tl.constexpr(13)
_SIGMAS = tl.constexpr(4.0)
_ROUNDING = tl.constexpr(1e-5)  # far more than the sums err by


class _Sample(NamedTuple):
    """Scores and weights of tokens from all over the vocabulary, and for how many each stands."""

    x: Any
    weights: Any
    scale: Any


@triton.jit
def guess(peaks, masses, bounds, source, sampled: tl.constexpr, sizes: tl.constexpr):
    """Two keys between which the border lies.

    Above a border that is too low too many groups have their best token, or too much weight; above
    one that is high enough all groups together weigh too little. Where that says nothing, because
    all tokens are about as likely, the sample says how much lies below a border: it is made of
    many tokens, none of them heavier than the border's own, so its error is known.

    Args:
      peaks, masses: Of all groups, see `store_groups`.
      bounds: Of `bounds_of`.
      source: Of the scores.
      sampled: Tokens of the sample, at most.
    """
    weight, highest = bounds.weight, bounds.highest
    low, high = bounds.low, bounds.high
    best = score_of(peaks)
    best_weight = tl.where(peaks > LOWEST, weight_of(best, highest, 1.0), 0.0)
    whole = best_weight * masses
    sample = _sample(source, bounds, sampled, sizes)
    tail = tl.maximum(bounds.total - weight, 0.0)
    # No token of the sample lies below the floor, and the border seldom does.
    floor = tl.min(tl.where(sample.x > -float("inf"), sample.x, highest))
    floor = tl.maximum(floor, score_of(bounds.low))
    below, above = floor, highest  # of the border that is too low
    under, over = floor, highest  # of the one that is high enough
    for _ in range(_STEPS):
        middle = (below + above) * 0.5
        least, most_below, fewest, _ = _estimate(middle, sample, bounds, tail)
        is_peak = best > middle
        is_low = (
            (tl.sum(is_peak.to(tl.int32)) >= bounds.most)
            | (fewest >= bounds.most)
            | (most_below < tail)
        )
        is_low |= tl.sum(tl.where(is_peak, best_weight, 0.0)) > weight * (1 + _ROUNDING)
        low = tl.where(is_low, key_of(middle) + 1, low)
        below, above = tl.where(is_low, middle, below), tl.where(is_low, above, middle)

        middle = (under + over) * 0.5
        least, most_below, _, largest = _estimate(middle, sample, bounds, tail)
        is_high = tl.sum(tl.where(best > middle, whole, 0.0)) < weight * (1 - _ROUNDING)
        is_high = (is_high | (least > tail)) & (largest < bounds.most)
        high = tl.where(is_high, key_of(middle), high)
        under, over = tl.where(is_high, under, middle), tl.where(is_high, middle, over)
    return tl.minimum(tl.maximum(low, bounds.low), high), high


@triton.jit
def _sample(source, bounds, sampled: tl.constexpr, sizes: tl.constexpr):
    lane = tl.arange(0, sampled)
    ids = lane // _RUN * (_RUN * tl.cdiv(sizes.vocab, sampled)) + lane % _RUN
    raw, x = scores_of(ids, source.inputs, source.row, source.wish, sizes)
    is_token = ids < sizes.vocab
    x = tl.where(is_token, x, -float("inf"))
    scale = sizes.vocab / tl.sum(is_token.to(tl.int32)).to(tl.float32)
    return _Sample(x, weight_of(x, bounds.highest, 1.0), scale)


@triton.jit
def _estimate(border, sample, bounds, tail):
    """The least and the most weight below a border, and the least and the most tokens above it."""
    x, weights, scale = sample
    below = scale * tl.sum(tl.where(x <= border, weights, 0.0))
    error = _SIGMAS * tl.sqrt((scale - 1) * weight_of(border, bounds.highest, 1.0) * tail)
    error += _ROUNDING * 0.2 * bounds.total
    above = scale * tl.sum((x > border).to(tl.int32)).to(tl.float32)
    spread = _SIGMAS * tl.sqrt((scale - 1) * bounds.most.to(tl.float32))
    return below - error, below + error, above - spread, above + spread
