"""Value of exploration: expected change of the speed estimates by a trial of a tier.

A trial is a few steps of a tier. Its outcome is unknown, but the reduction of uncertainty is known:
each observed depth reduces the covariance of everything correlated with it. The variance that a
trial removes from the difference of two speeds is the variance of the later estimate of that
difference (law of total variance).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from shared.engine.jit import compiled

TRIAL_STEPS = 3
"""Steps until a trial of a tier has given information: the first step after plain decoding drafts
nothing, and results arrive one step late."""


class DraftForecast(NamedTuple):
    """Predicted acceptance by row, family and depth.

    Attributes:
      rates: Probability that a draft token is accepted, given all earlier ones.
      reached: Probability that all draft tokens before a depth are accepted; one more entry than
        depths.
      tokens: Tokens of the batch by tier: if every row drafts, and in the next step.
    """

    rates: Float64[np.ndarray, "B F D"]
    reached: Float64[np.ndarray, "B F D1"]
    tokens: Float64[np.ndarray, "2 tiers"]


class TierArrays(NamedTuple):
    """Tiers as arrays.

    Attributes:
      families: Family index of each tier.
      depths: Draft tokens of its longest path.
      budgets: Number of the batch's best draft tokens that a tier of chains verifies; -1 for all.
    """

    families: Int64[np.ndarray, " tiers"]
    depths: Int64[np.ndarray, " tiers"]
    budgets: Int64[np.ndarray, " tiers"]


@compiled
def contenders(
    expected: DraftForecast,
    most: Int64[np.ndarray, " B"],
    seconds: Float64[np.ndarray, " tiers"],
    tiers: TierArrays,
) -> Bool[np.ndarray, "tiers tiers"]:
    """Returns for each tier whether it can be faster than another one is estimated to be.

    With every draft token accepted, a tier is as fast as its cost allows.
    """
    count = len(seconds)
    can_win = np.empty((count, count), np.bool_)
    for t in range(count):
        longest = 0.0
        for i in range(len(most)):
            longest += 1 + min(tiers.depths[t], most[i])
        for other in range(count):
            speed = expected.tokens[0, other] / seconds[other]
            can_win[t, other] = longest / seconds[t] > speed
    return can_win


@compiled
def is_decided(
    can_win: Bool[np.ndarray, "tiers tiers"],
    tokens: Float64[np.ndarray, " tiers"],
    seconds: Float64[np.ndarray, " tiers"],
) -> bool:
    """Returns True if no tier can be faster than the fastest is estimated to be: no trial pays."""
    fastest = np.argmax(tokens / seconds)
    others = can_win[:, fastest].copy()
    others[fastest] = False
    return not others.any()


@compiled
def exploration_variance(
    expected: DraftForecast,
    most: Int64[np.ndarray, " B"],
    seconds: Float64[np.ndarray, " tiers"],
    slopes: Float64[np.ndarray, "F D"],
    covariance: Float64[np.ndarray, "n n"],
    tiers: TierArrays,
    narrowed: Float64[np.ndarray, "tiers tiers"],
    learnt: Float64[np.ndarray, " tiers"],
) -> None:
    """Fills the variances that a trial of each tier would remove.

    Args:
      expected: The forecast.
      most: Maximum useful draft tokens of each row.
      seconds: Time of a step by tier.
      slopes, covariance: See `SharedPrior`.
      tiers: The tiers.
      narrowed: Zeros; filled: variance of the difference between the tier's speed and each other
        one's, in (tokens/s)^2; 0 if the tier can never be as fast as the other is estimated to be,
        and for all tiers if no trial pays.
      learnt: Zeros; filled: variance of the log odds of the first depth, which all depths share.
    """
    can_win = contenders(expected, most, seconds, tiers)
    if is_decided(can_win, expected.tokens[0], seconds):
        return
    F, D = slopes.shape
    count = len(seconds)
    gradients = np.zeros((count + 1, F * D))  # of speeds, by the estimated log odds
    gradients[count, 0] = 1.0  # last: the shared log odds
    information = np.zeros((F, D))
    _add_rows(expected, most, seconds, slopes, tiers, gradients, information)
    # Covariances of each depth's log odds with those of other depths, and with the gradients.
    shared = np.empty((D, D + count + 1))
    column = np.empty(covariance.shape[1])
    for f in range(F):
        for d in range(D):
            for j in range(len(column)):
                column[j] = slopes[f, d] * covariance[d, j]
                if f > 0:
                    column[j] += covariance[f * D + d, j]
            for e in range(D):
                shared[d, e] = slopes[f, e] * column[e] + (column[f * D + e] if f > 0 else 0.0)
            for t in range(count + 1):
                # A gradient has entries for chains and for the tier's own family only.
                own, total = tiers.families[t] if t < count else 0, 0.0
                for e in range(D):
                    total += gradients[t, e] * column[e]
                    if own > 0:
                        total += gradients[t, own * D + e] * column[own * D + e]
                shared[d, D + t] = total
        is_family = tiers.families == f
        _add_family(narrowed, learnt, shared, information[f], is_family, tiers.depths)
    for t in range(count):
        for other in range(count):
            if not can_win[t, other]:
                narrowed[t, other] = 0.0  # whatever the outcome of the trial


@compiled
def _add_rows(
    expected: DraftForecast,
    most: Int64[np.ndarray, " B"],
    seconds: Float64[np.ndarray, " tiers"],
    slopes: Float64[np.ndarray, "F D"],
    tiers: TierArrays,
    gradients: Float64[np.ndarray, "more n"],
    information: Float64[np.ndarray, "F D"],
) -> None:
    """Sums over rows: derivatives of speeds by log odds, and information of trials."""
    D = slopes.shape[1]
    for i in range(len(most)):
        rate, reached = expected.rates[i], expected.reached[i]
        for f in range(len(slopes)):
            for d in range(D):
                information[f, d] += TRIAL_STEPS * reached[f, d] * rate[f, d] * (1 - rate[f, d])
        for t in range(len(seconds)):
            f, deepest = tiers.families[t], min(tiers.depths[t], most[i])
            below = 0.0  # accepted tokens at this depth and deeper
            for d in range(deepest - 1, -1, -1):
                below += reached[f, d + 1]
                part = below * (1 - rate[f, d]) / seconds[t]
                gradients[t, d] += part * slopes[f, d]
                if f > 0:
                    gradients[t, f * D + d] += part


@compiled
def _add_family(
    narrowed: Float64[np.ndarray, "tiers tiers"],
    learnt: Float64[np.ndarray, " tiers"],
    shared: Float64[np.ndarray, "D more"],
    information: Float64[np.ndarray, " D"],
    is_family: Bool[np.ndarray, " tiers"],
    depths: Int64[np.ndarray, " tiers"],
) -> None:
    """Adds the information of trials of one family's tiers, depth by depth."""
    D, count = len(information), len(narrowed)
    for d in range(D):
        taken = information[d] / (1 + information[d] * shared[d, d])
        for t in range(count):
            if is_family[t] and depths[t] > d:
                learnt[t] += taken * shared[d, -1] ** 2
                for other in range(count):
                    apart = shared[d, D + t] - shared[d, D + other]
                    narrowed[t, other] += taken * apart * apart
        for e in range(d + 1, D):
            for j in range(d + 1, shared.shape[1]):
                shared[e, j] -= taken * shared[d, e] * shared[d, j]
