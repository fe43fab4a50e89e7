"""What a request's drafts are worth: by the rates of all requests, and how far it is from them.

A request's drafts have log odds as those of the population and an offset of its own, the same at
every depth, and as much on trees as on the chains in them. What is believed of it is a normal
distribution; how far requests differ is learnt from those that ended. What a request showed moves
both, each as far as it is uncertain, so one that differs is known soon where requests do, and where
all are alike chance is not taken for a difference. A depth below a failed draft, or below the
tier's last, was not observed and tells nothing.

A draft whose turn comes was preceded by drafts that were accepted, which tells of the request: so
deep drafts are better than the mean over all requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float64, Int64

from shared.engine.adaptive.news import add_news
from shared.engine.adaptive.population import LEVEL, WALK, Population, chance, damping
from shared.engine.adaptive.tiers import Tier, families_of
from shared.engine.compiled import compiled

OWN_WALK = 0.003
"""The part of what was learnt of a request that is lost in a step."""

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
      lasting: The same for as many requests of which nothing is known yet: what the steps would
        tell of all requests.
      holds, lasts: Steps for which such `news`, and what is `lasting`, are of use: after these as
        much is uncertain again, and could be learnt then.
    """

    warm: list[float]
    now: list[float]
    news: list[list[float]]
    lasting: list[list[float]]
    holds: list[float]
    lasts: list[float]


@compiled
def _learn(
    rows: Int64[np.ndarray, " B"],
    drafted: Int64[np.ndarray, " B"],
    accepted: Int64[np.ndarray, " B"],
    log_odds: Float64[np.ndarray, " D"],
    slopes: Float64[np.ndarray, " D"],
    variances: Float64[np.ndarray, " D"],
    level: float,
    spread: float,
    own: Float64[np.ndarray, "requests 3"],
    sums: Float64[np.ndarray, "6 D"],
    shifts: Float64[np.ndarray, " B"],
) -> None:
    """Ages what is known of requests by a step, and learns what their drafts showed.

    Args:
      drafted: Levels that were drafted for each row.
      log_odds, slopes, variances: Of the family, as `Population` has them.
      level: Variance of what is uncertain of all depths alike.
      spread: Variance of log odds between requests.
      own: Offset, its variance, and its covariance with what is uncertain of all depths alike.
      sums: Zeros; filled with what `Population.learn` takes.
    """
    for i in range(len(rows)):
        offset, variance, between = own[rows[i]]
        offset *= 1 - OWN_WALK / 2
        between *= 1 - OWN_WALK / 2
        variance += OWN_WALK * (spread - variance)
        # What is uncertain of both together, and what each has in common with that.
        of_row, of_all, shift = variance + between, max(level + between, 0.0), 0.0
        both = max(of_row, 0.0) + of_all
        share = of_all / level  # by how much log odds of the row move with those of all
        apart = max(variance - between**2 / level, 0.0)  # what is left of it once those are known
        for d in range(min(accepted[i] + 1, drafted[i])):
            won = 1.0 if d < accepted[i] else 0.0
            a, center = slopes[d], log_odds[d] + slopes[d] * (offset + shift)
            known = damping(a * a * apart)
            sums[0, d] += share
            sums[1, d] += share * share
            sums[2, d] += share * won
            sums[3, d] += share * chance(known * center)
            sums[4, d] += share * known
            sums[5, d] += share * a * shift * share
            known = damping(a * a * (both - level) + variances[d])
            p = chance(known * center)
            news, told = a * known * (won - p), (a * known) ** 2 * p * (1 - p)
            offset += of_row * news
            shift += of_all * news
            variance -= of_row**2 * told
            between -= of_row * of_all * told
            shrunk = 1 - both * told
            both, of_row, of_all = both * shrunk, of_row * shrunk, of_all * shrunk
        own[rows[i], 0], own[rows[i], 1], own[rows[i], 2] = offset, variance, between
        shifts[i] = shift


