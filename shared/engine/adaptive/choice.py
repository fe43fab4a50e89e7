"""Which tier a step takes: small policies over what each would give and cost.

A policy sees a `Situation` and nothing else, so it can be scored on a recorded one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from shared.engine.adaptive.acceptance import PROBE_STEPS, Expected


@dataclass(frozen=True)
class Situation:
    """What is known before a step. Lists go by tier, of which the first is off.

    Attributes:
      seconds: Of a step; None where nothing was measured.
      expected: Tokens of a step.
      num_rows: Requests of the step.
      cold: The share of them that drafts nothing in its next step, whatever the tier.
      horizon: Steps that the choice is for: as long as requests last and rates hold.
    """

    seconds: list[float] | None
    expected: Expected
    num_rows: int
    cold: float
    horizon: float


class Policy(Protocol):
    """Chooses tiers."""

    def choose(self, situation: Situation) -> int:
        """The tier of the next step."""
        ...


@dataclass(frozen=True)
class Static:
    """Always the same tier."""

    tier: int

    def choose(self, situation: Situation) -> int:
        """The tier."""
        return self.tier


class Greedy:
    """The tier that is believed to give the most tokens a second; it tries nothing."""

    def choose(self, situation: Situation) -> int:
        """The tier with the most."""
        seconds = situation.seconds or [1.0] * len(situation.expected.warm)
        speeds = [tokens / s for tokens, s in zip(situation.expected.warm, seconds, strict=True)]
        return speeds.index(max(speeds))


class BestValue:
    """The tier whose next few steps are worth most, with what they are expected to show.

    All values are tokens over one window of time, the horizon. A tier is run for a few steps, and
    then whichever is better: itself, at the speed that it will have turned out to have, or the best
    other one at the speed that is believed of it. So a tier of which little is known is worth more
    than its mean, by as much as could be gained from knowing; it is tried where that pays for the
    steps. What it shows of all requests is of use for those to come as well. Both are counted for
    as long as times do not make it as uncertain again, as after that it could be tried then.
    Rows leave off cold, and going off makes them so: both are in the value, so that the
    choice goes back and forth only where that pays.
    """

    def choose(self, situation: Situation) -> int:
        """The tier with the highest value; without measured seconds, that with the most tokens."""
        seconds, expected = situation.seconds, situation.expected
        if seconds is None:
            return expected.warm.index(max(expected.warm))
        values = [self._value(situation, seconds, tier) for tier in range(len(seconds))]
        return values.index(max(values))

    def _value(self, situation: Situation, seconds: list[float], tier: int) -> float:
        expected = situation.expected
        # In which there is room for the steps of any tier, and for what they show to be of use.
        window = max(situation.horizon * seconds[0], 2 * PROBE_STEPS * max(seconds))
        rest = window - PROBE_STEPS * seconds[tier]
        gained = PROBE_STEPS * expected.warm[tier]
        gained -= expected.warm[tier] - expected.now[tier]  # its first step, while rows are cold
        later = [
            tokens * rest / s - _turn(situation, tier, then)
            for then, (tokens, s) in enumerate(zip(expected.warm, seconds, strict=True))
        ]
        other = max((then for then in range(len(later)) if then != tier), key=later.__getitem__)
        best = max(later[tier], later[other])
        holds = min(expected.holds[tier] * seconds[other] / rest, 1.0)
        news = mean_of_best(later[tier], expected.news[tier][other] * rest, later[other]) - best
        own, others = (expected.warm[each] / seconds[each] for each in (tier, other))
        lasting = mean_of_best(own, expected.lasting[tier][other], others) - max(own, others)
        lasts = expected.lasts[tier] * seconds[other]
        return gained + best + holds * news + lasts * lasting


def _turn(situation: Situation, first: int, then: int) -> float:
    """Tokens that are lost for good by being cold, when one tier is run first and another then."""
    expected, off = situation.expected, 0
    if then == off:
        # Rows that are warm now give it up, whenever that is.
        return (1 - situation.cold) * (max(expected.warm) - situation.num_rows)
    return expected.warm[then] - situation.num_rows if first == off else 0.0


def mean_of_best(mean: float, error: float, other: float) -> float:
    """The expected maximum of a normal number and a known one."""
    if error <= 0:
        return max(mean, other)
    z = (mean - other) / error
    below = 0.5 * math.erfc(-z / math.sqrt(2))
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return other + (mean - other) * below + error * density
