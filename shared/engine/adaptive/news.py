"""What a few steps of a tier would tell of all requests: by how much beliefs of speeds would move.

What the steps will show is not known, but by how much it will narrow what is believed is: a depth
that is shown takes from the covariance of everything that varies with it. What it takes from the
variance of the difference of two speeds is the variance of what will then be believed of it.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float64, Int64

from shared.engine.compiled import compiled


@compiled
def add_news(
    news: Float64[np.ndarray, "tiers tiers"],
    shrinks: Float64[np.ndarray, " tiers"],
    gains: Float64[np.ndarray, "more n"],
    told: Float64[np.ndarray, "F D"],
    slopes: Float64[np.ndarray, "F D"],
    covariance: Float64[np.ndarray, "n n"],
    families: Int64[np.ndarray, " tiers"],
    depths: Int64[np.ndarray, " tiers"],
) -> None:
    """Adds the variance that steps of each tier take from its distance to each other one.

    Args:
      shrinks: Added to: what they take from the variance of the last of `gains`.
      gains: By what is believed: the speed of each tier, and last what all depths share.
      told: What the steps tell of the log odds of each family and depth.
      slopes, covariance: Of `Population`.
    """
    (F, D), wanted = slopes.shape, len(gains)
    # Covariances of each depth's log odds with those of the others, and with what is wanted.
    moved = np.empty((D, D + wanted))
    column = np.empty(covariance.shape[1])
    for f in range(F):
        for d in range(D):
            for j in range(len(column)):
                column[j] = slopes[f, d] * covariance[d, j]
                if f > 0:
                    column[j] += covariance[f * D + d, j]
            for e in range(D):
                moved[d, e] = slopes[f, e] * column[e] + (column[f * D + e] if f > 0 else 0.0)
            for t in range(wanted):
                moved[d, D + t] = (gains[t] * column).sum()
        _add_family(news, shrinks, moved, told[f], families == f, depths)


@compiled
def _add_family(
    news: Float64[np.ndarray, "tiers tiers"],
    shrinks: Float64[np.ndarray, " tiers"],
    moved: Float64[np.ndarray, "D more"],
    told: Float64[np.ndarray, " D"],
    is_one: Bool[np.ndarray, " tiers"],
    depths: Int64[np.ndarray, " tiers"],
) -> None:
    """Adds what the tiers of one family tell, each as deep as it is."""
    D, tiers = len(told), len(news)
    for d in range(D):
        taken = told[d] / (1 + told[d] * moved[d, d])
        for t in range(tiers):
            if is_one[t] and depths[t] > d:
                shrinks[t] += taken * moved[d, -1] ** 2
                for other in range(tiers):
                    apart = moved[d, D + t] - moved[d, D + other]
                    news[t, other] += taken * apart * apart
        for e in range(d + 1, D):
            for j in range(d + 1, moved.shape[1]):
                moved[e, j] -= taken * moved[d, e] * moved[d, j]
