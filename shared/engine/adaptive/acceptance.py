"""How often the draft of a depth is accepted, given those before it: of a request, and of all.

What was observed is counted as tries and successes. A depth below a failed draft, or below the
tier's last, was not observed and counts as neither. Counts age as the evidence of a random walk:
the inverse of their number grows by a constant a step, so that new steps count more, what was not
tried for long is uncertain again, and nothing is reset by a timer.

The population has one rate a depth, of a single candidate, which whatever runs tells of; a family
of trees misses a level as so many independent tries would (`Tier.tries`). Where that is not quite
so, the family has a factor on its odds, by how far it did better than foreseen, and a request has
one in the same way, so that what it showed in one family holds in every other. A depth at which a
request has shown nothing takes the factor of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from shared.engine.adaptive.tiers import Tier, families_of
from shared.engine.compiled import compiled

PRIOR_RATE, PRIOR_TRIES = 0.5, 2.0
"""What is believed of the first depth before anything was seen, and how firmly."""

OWN_TRIES = 3.0
"""How firmly a request is believed to be as the population."""

DEEPER_TRIES = 4.0
"""How firmly a depth is believed to be as the one before, or a family as another."""

WALK, OWN_WALK = 0.0005, 0.002
"""By how much the inverse number of tries grows in a step, of the population and of a request."""

PROBE_STEPS = 3
"""Steps until a tier that is tried has shown something: a cold one, and overlap."""

LEAST_RATE, MOST_RATE = 0.005, 0.995


@dataclass(frozen=True)
class Expected:
    """Tokens that a step gives, over all its rows, by tier.

    Attributes:
      warm: Where every row drafts.
      now: Where rows that are cold give the target's own token alone.
      news: By how much a few steps of a tier would change what is believed of it: standard
        deviation of `warm` as it will be believed then.
    """

    warm: list[float]
    now: list[float]
    news: list[float]


@compiled
def _clipped(rate: float) -> float:
    return min(max(rate, LEAST_RATE), MOST_RATE)


@compiled
def _odds(rate: float) -> float:
    return rate / (1 - rate)


@compiled
def _factor(counts: Float64[np.ndarray, " 3"], guess: float, strength: float) -> float:
    """By how much the odds were better than foreseen, where `guess` is believed so firmly."""
    tried, won, foreseen = counts
    if tried == 0:
        return guess
    odds = _odds(_clipped(foreseen / tried))
    believed = odds * guess / (1 + odds * guess)
    return _odds(_clipped((won + strength * believed) / (tried + strength))) / odds


@compiled
def _times(rate: float, factor: float) -> float:
    """A rate whose odds are so much better."""
    odds = _odds(rate) * factor
    return _clipped(odds / (1 + odds))


@compiled
def _age(counts: Float64[np.ndarray, " 3"], walk: float) -> None:
    counts /= 1 + walk * counts[0]


@compiled
def _count(counts: Float64[np.ndarray, " 3"], won: bool, foreseen: float) -> None:
    counts[0] += 1
    counts[1] += won
    counts[2] += foreseen


@compiled
def _learn(
    rows: Int64[np.ndarray, " B"],
    drafted: Int64[np.ndarray, " B"],
    accepted: Int64[np.ndarray, " B"],
    family: int,
    guesses: Float64[np.ndarray, " D"],
    rates: Float64[np.ndarray, " D"],
    own: Float64[np.ndarray, "requests D 3"],
    shared: Float64[np.ndarray, "F D 3"],
) -> None:
    """Ages everything by a step, and counts what each row's drafts showed.

    Args:
      drafted: Levels that were drafted for each row.
      guesses, rates: Of the family, what foresaw its rates and those of a request.
      own, shared: Tries, successes, and successes that were foreseen.
    """
    for f in range(shared.shape[0]):
        for d in range(shared.shape[1]):
            _age(shared[f, d], WALK)
    for i in range(len(rows)):
        for d in range(own.shape[1]):
            _age(own[rows[i], d], OWN_WALK)
        for d in range(min(accepted[i] + 1, drafted[i])):
            _count(own[rows[i], d], d < accepted[i], rates[d])
            _count(shared[family, d], d < accepted[i], guesses[d])


@compiled
def _summarise(
    shared: Float64[np.ndarray, "F D 3"],
    tries: Float64[np.ndarray, " F"],
    guesses: Float64[np.ndarray, "F D"],
    rates: Float64[np.ndarray, "F D"],
    weights: Float64[np.ndarray, "F D"],
) -> None:
    """Rates of the population by depth: guessed, believed, and of how many tries they are known."""
    miss = np.log(1 - PRIOR_RATE)  # of one candidate
    strength = PRIOR_TRIES
    for d in range(shared.shape[1]):
        total, weighted = strength, strength * miss
        for f in range(shared.shape[0]):
            n, won, _ = shared[f, d]
            rate = _clipped((won + 0.5) / (n + 1))
            alike = _times(rate, 1 / _factor(shared[f, d], 1.0, DEEPER_TRIES))
            total += n
            weighted += n * np.log(1 - alike) / tries[f]
        miss = weighted / total
        for f in range(shared.shape[0]):
            guesses[f, d] = _clipped(1 - np.exp(miss * tries[f]))
            factor = _factor(shared[f, d], 1.0, DEEPER_TRIES)
            rates[f, d] = _times(guesses[f, d], factor)
            weights[f, d] = shared[f, d, 0] + strength
        strength = DEEPER_TRIES


@compiled
def _shown(rate: float, known: float, more: float) -> float:
    """Variance of what will be believed of a rate, known of some tries now, after some more."""
    return rate * (1 - rate) * more / ((known + 1) * (known + 1 + more))


@compiled
def _rates_of(
    own: Float64[np.ndarray, "D 3"],
    rates: Float64[np.ndarray, " D"],
    found: Float64[np.ndarray, " D"],
) -> None:
    """A request's rates in a family that has these in the population."""
    factor = 1.0
    for d in range(len(rates)):
        factor = _factor(own[d], factor, OWN_TRIES)
        found[d] = _times(rates[d], factor)


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
    out: Float64[np.ndarray, "3 tiers"],
    survivals: Float64[np.ndarray, "B D"],
) -> None:
    """Fills `out`: warm, now, and the variance of what a few steps would show of warm.

    Args:
      most: Drafts that a row has use for.
      budgets: Drafts of the batch that a tier of chains verifies, the best; -1: all.
      survivals: Filled: the chance that a chain's draft is accepted with all before it.
    """
    (F, D), B, tiers = rates.shape, len(rows), len(depths)
    rate, alive, sums = np.zeros((F, D)), np.ones((F, D + 1)), np.ones((F, D + 1))
    slopes = np.zeros((tiers, D))  # of the batch's tokens by the population's rates
    for i in range(B):
        for f in range(F):
            _rates_of(own[rows[i]], rates[f], rate[f])
            for d in range(D):
                alive[f, d + 1] = alive[f, d] * rate[f, d]
                sums[f, d + 1] = sums[f, d] + alive[f, d + 1]
        survivals[i] = alive[0, 1:]
        for t in range(tiers):
            f, deepest = families[t], min(depths[t], most[i])
            out[0, t] += sums[f, deepest]
            out[1, t] += 1.0 if is_cold[i] else sums[f, deepest]
            for d in range(deepest):
                known, p = own[rows[i], d, 0] + OWN_TRIES, rate[f, d]
                slope = (sums[f, deepest] - sums[f, d]) / p
                out[2, t] += slope**2 * _shown(p, known, PROBE_STEPS * alive[f, d])
                scale = p * (1 - p) / (rates[f, d] * (1 - rates[f, d])) * OWN_TRIES / known
                slopes[t, d] += slope * scale
    for t in range(tiers):
        if budgets[t] >= 0:
            out[0, t] = B + _best(survivals, np.minimum(most, depths[t]), budgets[t])
            drafted = np.where(is_cold, 0, np.minimum(most, depths[t]))
            out[1, t] = B + _best(survivals, drafted, budgets[t])
        for d in range(depths[t]):
            more = PROBE_STEPS * B * alive[families[t], d]
            seen = _shown(rates[families[t], d], weights[families[t], d], more)
            out[2, t] += slopes[t, d] ** 2 * seen


