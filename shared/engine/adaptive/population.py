"""How often the draft of a depth is accepted, given those before it, over all requests.

Where a single candidate misses with probability m, a level of a tree misses as a number of
independent ones would (`Tier.tries`). So whatever runs tells of one m for each depth, and through
it of every family of tiers. Tries and successes are counted for each family and depth. Counts age
as the evidence of a random walk: the inverse of their number grows by a constant a step, so that
new steps count more, what was not tried for long is uncertain again, and nothing is reset by a
timer. Those of a family that does not run while another does age fast, as far as that one tells of
new times: a tree that hardly ever misses tells little.

What remains is how far a family of trees is from its guess. That changes slowly, and shows when the
family is tried while the others are well known; it is kept as a factor on the odds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from shared.engine.compiled import compiled

PRIOR_RATE, PRIOR_TRIES = 0.5, 2.0
"""What is believed of the first depth before anything was seen, and how firmly."""

DEEPER_TRIES = 4.0
"""How firmly a depth is believed to be as the one before."""

GUESS_TRIES = 4.0
"""How firmly a family is believed to be as it is guessed."""

FAMILY_TRIES = 20.0
"""How firmly a family's factor is believed to be 1, or that of the depth before."""

WALK, IDLE_WALK, FACTOR_WALK = 0.0005, 0.01, 0.0001
"""By how much the inverse number of tries grows in a step: of what runs and where nothing drafts,
of a family while another one runs, and of what is known of a factor."""

DOUBTFUL_MISS = 0.1
"""Of a guess: one that hardly ever misses is off by a large factor as soon as times change."""

LEAST_RATE, MOST_RATE = 0.005, 0.995


@compiled
def clipped(rate: float) -> float:
    """A rate that is neither 0 nor 1."""
    return min(max(rate, LEAST_RATE), MOST_RATE)


@compiled
def odds_of(rate: float) -> float:
    """Of a rate that is neither 0 nor 1."""
    return rate / (1 - rate)


@compiled
def better(rate: float, factor: float) -> float:
    """A rate whose odds are so much better."""
    odds = odds_of(rate) * factor
    return clipped(odds / (1 + odds))


@compiled
def factor_of(counts: Float64[np.ndarray, " 3"], guess: float, strength: float) -> float:
    """By how much the odds were better than foreseen, where `guess` is believed so firmly.

    Args:
      counts: Tries, successes, and successes that were foreseen.
    """
    tried, won, foreseen = counts
    if tried <= 0:
        return guess
    mean = clipped(foreseen / tried)
    believed = better(mean, guess)
    return odds_of(clipped((won + strength * believed) / (tried + strength))) / odds_of(mean)


@compiled
def _learn(
    family: int,
    tried: Float64[np.ndarray, " D"],
    won: Float64[np.ndarray, " D"],
    fast: Float64[np.ndarray, "F D 2"],
    slow: Float64[np.ndarray, "F D 3"],
    guesses: Float64[np.ndarray, "F D 2"],
    told: Float64[np.ndarray, "F D"],
) -> None:
    """Ages everything by a step, and counts what it showed.

    Args:
      fast: Tries and successes.
      slow: Those that tell of a family's factor, as `factor_of` takes them.
      guesses: From all other families, the rate and how well it is known, from 0 to 1.
      told: What a try tells the others, as `_told` has it.
    """
    has_drafts = tried.sum() > 0
    for f in range(fast.shape[0]):
        for d in range(fast.shape[1]):
            news = told[family, d] if has_drafts and f != family else 0.0
            walk = WALK + (IDLE_WALK - WALK) * news
            fast[f, d] /= 1 + walk * fast[f, d, 0]
            slow[f, d] /= 1 + FACTOR_WALK * slow[f, d, 0]
    for d in range(len(tried)):
        guess, known = guesses[family, d]
        known *= min((1 - guess) / DOUBTFUL_MISS, 1.0)
        fast[family, d, 0] += tried[d]
        fast[family, d, 1] += won[d]
        slow[family, d, 0] += known * tried[d]
        slow[family, d, 1] += known * won[d]
        slow[family, d, 2] += known * tried[d] * guess


@compiled
def _told(rate: float, tries: float) -> float:
    """What a try of a family tells of one candidate, beside what a try of a chain would: 0 to 1.

    By Fisher's information on the log of how often a candidate misses: a tree that hardly ever
    misses says little of the chain in it.
    """
    miss = 1 - rate
    alone = miss ** (1 / tries)
    return min(tries**2 * miss / rate * (1 - alone) / alone, 1.0)


@compiled
def _summarise(
    fast: Float64[np.ndarray, "F D 2"],
    slow: Float64[np.ndarray, "F D 3"],
    tries: Float64[np.ndarray, " F"],
    guesses: Float64[np.ndarray, "F D 2"],
    told: Float64[np.ndarray, "F D"],
    rates: Float64[np.ndarray, "F D"],
    weights: Float64[np.ndarray, "F D"],
) -> None:
    """Fills guesses, what tries tell, rates, and of how many tries these are known, by depth."""
    F = len(tries)
    miss, strength = np.log(1 - PRIOR_RATE), PRIOR_TRIES  # of one candidate
    factor, log_miss = np.ones(F), np.zeros(F)
    for d in range(fast.shape[1]):
        total, weighted = strength, strength * miss
        for f in range(F):
            n, won = fast[f, d]
            if tries[f] > 1:
                factor[f] = factor_of(slow[f, d], factor[f], FAMILY_TRIES)
            alike = better(clipped((won + 0.5) / (n + 1)), 1 / factor[f])
            log_miss[f] = np.log(1 - alike) / tries[f]
            told[f, d] = _told(rates[f, d], tries[f])
            total += told[f, d] * n
            weighted += told[f, d] * n * log_miss[f]
        for f in range(F):
            n, won = fast[f, d]
            others = total - told[f, d] * n
            elsewhere = (weighted - told[f, d] * n * log_miss[f]) / others
            guesses[f, d, 0] = clipped(1 - np.exp(elsewhere * tries[f]))
            guesses[f, d, 1] = (others - strength) / (total + 1)
            guess = better(clipped(1 - np.exp(weighted / total * tries[f])), factor[f])
            weights[f, d] = n + GUESS_TRIES
            rates[f, d] = clipped((won + GUESS_TRIES * guess) / weights[f, d])
        miss, strength = weighted / total, DEEPER_TRIES


class Population:
    """The rates of all requests together.

    Args:
      tries: For each family how many candidates a level is worth; 1 of chains.
      depth: D, levels of the deepest tier.

    Attributes:
      rates, weights: [F, D] rates, and of how many tries they are known.
    """

    def __init__(self, tries: Sequence[float], depth: int) -> None:
        F = len(tries)
        self._tries = np.array(tries)
        self._fast, self._slow = np.zeros((F, depth, 2)), np.zeros((F, depth, 3))
        self._guesses, self._told = np.zeros((F, depth, 2)), np.zeros((F, depth))
        self.rates, self.weights = np.full((F, depth), PRIOR_RATE), np.zeros((F, depth))
        self._summarise()

    def learn(
        self, family: int, tried: Float64[np.ndarray, " D"], won: Float64[np.ndarray, " D"]
    ) -> None:
        """What a step showed at each depth; without tries, that time goes by."""
        _learn(family, tried, won, self._fast, self._slow, self._guesses, self._told)
        self._summarise()

    def _summarise(self) -> None:
        _summarise(
            self._fast, self._slow, self._tries, self._guesses, self._told, self.rates, self.weights
        )  # fmt: skip
