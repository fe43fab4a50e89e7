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
      slopes, covariance: See `Population`.
      tiers: The tiers.
      narrowed: Filled: variance of the difference between the tier's speed and each other one's, in
        (tokens/s)^2; 0 if the tier can never be as fast as the other is estimated to be.
      learnt: Filled: variance of the log odds of the first depth, which all depths share.
    """
    F, D = slopes.shape
    count = len(seconds)
    gradients = np.zeros((count + 1, F * D))  # of speeds, by the estimated log odds
    gradients[count, 0] = 1.0  # last: the shared log odds
    information, fastest = np.zeros((F, D)), np.zeros(count)
    _add_rows(expected, most, seconds, slopes, tiers, gradients, information, fastest)
    narrowed[:], learnt[:] = 0.0, 0.0
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
                shared[d, D + t] = (gradients[t] * column).sum()
        is_family = tiers.families == f
        _add_family(narrowed, learnt, shared, information[f], is_family, tiers.depths)
    for t in range(count):
        for other in range(count):
            if fastest[t] <= expected.tokens[0, other] / seconds[other]:
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
    fastest: Float64[np.ndarray, " tiers"],
) -> None:
    """Sums over rows: derivatives of speeds by log odds, information of trials, and maximum
    speeds.
    """
    D = slopes.shape[1]
    for i in range(len(most)):
        rate, reached = expected.rates[i], expected.reached[i]
        for f in range(len(slopes)):
            for d in range(D):
                information[f, d] += TRIAL_STEPS * reached[f, d] * rate[f, d] * (1 - rate[f, d])
        for t in range(len(seconds)):
            f, deepest = tiers.families[t], min(tiers.depths[t], most[i])
            fastest[t] += (1 + deepest) / seconds[t]
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