@compiled
def _follow(
    rows: Int64[np.ndarray, " B"],
    shifts: Float64[np.ndarray, " B"],
    moved: float,
    before: float,
    after: float,
    own: Float64[np.ndarray, "requests 3"],
) -> None:
    """What the other rows showed of all tells of a row too, of which the sum of both is known.

    Args:
      shifts: By how much a row alone moved what is believed of all.
      moved, before, after: By how much all rows did, and the variance of it.
    """
    for i in range(len(rows)):
        own[rows[i], 0] += own[rows[i], 2] / before * (moved - shifts[i])
        own[rows[i], 2] *= min(after / before, 1.0)


@compiled
def _forecast(
    log_odds: Float64[np.ndarray, " D"],
    slopes: Float64[np.ndarray, " D"],
    offset: float,
    variance: float,
    rate: Float64[np.ndarray, " D"],
) -> None:
    """Fills the rate of each depth, given that all before it were accepted."""
    for d in range(len(rate)):
        a = slopes[d]
        known = damping(a * a * variance)
        rate[d] = chance(known * (log_odds[d] + a * offset))
        gain = variance * a * known
        offset += gain * (1 - rate[d])
        variance -= gain * gain * rate[d] * (1 - rate[d])


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
def _add_own(
    news: Float64[np.ndarray, "tiers tiers"],
    learnt: Float64[np.ndarray, " tiers"],
    variance: float,
    moved: Float64[np.ndarray, " tiers"],
    alive: Float64[np.ndarray, "F D1"],
    rate: Float64[np.ndarray, "F D"],
    slopes: Float64[np.ndarray, "F D"],
    families: Int64[np.ndarray, " tiers"],
    deepest: Int64[np.ndarray, " tiers"],
) -> None:
    """Adds what a few steps of each tier would tell of one request's offset.

    Args:
      learnt: By how much its variance would shrink.
      variance: Of the offset, where everything was known of all requests.
      moved: Speeds by the offset.
      deepest: Drafts of the request in each tier.
    """
    for t in range(len(deepest)):
        f, told = families[t], 0.0
        for d in range(deepest[t]):
            told += alive[f, d] * slopes[f, d] ** 2 * rate[f, d] * (1 - rate[f, d])
        told *= PROBE_STEPS
        shrinks = variance * variance * told / (1 + variance * told)
        learnt[t] += shrinks
        for other in range(len(deepest)):
            news[t, other] += shrinks * (moved[t] - moved[other]) ** 2


