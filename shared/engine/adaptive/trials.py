"""What a trial of a tier would tell of all requests: how far beliefs of speeds would move.

A trial is a few steps of a tier. What it will show is not known, but how much it will narrow the
beliefs is: each depth that is shown takes from the covariance of everything that varies with it.
What it takes from the variance of the difference of two speeds is the variance of what will then be
believed of that difference.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from shared.engine.compiled import compiled

TRIAL_STEPS = 3
"""Steps until a tier that is tried has shown something: the first after off drafts nothing, and
results come a step late."""


class Forecast(NamedTuple):
    """What is expected of the rows' drafts, by row, family and depth.

    Attributes:
      rates: The chance that a draft is accepted, given all before it.
      reached: The chance that all drafts before a depth are accepted; one more than depths.
      tokens: Of the batch by tier: where every row drafts, and in the next step.
    """

    rates: Float64[np.ndarray, "B F D"]
    reached: Float64[np.ndarray, "B F D1"]
    tokens: Float64[np.ndarray, "2 tiers"]


class TierArrays(NamedTuple):
    """The tiers, as arrays.

    Attributes:
      families: The number of each tier's family.
      depths: Drafts of its longest path.
      budgets: Drafts of the batch that a tier of chains verifies, the best; -1: all.
    """

    families: Int64[np.ndarray, " tiers"]
    depths: Int64[np.ndarray, " tiers"]
    budgets: Int64[np.ndarray, " tiers"]


@compiled
def trial_variances(
    expected: Forecast,
    most: Int64[np.ndarray, " B"],
    seconds: Float64[np.ndarray, " tiers"],
    slopes: Float64[np.ndarray, "F D"],
    covariance: Float64[np.ndarray, "n n"],
    tiers: TierArrays,
    narrowed: Float64[np.ndarray, "tiers tiers"],
    learnt: Float64[np.ndarray, " tiers"],
) -> None:
    """Fills what a trial of each tier would take from variances.

    Args:
      most: Drafts that a row has use for.
      seconds: Of a step.
      slopes, covariance: Of `Population`.
      narrowed: Filled: of the difference between the tier's speed and each other one's, in (tokens
        a second) squared; 0 where the tier can never be as fast as the other is believed to be.
      learnt: Filled: of the log odds of the first depth, which all depths share.
    """
    F, D = slopes.shape
    count = len(seconds)
    gradients = np.zeros((count + 1, F * D))  # of speeds, by the log odds that are believed
    gradients[count, 0] = 1.0  # last: of what all depths share
    information, fastest = np.zeros((F, D)), np.zeros(count)
    _add_rows(expected, most, seconds, slopes, tiers, gradients, information, fastest)
    narrowed[:], learnt[:] = 0.0, 0.0
    # Covariances of each depth's log odds with those of the others, and with the gradients.
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
                narrowed[t, other] = 0.0  # whatever the trial showed


@compiled
def _add_rows(
    expected: Forecast,
    most: Int64[np.ndarray, " B"],
    seconds: Float64[np.ndarray, " tiers"],
    slopes: Float64[np.ndarray, "F D"],
    tiers: TierArrays,
    gradients: Float64[np.ndarray, "more n"],
    information: Float64[np.ndarray, "F D"],
    fastest: Float64[np.ndarray, " tiers"],
) -> None:
    """Adds up, over rows, how speeds depend on log odds, what trials show, and the most speed."""
    D = slopes.shape[1]
    for i in range(len(most)):
        rate, reached = expected.rates[i], expected.reached[i]
        for f in range(len(slopes)):
            for d in range(D):
                information[f, d] += TRIAL_STEPS * reached[f, d] * rate[f, d] * (1 - rate[f, d])
        for t in range(len(seconds)):
            f, deepest = tiers.families[t], min(tiers.depths[t], most[i])
            fastest[t] += (1 + deepest) / seconds[t]
            below = 0.0  # drafts that are accepted at this depth and below it
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
    """Adds what trials of one family's tiers tell, one depth after the other, to each its own."""
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