class Acceptance:
    """What was learnt of every request that runs, and of all together.

    Args:
      tiers: What is chosen from.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        families, tries = families_of(tiers)
        self._families, self._tries = np.array(families), np.array(tries)
        self._depths = np.array([tier.depth for tier in tiers])
        depth = int(self._depths.max())
        self._own = np.zeros((1, depth, 3))
        self._shared = np.zeros((len(tries), depth, 3))
        self._guesses, self._rates, self._weights = np.zeros((3, len(tries), depth))
        self._tiers = tiers
        self._budgets_of: dict[int, Int64[np.ndarray, " tiers"]] = {}
        self._rows: dict[int, int] = {}
        self._free: list[int] = []
        self._summarise()

    def _summarise(self) -> None:
        _summarise(self._shared, self._tries, self._guesses, self._rates, self._weights)

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
        f = self._families[tier]
        _learn(
            rows, drafted, accepted, f, self._guesses[f], self._rates[f], self._own, self._shared
        )
        self._summarise()

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
    ) -> tuple[Expected, Float64[np.ndarray, "B D"]]:
        """What each tier would give.

        Args:
          rows: Of `rows_of`.
          most: Drafts that each row has use for.
          is_cold: Rows that draft nothing in their next step, whatever its tier.
          batch: Rows of the programs.

        Returns:
          The tokens of the batch, and for each row and depth the chance that a draft of a chain is
          accepted with all before it.
        """
        out = np.zeros((3, len(self._depths)))
        survivals = np.empty((len(rows), self._own.shape[1]))
        _expect(
            rows, most, is_cold, self._own, self._rates, self._weights,
            self._families, self._depths, self._budgets(batch), out, survivals,
        )  # fmt: skip
        warm, now, news = out[0].tolist(), out[1].tolist(), np.sqrt(out[2]).tolist()
        return Expected(warm, now, news), survivals
