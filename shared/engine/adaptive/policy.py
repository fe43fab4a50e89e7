"""Policies that choose the tier of a step from predicted tokens and measured costs.

A policy reads only a `PolicyInput`, so it can be evaluated on recorded ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from shared.engine.adaptive.acceptance import ExpectedTokens
from shared.engine.adaptive.exploration import TRIAL_STEPS


@dataclass(frozen=True)
class PolicyInput:
    """Input of a policy before a step. Lists are indexed by tier; tier 0 is plain decoding.

    Attributes:
      seconds: Time of a step; None if not measured.
      expected: Predicted tokens of a step.
      num_rows: Requests of the step.
      after_off: Fraction of them whose last step was plain. They draft nothing in their next step,
        whatever its tier, because the drafter has not processed their newest tokens.
      steps_ahead: Steps for which the choice applies: as long as requests last and rates are valid.
    """

    seconds: list[float] | None
    expected: ExpectedTokens
    num_rows: int
    after_off: float
    steps_ahead: float


class Policy(Protocol):
    """Chooses tiers."""

    def choose(self, situation: PolicyInput) -> int:
        """Returns the tier of the next step."""
        ...


@dataclass(frozen=True)
class Static:
    """Policy with a fixed tier."""

    tier: int

    def choose(self, situation: PolicyInput) -> int:
        """Returns the fixed tier."""
        return self.tier


class ExpectedValuePolicy:
    """Policy that chooses the tier whose next steps have the highest value in tokens.

    The value has three terms: the tokens of these steps, the tokens of the remaining time at the
    best estimated speed, and a bonus for a trial. A rarely used tier may be faster than estimated.
    The bonus is the expected gain in speed if a trial shows that, over the time for which the
    information is valid. A tier is therefore tried if that is worth more than the trial costs, not
    by a timer. After plain decoding, the next step with a draft shape drafts nothing; this cost is
    included, so that the choice changes only if it pays.
    """

    def choose(self, situation: PolicyInput) -> int:
        """Returns the tier with the highest value; without measured times, the one with the most
        tokens.
        """
        seconds, tokens = situation.seconds, situation.expected.tokens
        if seconds is None:
            return tokens.index(max(tokens))
        values = [self._value(situation, seconds, tier) for tier in range(len(seconds))]
        return values.index(max(values))

    def _value(self, situation: PolicyInput, seconds: list[float], tier: int) -> float:
        expected = situation.expected
        # Equal for all tiers, and longer than the trial steps of any.
        window = max(situation.steps_ahead * seconds[0], 2 * TRIAL_STEPS * max(seconds))
        rest = window - TRIAL_STEPS * seconds[tier]
        first = (TRIAL_STEPS - 1) * expected.tokens[tier] + expected.next_tokens[tier]
        speeds = [tokens / s for tokens, s in zip(expected.tokens, seconds, strict=True)]
        later = [
            speed * rest - _switch_loss(situation, tier, then) for then, speed in enumerate(speeds)
        ]
        other = max((then for then in range(len(later)) if then != tier), key=later.__getitem__)
        gain = expected_maximum(speeds[tier], expected.trial_gain[tier][other], speeds[other])
        gain -= max(speeds[tier], speeds[other])
        lifetime = expected.trial_lifetime_steps[tier] * seconds[other]
        return first + max(later) + lifetime * gain


def _switch_loss(situation: PolicyInput, first: int, then: int) -> float:
    """Returns the tokens lost by a step without draft tokens if tier `first` is followed by tier
    `then`.
    """
    tokens, off = situation.expected.tokens, 0
    if then == off:
        # Rows that can draft now lose that when they switch to plain steps.
        return (1 - situation.after_off) * (max(tokens) - situation.num_rows)
    return tokens[then] - situation.num_rows if first == off else 0.0


def expected_maximum(mean: float, error: float, other: float) -> float:
    """Returns the expected maximum of a normally distributed value and a constant."""
    if error <= 0:
        return max(mean, other)
    z = (mean - other) / error
    below = 0.5 * math.erfc(-z / math.sqrt(2))
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return other + (mean - other) * below + error * density
