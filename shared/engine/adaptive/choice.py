"""Which tier a step takes: small policies over what each would give and cost.

A policy sees a `Situation` and nothing else, so it can be scored on a recorded one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from shared.engine.adaptive.acceptance import Expected
from shared.engine.adaptive.trials import TRIAL_STEPS


@dataclass(frozen=True)
class Situation:
    """What is known before a step. Lists go by tier, of which the first is off.

    Attributes:
      seconds: Of a step; None where nothing was measured.
      expected: Tokens of a step.
      num_rows: Requests of the step.
      after_off: The share of them whose last step was off; they draft nothing in their next one,
        whatever its tier, as the drafter has yet to see their newest tokens.
      steps_ahead: Steps that the choice is for: as long as requests last and rates hold.
    """

    seconds: list[float] | None
    expected: Expected
    num_rows: int
    after_off: float
    steps_ahead: float


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
        """The one tier, whatever the situation."""
        return self.tier


class BestValue:
    """The tier whose next few steps are worth most, in tokens.

    Three things count: the tokens of these steps, those of the rest of the time ahead at the best
    speed that is believed of any tier, and a bonus for a trial. A tier that has rarely run may be
    faster than it is believed to be: the bonus is the speed that we expect to gain if a trial shows
    it, for as long as the trial stays of use. So a tier is tried where that is worth more than the
    trial costs, and on no timer. Going off makes the next step of a draft shape draft nothing; that
    is counted too, so that the choice goes back and forth only where it pays.
    """

    def choose(self, situation: Situation) -> int:
        """The tier with the highest value; without measured seconds, that with the most tokens."""
        seconds, tokens = situation.seconds, situation.expected.tokens
        if seconds is None:
            return tokens.index(max(tokens))
        values = [self._value(situation, seconds, tier) for tier in range(len(seconds))]
        return values.index(max(values))

    def _value(self, situation: Situation, seconds: list[float], tier: int) -> float:
        expected = situation.expected
        # The same for all tiers, and long enough for the first steps of any.
        window = max(situation.steps_ahead * seconds[0], 2 * TRIAL_STEPS * max(seconds))
        rest = window - TRIAL_STEPS * seconds[tier]
        first = (TRIAL_STEPS - 1) * expected.tokens[tier] + expected.next_tokens[tier]
        speeds = [tokens / s for tokens, s in zip(expected.tokens, seconds, strict=True)]
        later = [
            speed * rest - _switch_loss(situation, tier, then) for then, speed in enumerate(speeds)
        ]
        other = max((then for then in range(len(later)) if then != tier), key=later.__getitem__)
        gain = mean_of_best(speeds[tier], expected.trial_gain[tier][other], speeds[other])
        gain -= max(speeds[tier], speeds[other])
        lifetime = expected.trial_lifetime_steps[tier] * seconds[other]
        return first + max(later) + lifetime * gain


def _switch_loss(situation: Situation, first: int, then: int) -> float:
    """Tokens that a step without drafts costs, where one tier is run first and another then."""
    tokens, off = situation.expected.tokens, 0
    if then == off:
        # The rows that could draft now give that up, whenever they go off.
        return (1 - situation.after_off) * (max(tokens) - situation.num_rows)
    return tokens[then] - situation.num_rows if first == off else 0.0


def mean_of_best(mean: float, error: float, other: float) -> float:
    """The expected maximum of a normal number and a known one."""
    if error <= 0:
        return max(mean, other)
    z = (mean - other) / error
    below = 0.5 * math.erfc(-z / math.sqrt(2))
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return other + (mean - other) * below + error * density
