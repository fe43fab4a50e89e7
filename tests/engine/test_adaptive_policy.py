"""Policies of adaptive speculation: the chosen tier by situation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.engine.adaptive.acceptance import ExpectedTokens
from shared.engine.adaptive.policy import ExpectedValuePolicy, PolicyInput, Static, expected_maximum
from tests.support.simulation.policies import Greedy

OFF, CHAIN = 0, 1


def situation(
    tokens: float,
    after_off: float = 0.0,
    steps_ahead: float = 100.0,
    trial_gain: float = 0.0,
    lifetime: float = 0.0,
):
    """A situation of eight rows, in which a chain step takes 1.25 times a plain step."""
    next_tokens = 8.0 * after_off + tokens * (1 - after_off)
    return PolicyInput(
        seconds=[4.0, 5.0],
        expected=ExpectedTokens(
            tokens=np.array([8.0, tokens]),
            next_tokens=np.array([8.0, next_tokens]),
            trial_gain=np.array([[0.0, 0.0], [trial_gain / 5.0, 0.0]]),
            trial_lifetime_steps=np.array([0.0, lifetime]),
        ),
        num_rows=8,
        after_off=after_off,
        steps_ahead=steps_ahead,
    )


@pytest.mark.parametrize(("tokens", "tier"), [(9.0, OFF), (11.0, CHAIN)])
@pytest.mark.parametrize(
    "policy", [Greedy(), ExpectedValuePolicy()], ids=lambda p: type(p).__name__
)
def test_policy_chooses_max_tokens_per_second(policy, tokens, tier):
    assert policy.choose(situation(tokens)) == tier


def test_static_policy_returns_its_tier():
    assert Static(CHAIN).choose(situation(8.0)) == CHAIN


def test_policy_without_measured_seconds_chooses_max_tokens():
    for policy in (ExpectedValuePolicy(), Greedy()):
        assert policy.choose(replace(situation(8.5), seconds=None)) == CHAIN


def test_expected_value_policy_explores_when_trial_gain_pays():
    """Trials depend on their value and on no timer; `Greedy` makes none."""
    policy, ahead = ExpectedValuePolicy(), {"tokens": 9.5, "after_off": 1.0, "lifetime": 100.0}
    assert policy.choose(situation(**ahead, trial_gain=0.1)) == OFF
    assert policy.choose(situation(**ahead, trial_gain=2.0)) == CHAIN
    assert Greedy().choose(situation(**ahead, trial_gain=2.0)) == OFF


def test_expected_value_policy_counts_trial_gain_beyond_request():
    """The gain counts for the lifetime of the estimate, not of the request."""
    policy = ExpectedValuePolicy()
    ending = {"tokens": 9.5, "trial_gain": 2.0, "after_off": 1.0, "steps_ahead": 3.0}
    assert policy.choose(situation(**ending, lifetime=1.0)) == OFF
    assert policy.choose(situation(**ending, lifetime=100.0)) == CHAIN


def test_expected_value_policy_counts_time_beyond_window():
    """Near the end of a request, a tier of three times the tokens takes 100 times as long."""
    ending = replace(situation(24.0, after_off=1.0, steps_ahead=3.0), seconds=[4.0, 400.0])
    assert ExpectedValuePolicy().choose(ending) == OFF


def test_expected_value_policy_has_switching_hysteresis():
    """Speeds within the hysteresis keep the current tier."""
    policy = ExpectedValuePolicy()
    assert policy.choose(situation(10.02, after_off=1.0)) == OFF
    assert policy.choose(situation(9.99, after_off=0.0)) == CHAIN
    assert policy.choose(situation(10.5, after_off=1.0)) == CHAIN
    assert policy.choose(situation(9.5, after_off=0.0)) == OFF


def test_expected_maximum_equals_known_values():
    assert expected_maximum(1.0, 0.0, 2.0) == 2.0
    assert expected_maximum(2.0, 1.0, 2.0) == pytest.approx(2.0 + 0.39894, abs=1e-4)
    assert expected_maximum(-9.0, 1.0, 2.0) == pytest.approx(2.0)
