"""Acceptance model: predicts the accepted draft tokens of each request.

The log odds of acceptance of a request's draft tokens are those of all requests
(`acceptance_prior.py`) plus the request's offset, which is the same at all depths and for all
families of shapes. The offset has a normal distribution, whose variance between requests is learned
from finished requests. A step updates both estimates in proportion to their uncertainty. If
requests differ, an unusual one is recognised soon; if all are alike, noise is not taken for a
difference. Depths below a rejected draft token, or below the tier's last level, are unobserved and
change nothing.

Deep draft tokens have a higher rate than the mean over all requests: a request whose first draft
tokens were accepted is more likely to have a high rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float64, Int64

from shared.engine.adaptive.acceptance_prior import (
    FIRST_DEPTH,
    WALK,
    PriorState,
    SharedPrior,
    age,
    learn,
    logit_shrinkage,
    sigmoid,
)
from shared.engine.adaptive.exploration import DraftForecast, TierArrays, exploration_variance
from shared.engine.adaptive.tiers import Tier, families_of
from shared.engine.jit import compiled

OWN_WALK = 0.003
"""Fraction of the estimate of a request's offset that is forgotten per step."""


class ExpectedTokens(NamedTuple):
    """Predicted result of a step of each tier, over all its rows.

    Attributes:
      tokens: Tokens if every row drafts.
      next_tokens: Tokens in the next step, in which rows whose last step was plain draft nothing.
      trial_gain: `trial_gain[a][b]`: how far a trial of tier a is expected to move the estimate of
        speed(a) - speed(b), as a standard deviation in tokens/s; 0 if a can never be as fast as b
        is estimated to be, or if no tier can be as fast as the fastest.
      trial_lifetime_steps: Steps after which the information from a trial is forgotten.
    """

    tokens: Float64[np.ndarray, " tiers"]
    next_tokens: Float64[np.ndarray, " tiers"]
    trial_gain: Float64[np.ndarray, "tiers tiers"]
    trial_lifetime_steps: Float64[np.ndarray, " tiers"]


@compiled
def _learn(
    rows: Int64[np.ndarray, " B"],
    drafted: Int64[np.ndarray, " B"],
    accepted: Int64[np.ndarray, " B"],
    log_odds: Float64[np.ndarray, " D"],
    slopes: Float64[np.ndarray, " D"],
    variances: Float64[np.ndarray, " D"],
    shared_variance: float,
    request_variance: float,
    estimates: Float64[np.ndarray, "requests 3"],
    sums: Float64[np.ndarray, "6 D"],
    moves: Float64[np.ndarray, " B"],
) -> None:
    """Ages the offsets of requests by one step, and updates them from their draft tokens.

    Args:
      rows: Rows of the requests in `estimates`.
      drafted: Drafted depths of each row.
      accepted: Accepted draft tokens of each row.
      log_odds, slopes, variances: Values of the family, see `SharedPrior`.
      shared_variance: Variance of the log odds that all depths share.
      request_variance: Variance of log odds between requests.
      estimates: Offset of each request, its variance, and its covariance with the log odds that all
        depths share.
      sums: Zeros; filled with the input of `learn`.
      moves: Filled with the shift of the shared log odds by each row.
    """
    for i in range(len(rows)):
        offset, variance, between = estimates[rows[i]]
        offset *= 1 - OWN_WALK / 2
        between *= 1 - OWN_WALK / 2
        variance += OWN_WALK * (request_variance - variance)
        # Total variance, and the covariance of each part with it.
        of_row, of_all, moved = variance + between, max(shared_variance + between, 0.0), 0.0
        both = max(of_row, 0.0) + of_all
        share = of_all / shared_variance  # change per change of the shared log odds
        # Remaining variance once the shared log odds are known.
        apart = max(variance - between**2 / shared_variance, 0.0)
        for d in range(min(accepted[i] + 1, drafted[i])):
            won = 1.0 if d < accepted[i] else 0.0
            a, center = slopes[d], log_odds[d] + slopes[d] * (offset + moved)
            known = logit_shrinkage(a * a * apart)
            sums[0, d] += share
            sums[1, d] += share * share
            sums[2, d] += share * won
            sums[3, d] += share * sigmoid(known * center)
            sums[4, d] += share * known
            sums[5, d] += share * a * moved * share
            known = logit_shrinkage(a * a * (both - shared_variance) + variances[d])
            p = sigmoid(known * center)
            error, information = a * known * (won - p), (a * known) ** 2 * p * (1 - p)
            offset += of_row * error
            moved += of_all * error
            variance -= of_row**2 * information
            between -= of_row * of_all * information
            shrunk = 1 - both * information
            both, of_row, of_all = both * shrunk, of_row * shrunk, of_all * shrunk
        learnt = estimates[rows[i]]
        learnt[0], learnt[1], learnt[2] = offset, variance, between
        moves[i] = moved


