"""What a request's drafts are worth: by its own rates of each depth, and those of all requests.

What was observed of a request is counted as tries and successes, beside the successes that the
rates of the population foresaw. A depth below a failed draft, or below the tier's last, was not
observed and counts as neither. A request has one factor on the odds of each depth, by how far it
did better than was foreseen in whatever was tried, so what it showed with chains holds for trees; a
depth at which it has shown nothing takes the factor of the one before. Counts age as those of the
population.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from shared.engine.adaptive.population import Population, better, factor_of
from shared.engine.adaptive.tiers import Tier, families_of
from shared.engine.compiled import compiled

OWN_TRIES = 3.0
"""How firmly a request is believed to be as the population."""

OWN_WALK = 0.002
"""By how much the inverse number of a request's tries grows in a step."""

PROBE_STEPS = 3
"""Steps until a tier that is tried has shown something: a cold one, and overlap."""


@dataclass(frozen=True)
class Expected:
    """Tokens that a step gives, over all its rows, by tier.

    Attributes:
      warm: Where every row drafts.
      now: Where rows that are cold give the target's own token alone.
      news: For a tier, and another one: by how much a few steps of the first would change what is
        believed of the difference of their speeds, a standard deviation, in tokens a second; 0
        where the first can never be as fast as the other is believed to be.
    """

    warm: list[float]
    now: list[float]
    news: list[list[float]]


@compiled
def _learn(
    rows: Int64[np.ndarray, " B"],
    drafted: Int64[np.ndarray, " B"],
    accepted: Int64[np.ndarray, " B"],
    rates: Float64[np.ndarray, " D"],
    own: Float64[np.ndarray, "requests D 3"],
    tried: Float64[np.ndarray, " D"],
    won: Float64[np.ndarray, " D"],
) -> None:
    """Ages what is known of requests by a step, and counts what their drafts showed.

    Args:
      drafted: Levels that were drafted for each row.
      rates: What foresaw it.
      own: Tries, successes, and successes that were foreseen.
      tried, won: Zeros; filled with the sums over the rows.
    """
    for i in range(len(rows)):
        for d in range(own.shape[1]):
            own[rows[i], d] /= 1 + OWN_WALK * own[rows[i], d, 0]
        for d in range(min(accepted[i] + 1, drafted[i])):
            own[rows[i], d, 0] += 1
            own[rows[i], d, 1] += d < accepted[i]
            own[rows[i], d, 2] += rates[d]
            tried[d] += 1
            won[d] += d < accepted[i]


@compiled
def _shown(rates: Float64[np.ndarray, " F"], known: float, more: float) -> float:
    """Variance of what will be believed of log odds, known of some tries, after more.

    Args:
      rates: Of all families. What one shows moves the odds of all alike, and near 1 that is by far
        less than its own odds vary.
    """
    return more / ((known + 1) * (known + 1 + more)) / (rates * (1 - rates)).max()


@compiled
def _rates_of(
    own: Float64[np.ndarray, "D 3"],
    rates: Float64[np.ndarray, " D"],
    found: Float64[np.ndarray, " D"],
) -> None:
    """A request's rates in a family that has these in the population."""
    factor = 1.0
    for d in range(len(rates)):
        factor = factor_of(own[d], factor, OWN_TRIES)
        found[d] = better(rates[d], factor)


@compiled
def _best(
    survivals: Float64[np.ndarray, "B D"], drafted: Int64[np.ndarray, " B"], count: int
) -> float:
    """The sum of the `count` best drafts of a batch of chains."""
    found, size = np.empty(drafted.sum()), 0
    for i in range(len(drafted)):
        found[size : size + drafted[i]] = survivals[i, : drafted[i]]
        size += drafted[i]
    return np.sort(found)[max(size - count, 0) :].sum()


