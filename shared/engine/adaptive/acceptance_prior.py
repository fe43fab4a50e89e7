"""Acceptance rate by depth over all requests: a normal distribution over drifting log odds.

The state contains, for each depth, the log odds of a chain's draft token, and for each family of
trees and depth the difference of its log odds from a guess. The guess: if a single candidate misses
with probability m, a level of a tree misses like a number of independent candidates
(`Tier.independent_candidates`). Any observation therefore updates everything correlated with it:
neighbouring depths, and a tree through its chain. A tree that rarely misses gives little
information about its chain, because its log odds hardly depend on it.

A depth or family that is not tried keeps its last estimate, and its uncertainty grows back to the
initial value. Nothing is reset by a timer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float64

from shared.engine.jit import compiled

FIRST_DEPTH, DEEPER = 2.0, 1.0
"""Initial variance of log odds: of the first depth, and of the increment per depth."""

FAMILY, FAMILY_DEEPER = 0.25, 0.05
"""The same for the difference of a family of trees from its guess."""

WALK, FAMILY_WALK = 0.001, 0.0002
"""Fraction of the information that is forgotten per step, for chains and for families."""

REQUEST_VARIANCE, REQUEST_VARIANCE_COUNT = 1.0, 4.0
"""Initial variance of log odds between requests, and the number of requests that it counts as."""

MOST_REQUESTS = 50.0
"""Number of past requests over which the variance between requests is averaged."""

MOST_LOG_ODDS = 7.0
"""Bound of log odds in both directions."""

DAMPING = np.pi / 8
"""The mean of a logistic function over a normal distribution with variance v is about the logistic
function of mean / (1 + v * DAMPING) ** 0.5."""


@compiled
def sigmoid(log_odds: float) -> float:
    """Returns the probability p of log odds log(p / (1 - p))."""
    return 1 / (1 + np.exp(-log_odds))


@compiled
def logit_shrinkage(variance: float) -> float:
    """Returns the factor by which log odds of this variance shrink in the mean probability."""
    return 1 / np.sqrt(1 + DAMPING * variance)


@compiled
def _linked(log_odds: float, candidates: float) -> tuple[float, float]:
    """Returns the log odds of a level of `candidates` independent candidates, and the slope by
    those of one.
    """
    if candidates == 1:
        return log_odds, 1.0
    hit = sigmoid(log_odds)
    miss = (1 - hit) ** candidates
    return np.log((1 - miss) / miss), candidates * hit / (1 - miss)


class PriorState(NamedTuple):
    """Arrays of `SharedPrior`, updated in place.

    Attributes:
      mean, covariance: The distribution of the state.
      kept, drift: Fraction of the mean that one step keeps, and the covariance that it adds.
      candidates: Independent candidates of a level of each family.
      log_odds, slopes, variances: See `SharedPrior`.
    """

    mean: Float64[np.ndarray, " n"]
    covariance: Float64[np.ndarray, "n n"]
    kept: Float64[np.ndarray, " n"]
    drift: Float64[np.ndarray, "n n"]
    candidates: Float64[np.ndarray, " F"]
    log_odds: Float64[np.ndarray, "F D"]
    slopes: Float64[np.ndarray, "F D"]
    variances: Float64[np.ndarray, "F D"]


@compiled
def summarise(state: PriorState) -> None:
    """Fills log odds, slopes and variances of each family and depth from the distribution."""
    mean, covariance = state.mean, state.covariance
    F, D = state.log_odds.shape
    for f in range(F):
        for d in range(D):
            place, slope = f * D + d, 1.0
            state.log_odds[f, d], state.variances[f, d] = mean[d], covariance[d, d]
            if f > 0:
                state.log_odds[f, d], slope = _linked(mean[d], state.candidates[f])
                state.log_odds[f, d] += mean[place]
                between = slope * covariance[d, place]
                state.variances[f, d] = (
                    slope**2 * covariance[d, d] + 2 * between + covariance[place, place]
                )
            state.slopes[f, d] = slope


@compiled
def age(state: PriorState) -> None:
    """Increases the uncertainty by one step of drift."""
    for j in range(len(state.mean)):
        state.mean[j] *= state.kept[j]
        for k in range(len(state.mean)):
            kept = state.kept[j] * state.kept[k]
            state.covariance[j, k] = state.covariance[j, k] * kept + state.drift[j, k]
    summarise(state)


@compiled
def _moved(
    log_odds: float, known: float, variance: float, trials: float, won: float
) -> tuple[float, float]:
    """Returns the shift to the most likely log odds, and the information from these trials.

    Args:
      log_odds: Log odds before.
      known: `logit_shrinkage` of the differences between single trials.
      variance: Variance of the log odds.
      trials, won: Number of trials and successes.
    """
    moved, information = 0.0, 0.0
    for _ in range(20):
        p = sigmoid(known * (log_odds + moved))
        information = known**2 * trials * p * (1 - p)
        wrong = variance * known * (won - trials * p) - moved
        step = min(max(wrong / (1 + variance * information), -1.5), 1.5)
        moved += step
        if abs(step) < 1e-3:
            break
    return moved, information


@compiled
def learn(family: int, sums: Float64[np.ndarray, "6 D"], state: PriorState) -> float:
    """Updates the distribution from a step, depth by depth, because each one affects the later
    ones.

    Args:
      family: Family of the step's tier.
      sums: Sums over draft tokens by depth: of the fractions by which a row moves with all, of
        their squares, and weighted by these: successes, predicted probabilities, `logit_shrinkage`
        of rows, and the shift of the log odds by the row's earlier depths.
      state: The state.

    Returns:
      The shift of the shared log odds.
    """
    mean, covariance, slopes = state.mean, state.covariance, state.slopes
    D, before = sums.shape[1], mean.copy()
    column = np.empty(len(mean))
    for d in range(D):
        total, squares = sums[0, d], sums[1, d]
        if squares <= 0:
            break
        won, foreseen, known, shifted = sums[2:, d] / total
        place, slope = family * D + d, slopes[family, d]
        rest = squares / total - 1  # offsets of rows counteract the shared log odds
        for j in range(len(mean)):
            column[j] = slope * (covariance[j, d] + rest * covariance[j, 0])
        already = slope * (mean[d] - before[d] + rest * (mean[0] - before[0])) - shifted
        if family > 0:
            already += mean[place] - before[place]
            for j in range(len(mean)):
                column[j] += covariance[j, place]
        variance = slope * (column[d] + rest * column[0]) + (column[place] if family > 0 else 0.0)
        p = min(max(foreseen, 1e-4), 1 - 1e-4)
        now = np.log(p / (1 - p)) / known + already
        trials = total * total / squares  # effective number of independent trials
        moved, information = _moved(now, known, variance, trials, trials * won)
        for j in range(len(mean)):
            mean[j] += column[j] * moved / variance
            mean[j] = min(max(mean[j], -MOST_LOG_ODDS), MOST_LOG_ODDS)
        lost = information / (1 + variance * information)
        for j in range(len(mean)):
            for k in range(len(mean)):
                covariance[j, k] -= column[j] * column[k] * lost
    summarise(state)
    return mean[0] - before[0]


class SharedPrior:
    """Estimates over all requests.

    Args:
      candidates: Independent candidates of a level of each family; the first family are chains,
        with 1.
      depth: D, levels of the deepest tier.

    Attributes:
      state: The arrays.
      log_odds, slopes, variances: [F, D] of a draft token of an average request: log odds, their
        derivative by those of a chain, and their variance.
      covariance: Covariance of the state: log odds of chains by depth, then for each other family
        the difference from its guess.
      request_variance: Variance of log odds between requests.
    """

    def __init__(self, candidates: Sequence[float], depth: int) -> None:
        F, n = len(candidates), len(candidates) * depth
        first = np.zeros((n, n))
        shared = np.minimum(np.arange(depth)[:, None], np.arange(depth)[None, :])
        for f in range(F):
            place = slice(f * depth, (f + 1) * depth)
            single, deeper = (FAMILY, FAMILY_DEEPER) if f else (FIRST_DEPTH, DEEPER)
            first[place, place] = single + deeper * shared
        kept = np.sqrt(1 - np.repeat([WALK] + [FAMILY_WALK] * (F - 1), depth))
        self.log_odds, self.slopes, self.variances = np.zeros((3, F, depth))
        self.covariance = first.copy()
        self.state = PriorState(
            mean=np.zeros(n),
            covariance=self.covariance,
            kept=kept,
            drift=(1 - np.outer(kept, kept)) * first,
            candidates=np.array(candidates, np.float64),
            log_odds=self.log_odds,
            slopes=self.slopes,
            variances=self.variances,
        )
        self.request_variance, self._requests = REQUEST_VARIANCE, REQUEST_VARIANCE_COUNT
        summarise(self.state)

    def ended(self, offset: float, variance: float) -> None:
        """Updates the variance between requests from the offset of a finished one."""
        self._requests = min(self._requests + 1, MOST_REQUESTS)
        self.request_variance += (offset**2 + variance - self.request_variance) / self._requests