@compiled
def _follow(
    rows: Int64[np.ndarray, " B"],
    moves: Float64[np.ndarray, " B"],
    moved: float,
    before: float,
    after: float,
    estimates: Float64[np.ndarray, "requests 3"],
) -> None:
    """Adjusts rows to the information that other rows gave, because only the sum of offset and
    shared log odds is observed.

    Args:
      rows: Rows of the requests.
      moves: Shift of the shared log odds by each row alone.
      moved, before, after: Shift by all rows, and the variance before and after it.
      estimates: See `_learn`.
    """
    for i in range(len(rows)):
        estimates[rows[i], 0] += estimates[rows[i], 2] / before * (moved - moves[i])
        estimates[rows[i], 2] *= min(after / before, 1.0)


@compiled
def _learn_step(
    rows: Int64[np.ndarray, " B"],
    drafted: Int64[np.ndarray, " B"],
    accepted: Int64[np.ndarray, " B"],
    depth: int,
    family: int,
    state: PriorState,
    request_variance: float,
    estimates: Float64[np.ndarray, "requests 3"],
) -> None:
    """Updates the estimates of requests and of all together from a step; see `_learn`.

    It is one loop, because a call costs as much as the loop of a small batch.
    """
    sums, moves = np.zeros((6, state.log_odds.shape[1])), np.empty(len(rows))
    age(state)
    before = state.covariance[0, 0]
    _learn(
        rows,
        np.minimum(drafted, depth),
        accepted,
        state.log_odds[family],
        state.slopes[family],
        state.variances[family],
        before,
        request_variance,
        estimates,
        sums,
        moves,
    )
    moved = learn(family, sums, state)
    _follow(rows, moves, moved, before, state.covariance[0, 0], estimates)


@compiled
def _forecast(
    log_odds: Float64[np.ndarray, " D"],
    slopes: Float64[np.ndarray, " D"],
    offset: float,
    variance: float,
    rate: Float64[np.ndarray, " D"],
) -> None:
    """Fills the acceptance rate of each depth, given that all earlier ones were accepted."""
    for d in range(len(rate)):
        a = slopes[d]
        known = logit_shrinkage(a * a * variance)
        rate[d] = sigmoid(known * (log_odds[d] + a * offset))
        gain = variance * a * known
        offset += gain * (1 - rate[d])
        variance -= gain * gain * rate[d] * (1 - rate[d])


@compiled
def _best(
    survivals: Float64[np.ndarray, "B D"], drafted: Int64[np.ndarray, " B"], count: int
) -> float:
    """Returns the sum of the `count` best draft nodes of a batch of chains."""
    values, size = np.empty(drafted.sum()), 0
    for i in range(len(drafted)):
        values[size : size + drafted[i]] = survivals[i, : drafted[i]]
        size += drafted[i]
    return np.sort(values)[max(size - count, 0) :].sum()


