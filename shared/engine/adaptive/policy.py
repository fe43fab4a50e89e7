"""Policies that choose the tier of a step from predicted tokens and measured costs.

A policy reads only a `PolicyInput`, so it can be evaluated on recorded ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from jaxtyping import Float64

from shared.engine.adaptive.acceptance import ExpectedTokens
from shared.engine.adaptive.exploration import TRIAL_STEPS
from shared.engine.jit import compiled


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

    seconds: Sequence[float] | None
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

    def __init__(self) -> None:
        tiers, gains = np.ones(2), np.ones((2, 2))
        _most_valuable(tiers, tiers, tiers, gains, tiers, 1, 0.0, 1.0)  # compiles it in advance

    def choose(self, situation: PolicyInput) -> int:
        """Returns the tier with the highest value; without measured times, the one with the most
        tokens.
        """
        seconds, expected = situation.seconds, situation.expected
        if seconds is None:
            return int(np.argmax(expected.tokens))
        return int(
            _most_valuable(
                np.asarray(seconds),
                expected.tokens,
                expected.next_tokens,
                expected.trial_gain,
                expected.trial_lifetime_steps,
                situation.num_rows,
                situation.after_off,
                situation.steps_ahead,
            )
        )


@compiled
def _most_valuable(
    seconds: Float64[np.ndarray, " tiers"],
    tokens: Float64[np.ndarray, " tiers"],
    next_tokens: Float64[np.ndarray, " tiers"],
    trial_gain: Float64[np.ndarray, "tiers tiers"],
    trial_lifetime_steps: Float64[np.ndarray, " tiers"],
    num_rows: int,
    after_off: float,
    steps_ahead: float,
) -> int:
    """Returns the tier with the highest value; see `PolicyInput` and `ExpectedTokens`."""
    count, speeds = len(seconds), tokens / seconds
    later, values = np.empty(count), np.empty(count)
    # Equal for all tiers, and longer than the trial steps of any.
    window = max(steps_ahead * seconds[0], 2 * TRIAL_STEPS * seconds.max())
    # Tokens lost by the step without draft tokens between plain and draft steps. Rows that can
    # draft now lose that when they switch to plain steps.
    stop_loss = (1 - after_off) * (tokens.max() - num_rows)
    for tier in range(count):
        rest = window - TRIAL_STEPS * seconds[tier]
        other = -1
        for then in range(count):
            resume_loss = tokens[then] - num_rows if tier == 0 else 0.0
            later[then] = speeds[then] * rest - (stop_loss if then == 0 else resume_loss)
            if then != tier and (other < 0 or later[then] > later[other]):
                other = then
        gain = expected_maximum(speeds[tier], trial_gain[tier, other], speeds[other])
        gain -= max(speeds[tier], speeds[other])
        first = (TRIAL_STEPS - 1) * tokens[tier] + next_tokens[tier]
        lifetime = trial_lifetime_steps[tier] * seconds[other]
        values[tier] = first + later.max() + lifetime * gain
    return int(np.argmax(values))


@compiled
def expected_maximum(mean: float, error: float, other: float) -> float:
    """Returns the expected maximum of a normally distributed value and a constant."""
    if error <= 0:
        return max(mean, other)
    z = (mean - other) / error
    below = 0.5 * math.erfc(-z / math.sqrt(2))
    density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
    return other + (mean - other) * below + error * density