@compiled
def _add_news(
    news: Float64[np.ndarray, " tiers"],
    slope: Float64[np.ndarray, "tiers D"],
    tier: int,
    variances: Float64[np.ndarray, " d"],
) -> None:
    """Adds what log odds, as they vary, do to the distance from each other tier.

    Depths vary together: what is believed of one goes by the one before.
    """
    for other in range(len(news)):
        moved = 0.0
        for d in range(len(variances)):
            moved += (slope[tier, d] - slope[other, d]) * np.sqrt(variances[d])
        news[other] += moved**2


@compiled
def _expect(
    rows: Int64[np.ndarray, " B"],
    most: Int64[np.ndarray, " B"],
    is_cold: Bool[np.ndarray, " B"],
    own: Float64[np.ndarray, "requests D 3"],
    rates: Float64[np.ndarray, "F D"],
    weights: Float64[np.ndarray, "F D"],
    families: Int64[np.ndarray, " tiers"],
    depths: Int64[np.ndarray, " tiers"],
    budgets: Int64[np.ndarray, " tiers"],
    seconds: Float64[np.ndarray, " tiers"],
    tokens: Float64[np.ndarray, "2 tiers"],
    news: Float64[np.ndarray, "tiers tiers"],
    survivals: Float64[np.ndarray, "B D"],
) -> None:
    """Fills `tokens`, warm and now, and `news`, as variances.

    Args:
      most: Drafts that a row has use for.
      budgets: Drafts of the batch that a tier of chains verifies, the best; -1: all.
      survivals: Filled: the chance that a chain's draft is accepted with all before it.
    """
    (F, D), B, tiers = rates.shape, len(rows), len(depths)
    rate, alive, sums = np.zeros((F, D)), np.ones((F, D + 1)), np.ones((F, D + 1))
    slope, shared = np.zeros((tiers, D)), np.zeros((tiers, D))  # of speeds by log odds
    varies, fastest = np.empty(D), np.zeros(tiers)
    for i in range(B):
        for f in range(F):
            _rates_of(own[rows[i]], rates[f], rate[f])
            for d in range(D):
                alive[f, d + 1] = alive[f, d] * rate[f, d]
                sums[f, d + 1] = sums[f, d] + alive[f, d + 1]
        survivals[i] = alive[0, 1:]
        for t in range(tiers):
            f, deepest = families[t], min(depths[t], most[i])
            tokens[0, t] += sums[f, deepest]
            fastest[t] += (1 + deepest) / seconds[t]
            tokens[1, t] += 1.0 if is_cold[i] else sums[f, deepest]
            for d in range(D):
                gain = (sums[f, deepest] - sums[f, d]) * (1 - rate[f, d]) / seconds[t]
                slope[t, d] = gain if d < deepest else 0.0
                shared[t, d] += slope[t, d] * OWN_TRIES / (own[rows[i], d, 0] + OWN_TRIES)
        for t in range(tiers):
            f = families[t]
            for d in range(min(depths[t], most[i])):
                known, more = own[rows[i], d, 0] + OWN_TRIES, PROBE_STEPS * alive[f, d]
                varies[d] = _shown(rate[:, d], known, more)
            _add_news(news[t], slope, t, varies[: min(depths[t], most[i])])
    for t in range(tiers):
        if budgets[t] >= 0:
            drafted = np.minimum(most, depths[t])
            tokens[0, t] = B + _best(survivals, drafted, budgets[t])
            tokens[1, t] = B + _best(survivals, np.where(is_cold, 0, drafted), budgets[t])
        f = families[t]
        for d in range(depths[t]):
            more = PROBE_STEPS * B * alive[f, d]
            varies[d] = _shown(rates[:, d], weights[f, d], more)
        _add_news(news[t], shared, t, varies[: depths[t]])
    for t in range(tiers):
        for other in range(tiers):
            if fastest[t] <= tokens[0, other] / seconds[other]:
                news[t, other] = 0.0  # whatever it showed


