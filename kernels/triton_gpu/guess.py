"""Guesses of two scores around the border of a row's support, in Triton.

They rest on the best token of each group and on a sample of the row, and are right nearly always.
They decide nothing but the time, so nothing here need have the same bits in the other language.
"""

import triton
import triton.language as tl

from kernels.triton_gpu.scores import LOWEST, key_of, score_of, scores_of, weight_of

_RUN = tl.constexpr(8)  # tokens of a sample that lie side by side: 32 bytes
_STEPS = tl.constexpr(13)
_SIGMAS = tl.constexpr(4.0)
_ROUNDING = tl.constexpr(1e-5)  # far more than the sums err by


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
    most, weight, highest, total, lowest, uppermost = bounds
    low, high = lowest, uppermost
    best = score_of(peaks)
    own = tl.where(peaks > LOWEST, weight_of(best, highest, 1.0), 0.0)
    whole = own * masses
    x, num_sampled = _sample(source, sampled, sizes)
    sample = x, weight_of(x, highest, 1.0), sizes[0] / num_sampled
    tail = tl.maximum(total - weight, 0.0)
    # No token of the sample lies below the floor, and the border seldom does.
    floor = tl.min(tl.where(x > -float("inf"), x, highest))
    floor = tl.maximum(floor, score_of(lowest))
    below, above = floor, highest  # of the border that is too low
    under, over = floor, highest  # of the one that is high enough
    for _ in range(_STEPS):
        middle = (below + above) * 0.5
        least, most_below, fewest, _ = _estimate(middle, sample, bounds, tail)
        is_peak = best > middle
        is_low = (tl.sum(is_peak.to(tl.int32)) >= most) | (fewest >= most) | (most_below < tail)
        is_low |= tl.sum(tl.where(is_peak, own, 0.0)) > weight * (1 + _ROUNDING)
        low = tl.where(is_low, key_of(middle) + 1, low)
        below, above = tl.where(is_low, middle, below), tl.where(is_low, above, middle)

        middle = (under + over) * 0.5
        least, most_below, _, largest = _estimate(middle, sample, bounds, tail)
        is_high = tl.sum(tl.where(best > middle, whole, 0.0)) < weight * (1 - _ROUNDING)
        is_high = (is_high | (least > tail)) & (largest < most)
        high = tl.where(is_high, key_of(middle), high)
        under, over = tl.where(is_high, under, middle), tl.where(is_high, middle, over)
    return tl.minimum(tl.maximum(low, lowest), high), high


@triton.jit
def _sample(source, sampled: tl.constexpr, sizes: tl.constexpr):
    """Scores of tokens from all over the vocabulary, and how many they are."""
    rows, asked, row, wish = source
    lane = tl.arange(0, sampled)
    ids = lane // _RUN * (_RUN * tl.cdiv(sizes[0], sampled)) + lane % _RUN
    raw, x = scores_of(ids, rows, asked, row, wish, sizes)
    is_token = ids < sizes[0]
    return tl.where(is_token, x, -float("inf")), tl.sum(is_token.to(tl.int32)).to(tl.float32)


@triton.jit
def _estimate(border, sample, bounds, tail):
    """The least and the most weight below a border, and the least and the most tokens above it."""
    x, weights, scale = sample
    most, _, highest, total, _, _ = bounds
    below = scale * tl.sum(tl.where(x <= border, weights, 0.0))
    error = _SIGMAS * tl.sqrt((scale - 1) * weight_of(border, highest, 1.0) * tail)
    error += _ROUNDING * 0.2 * total
    above = scale * tl.sum((x > border).to(tl.int32)).to(tl.float32)
    spread = _SIGMAS * tl.sqrt((scale - 1) * most.to(tl.float32))
    return below - error, below + error, above - spread, above + spread