@compiled
def _expect(
    rows: Int64[np.ndarray, " B"],
    most: Int64[np.ndarray, " B"],
    is_after_off: Bool[np.ndarray, " B"],
    estimates: Float64[np.ndarray, "requests 3"],
    log_odds: Float64[np.ndarray, "F D"],
    slopes: Float64[np.ndarray, "F D"],
    shared_variance: float,
    tiers: TierArrays,
    expected: DraftForecast,
) -> None:
    """Fills the forecast.

    Args:
      rows: Rows of the requests.
      most: Maximum useful draft tokens of each row.
      is_after_off: True for rows whose last step was plain.
      estimates: Same as in `_learn`.
      log_odds, slopes, shared_variance: See `_learn`.
      tiers: The tiers.
      expected: Filled.
    """
    (F, D), B = log_odds.shape, len(rows)
    for i in range(B):
        rate, reached = expected.rates[i], expected.reached[i]
        offset, variance, between = estimates[rows[i]]
        together = max(variance + shared_variance + 2 * between, 0.0)
        for f in range(F):
            _forecast(log_odds[f], slopes[f], offset, together, rate[f])
            reached[f, 0] = 1.0
            for d in range(D):
                reached[f, d + 1] = reached[f, d] * rate[f, d]
        for t in range(len(tiers.depths)):
            f, deepest = tiers.families[t], min(tiers.depths[t], most[i])
            count = reached[f, : deepest + 1].sum()
            expected.tokens[0, t] += count
            expected.tokens[1, t] += 1.0 if is_after_off[i] else count
    chains = expected.reached[:, 0, 1:]
    for t in range(len(tiers.depths)):
        budget = tiers.budgets[t]
        if budget >= 0:
            drafted = np.minimum(most, tiers.depths[t])
            ready = np.where(is_after_off, 0, drafted)
            expected.tokens[0, t] = B + _best(chains, drafted, budget)
            expected.tokens[1, t] = B + _best(chains, ready, budget)


@compiled
def _predict(
    rows: Int64[np.ndarray, " B"],
    most: Int64[np.ndarray, " B"],
    is_after_off: Bool[np.ndarray, " B"],
    estimates: Float64[np.ndarray, "requests 3"],
    log_odds: Float64[np.ndarray, "F D"],
    slopes: Float64[np.ndarray, "F D"],
    covariance: Float64[np.ndarray, "n n"],
    families: Int64[np.ndarray, " tiers"],
    depths: Int64[np.ndarray, " tiers"],
    budgets: Int64[np.ndarray, " tiers"],
    seconds: Float64[np.ndarray, " tiers"],
) -> tuple[ExpectedTokens, Float64[np.ndarray, "B D"]]:
    """Returns the result of `AcceptanceModel.predict`.

    It is one loop, because a call costs as much as the loop of a small batch.
    """
    B, (F, D), count = len(rows), log_odds.shape, len(depths)
    tiers = TierArrays(families, depths, budgets)
    expected = DraftForecast(np.empty((B, F, D)), np.empty((B, F, D + 1)), np.zeros((2, count)))
    _expect(
        rows,
        most,
        is_after_off,
        estimates,
        log_odds,
        slopes,
        covariance[0, 0],
        tiers,
        expected,
    )
    narrowed, learnt = np.zeros((count, count)), np.zeros(count)
    exploration_variance(expected, most, seconds, slopes, covariance, tiers, narrowed, learnt)
    tokens, next_tokens = expected.tokens
    lifetime = learnt / (WALK * FIRST_DEPTH)
    outcome = ExpectedTokens(tokens, next_tokens, np.sqrt(narrowed), lifetime)
    return outcome, expected.reached[:, 0, 1:]