@compiled
def _expect(
    rows: Int64[np.ndarray, " B"],
    most: Int64[np.ndarray, " B"],
    is_cold: Bool[np.ndarray, " B"],
    own: Float64[np.ndarray, "requests 3"],
    spread: float,
    log_odds: Float64[np.ndarray, "F D"],
    slopes: Float64[np.ndarray, "F D"],
    covariance: Float64[np.ndarray, "n n"],
    families: Int64[np.ndarray, " tiers"],
    depths: Int64[np.ndarray, " tiers"],
    budgets: Int64[np.ndarray, " tiers"],
    seconds: Float64[np.ndarray, " tiers"],
    tokens: Float64[np.ndarray, "2 tiers"],
    news: Float64[np.ndarray, "2 tiers tiers"],
    learnt: Float64[np.ndarray, "2 tiers"],
    survivals: Float64[np.ndarray, "B D"],
) -> None:
    """Fills `tokens`, warm and now, and `news`, of these requests and of all, as variances.

    Args:
      own, spread: As `_learn` has them.
      most: Drafts that a row has use for.
      budgets: Drafts of the batch that a tier of chains verifies, the best; -1: all.
      learnt: Filled: by how much a few steps would shrink the variance of offsets, and of what all
        depths share.
      survivals: Filled: the chance that a chain's draft is accepted with all before it.
    """
    (F, D), B, tiers = log_odds.shape, len(rows), len(depths)
    rate, alive, sums = np.zeros((F, D)), np.ones((F, D + 1)), np.ones((F, D + 1))
    gains, told = (
        np.zeros((2, tiers + 1, F * D)),
        np.zeros((F, D)),
    )  # of speeds, by what is believed
    gains[:, tiers, 0] = 1.0  # last, of what all depths share
    fastest, moved = np.zeros(tiers), np.zeros(tiers)
    level = covariance[0, 0]  # what is uncertain of all depths alike
    for i in range(B):
        offset, variance, between = own[rows[i]]
        together = max(variance + level + 2 * between, 0.0)
        for f in range(F):
            _forecast(log_odds[f], slopes[f], offset, together, rate[f])
            for d in range(D):
                alive[f, d + 1] = alive[f, d] * rate[f, d]
                sums[f, d + 1] = sums[f, d] + alive[f, d + 1]
                told[f, d] += PROBE_STEPS * alive[f, d] * rate[f, d] * (1 - rate[f, d])
        survivals[i] = alive[0, 1:]
        apart = max(variance - between**2 / level, 0.0)
        share = max(1 + between / level, 0.0)  # by how much its log odds move with those of all
        for t in range(tiers):
            f, deepest = families[t], min(depths[t], most[i])
            tokens[0, t] += sums[f, deepest]
            fastest[t] += (1 + deepest) / seconds[t]
            tokens[1, t] += 1.0 if is_cold[i] else sums[f, deepest]
            moved[t] = 0.0
            for d in range(deepest):
                gain = (sums[f, deepest] - sums[f, d]) * (1 - rate[f, d]) / seconds[t]
                moved[t] += gain * slopes[f, d]
                for k in range(2):
                    part = gain if k else gain * share
                    gains[k, t, d] += part * slopes[f, d]
                    if f > 0:
                        gains[k, t, f * D + d] += part
        _add_own(
            news[0], learnt[0], apart, moved, alive, rate, slopes, families,
            np.minimum(depths, most[i]),
        )  # fmt: skip
    for t in range(tiers):
        if budgets[t] >= 0:
            drafted = np.minimum(most, depths[t])
            tokens[0, t] = B + _best(survivals, drafted, budgets[t])
            tokens[1, t] = B + _best(survivals, np.where(is_cold, 0, drafted), budgets[t])
    learnt[0] /= B
    for k in range(2):
        learnt[1] = 0.0
        add_news(news[k], learnt[1], gains[k], told, slopes, covariance, families, depths)
    for t in range(tiers):
        for other in range(tiers):
            if fastest[t] <= tokens[0, other] / seconds[other]:
                news[:, t, other] = 0.0  # whatever it showed


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
        self._own = np.zeros((1, 3))
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
        self._own[row] = 0.0, self.population.spread, 0.0
        return row

    @property
    def is_empty(self) -> bool:
        """Whether no request runs that anything is known of."""
        return not self._rows

    def forget(self, request_id: int) -> None:
        """A request ended; what it showed of all stays."""
        if (row := self._rows.pop(request_id, None)) is not None:
            self._free.append(row)
            self.population.ended(*self._own[row, :2].tolist())

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
        family, known = self._families[tier], self.population
        sums, shifts = np.zeros((6, known.log_odds.shape[1])), np.empty(len(rows))
        known.age()
        before = known.level
        _learn(
            rows, drafted, accepted, known.log_odds[family], known.slopes[family],
            known.variances[family], before, known.spread, self._own, sums, shifts,
        )  # fmt: skip
        moved = known.learn(family, sums)
        _follow(rows, shifts, moved, before, known.level, self._own)

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
        tiers, known = len(self._depths), self.population
        tokens, news, learnt = (
            np.zeros((2, tiers)),
            np.zeros((2, tiers, tiers)),
            np.zeros((2, tiers)),
        )
        survivals = np.empty((len(rows), known.log_odds.shape[1]))
        _expect(
            rows, most, is_cold, self._own, known.spread, known.log_odds, known.slopes,
            known.covariance, self._families, self._depths, self._budgets(batch),
            np.array(seconds), tokens, news, learnt, survivals,
        )  # fmt: skip
        (warm, now), (soon, lasting) = tokens.tolist(), np.sqrt(news).tolist()
        holds, lasts = learnt[0] / (OWN_WALK * known.spread), learnt[1] / (WALK * LEVEL)
        return Expected(warm, now, soon, lasting, holds.tolist(), lasts.tolist()), survivals