class Acceptance:
    """What was learnt of every request that runs, and of all together.

    Args:
      tiers: What is chosen from.

    Attributes:
      population: What is known of all.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        families, tries = families_of(tiers)
        self._families = np.array(families)
        self._depths = np.array([tier.depth for tier in tiers])
        depth = int(self._depths.max())
        self._own = np.zeros((1, depth, 3))
        self.population = Population(tries, depth)
        self._tiers = tiers
        self._budgets_of: dict[int, Int64[np.ndarray, " tiers"]] = {}
        self._rows: dict[int, int] = {}
        self._free: list[int] = []

    def rows_of(self, request_ids: Sequence[int]) -> Int64[np.ndarray, " B"]:
        """The rows in which the evidence of requests stands; one that is new gets an empty one."""
        found = self._rows
        rows = [found[i] if i in found else self._new_row(i) for i in request_ids]
        return np.array(rows, np.int64)

    def _new_row(self, request_id: int) -> int:
        if not self._free:
            count = len(self._own)
            self._free = list(range(2 * count - 1, count - 1, -1))
            self._own = np.concatenate([self._own, np.zeros_like(self._own)])
        row = self._rows[request_id] = self._free.pop()
        self._own[row] = 0
        return row

    @property
    def is_empty(self) -> bool:
        """Whether no request runs that anything is known of."""
        return not self._rows

    def forget(self, request_id: int) -> None:
        """A request ended; what it showed of all stays."""
        if (row := self._rows.pop(request_id, None)) is not None:
            self._free.append(row)

    def learn(
        self,
        rows: Int64[np.ndarray, " B"],
        tier: int,
        drafted: Int64[np.ndarray, " B"],
        accepted: Int64[np.ndarray, " B"],
    ) -> None:
        """What a step showed.

        Args:
          rows: Of `rows_of`.
          tier: What was run; a plain step shows nothing, and ages what is known.
          drafted: Levels that were drafted for each row; 0 shows nothing of it.
          accepted: Drafts that were accepted.
        """
        family = self._families[tier]
        tried, won = np.zeros((2, self._own.shape[1]))
        _learn(rows, drafted, accepted, self.population.rates[family], self._own, tried, won)
        self.population.learn(family, tried, won)

    def warm_up(self) -> None:
        """Compiles what learns and expects, so that no step waits for it; nothing is learnt."""
        other, none = Acceptance(self._tiers), np.zeros(1, np.int64)
        rows = other.rows_of([0])
        other.learn(rows, 0, none, none)
        other.expect(rows, none, none > 0, 1, [1.0] * len(self._tiers))

    def _budgets(self, batch: int) -> Int64[np.ndarray, " tiers"]:
        if batch not in self._budgets_of:
            found = [
                tier.shape(batch).rows - batch if tier.share < 1 and tier.width == 1 else -1
                for tier in self._tiers
            ]
            self._budgets_of[batch] = np.array(found)
        return self._budgets_of[batch]

    def expect(
        self,
        rows: Int64[np.ndarray, " B"],
        most: Int64[np.ndarray, " B"],
        is_cold: Bool[np.ndarray, " B"],
        batch: int,
        seconds: Sequence[float],
    ) -> tuple[Expected, Float64[np.ndarray, "B D"]]:
        """What each tier would give.

        Args:
          rows: Of `rows_of`.
          most: Drafts that each row has use for.
          is_cold: Rows that draft nothing in their next step, whatever its tier.
          batch: Rows of the programs.
          seconds: Of a step of each tier.

        Returns:
          The tokens of the batch, and for each row and depth the chance that a draft of a chain is
          accepted with all before it.
        """
        tiers = len(self._depths)
        tokens, news = np.zeros((2, tiers)), np.zeros((tiers, tiers))
        survivals = np.empty((len(rows), self._own.shape[1]))
        _expect(
            rows, most, is_cold, self._own, self.population.rates, self.population.weights,
            self._families, self._depths, self._budgets(batch), np.array(seconds),
            tokens, news, survivals,
        )  # fmt: skip
        warm, now = tokens.tolist()
        return Expected(warm, now, np.sqrt(news).tolist()), survivals