class AcceptanceModel:
    """Acceptance estimates of all running requests, and of all requests together.

    Args:
      tiers: The tiers to choose from.

    Attributes:
      population: Estimates over all requests.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        families, candidates = families_of(tiers)
        self._families = np.array(families)
        self._depths = np.array([tier.depth for tier in tiers])
        depth = int(self._depths.max())
        self._estimates = np.zeros((1, 3))
        self.population = SharedPrior(candidates, depth)
        self._tiers = tiers
        self._budgets_of: dict[int, Int64[np.ndarray, " tiers"]] = {}
        self._rows: dict[int, int] = {}
        self._free: list[int] = []

    def rows_of(self, request_ids: Sequence[int]) -> Int64[np.ndarray, " B"]:
        """Returns the rows with the estimates of requests; a new request gets a new row."""
        row_of = self._rows
        rows = [row_of[i] if i in row_of else self._new_row(i) for i in request_ids]
        return np.array(rows, np.int64)

    def _new_row(self, request_id: int) -> int:
        if not self._free:
            count = len(self._estimates)
            self._free = list(range(2 * count - 1, count - 1, -1))
            self._estimates = np.concatenate([self._estimates, np.zeros_like(self._estimates)])
        row = self._rows[request_id] = self._free.pop()
        self._estimates[row] = 0.0, self.population.request_variance, 0.0
        return row

    @property
    def is_empty(self) -> bool:
        """True if no request has a row."""
        return not self._rows

    def forget(self, request_id: int) -> None:
        """Frees the row of a request that ended; its effect on the population stays."""
        if (row := self._rows.pop(request_id, None)) is not None:
            self._free.append(row)
            self.population.ended(*self._estimates[row, :2].tolist())

    def learn(
        self,
        rows: Int64[np.ndarray, " B"],
        tier: int,
        drafted: Int64[np.ndarray, " B"],
        accepted: Int64[np.ndarray, " B"],
    ) -> None:
        """Updates the estimates from a step.

        Args:
          rows: Result of `rows_of`.
          tier: Tier of the step; a plain step only ages the estimates.
          drafted: Draft tokens of each row; 0 gives no information.
          accepted: Accepted draft tokens; -1 gives no information.
        """
        _learn_step(
            rows,
            drafted,
            accepted,
            self._tiers[tier].depth,
            self._families[tier],
            self.population.state,
            self.population.request_variance,
            self._estimates,
        )

    def warm_up(self) -> None:
        """Compiles the loops in advance; changes no estimate."""
        other, none = AcceptanceModel(self._tiers), np.zeros(1, np.int64)
        rows = other.rows_of([0])
        other.learn(rows, 0, none, none)
        other.predict(rows, none, none > 0, 1, [1.0] * len(self._tiers))

    def _budgets(self, batch: int) -> Int64[np.ndarray, " tiers"]:
        if batch not in self._budgets_of:
            budgets = [
                tier.shape(batch).rows - batch if tier.share < 1 and tier.width == 1 else -1
                for tier in self._tiers
            ]
            self._budgets_of[batch] = np.array(budgets)
        return self._budgets_of[batch]

    def predict(
        self,
        rows: Int64[np.ndarray, " B"],
        most: Int64[np.ndarray, " B"],
        is_after_off: Bool[np.ndarray, " B"],
        batch: int,
        seconds: Sequence[float],
    ) -> tuple[ExpectedTokens, Float64[np.ndarray, "B D"]]:
        """Predicts the result of a step of each tier.

        Args:
          rows: Result of `rows_of`.
          most: Maximum useful draft tokens of each row.
          is_after_off: True for rows whose last step was plain: they draft nothing in their next
            one.
          batch: Rows of the programs.
          seconds: Time of a step of each tier.

        Returns:
          The prediction for the batch; and for each row and depth, the probability that a draft
          token of a chain is accepted with all earlier ones.
        """
        known = self.population
        return _predict(
            rows,
            most,
            is_after_off,
            self._estimates,
            known.log_odds,
            known.slopes,
            known.covariance,
            self._families,
            self._depths,
            self._budgets(batch),
            np.asarray(seconds),
        )
