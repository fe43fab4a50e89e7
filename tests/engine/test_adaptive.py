"""The adaptive controller against every static tier, on a simulated device with an H200's costs.

Work is the same for all: acceptance depends on the request and the position alone.
"""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest

from shared.engine.adaptive.controller import AdaptiveController
from shared.engine.adaptive.policy import ExpectedValuePolicy, Policy, Static
from shared.engine.cache_policy import NO_CACHE
from shared.engine.engine import Engine
from shared.engine.jit import CompiledLoop
from tests.support.simulation.device import (
    Seconds,
    SimulatedBackend,
    seconds_of,
    simulated_capacity,
)
from tests.support.simulation.phases import Imposed, Phase, Served, imposed, serve
from tests.support.simulation.work import BATCHES, MILLISECONDS, SECONDS, TIERS, always, mixed

OFF, LONG = 0, 3


CHANGING = (
    ("copying", 1, 3, 800, always(0.95)),
    ("free text", 1, 3, 500, always(0.15)),
    ("problems", 8, 24, 300, always(0.7)),
    ("mixed", 8, 40, 200, mixed),
    ("free text, many", 32, 96, 150, always(0.05)),
    ("mixed, many", 32, 128, 120, mixed),
    ("copying, many", 32, 96, 300, always(0.9)),
)


class Run:
    """A run of one policy over several phases.

    Attributes:
      served: Simulated seconds of each phase.
      tiers: Tier of every step.
    """

    def __init__(
        self,
        policy: Policy,
        phases: list[Phase],
        law: Imposed,
        overlap: int = 1,
        seconds: Seconds = SECONDS,
    ) -> None:
        capacity = simulated_capacity(TIERS, BATCHES, overlap=overlap)
        backend = SimulatedBackend(capacity, seconds, law, noise=0.03)
        table = {batch: [seconds(batch, tier) for tier in TIERS] for batch in BATCHES}
        self.tiers: list[int] = []
        controller = AdaptiveController(capacity, self, table, has_experts=False)
        self._policy = policy
        engine = Engine(
            backend, controller, overlap=overlap, chunked_prefill_size=2048, cache=NO_CACHE
        )
        self.served: list[Served] = serve(engine, phases, lambda: backend.clock)
        self.snapshot = engine.metrics.snapshot()

    def choose(self, situation) -> int:
        self.tiers.append(self._policy.choose(situation))
        return self.tiers[-1]

    @property
    def seconds(self) -> float:
        return sum(each.seconds for each in self.served)


@cache
def changing(tier: int | None) -> Run:
    """The changing work with one tier, or with a choice among all tiers."""
    policy = ExpectedValuePolicy() if tier is None else Static(tier)
    return Run(policy, *imposed(CHANGING, part=1 << 20))


def test_adaptive_beats_every_static_tier_on_changing_work():
    best = min(changing(tier).seconds for tier in range(len(TIERS)))
    assert best / changing(None).seconds > 1.05


@pytest.mark.parametrize("phase", range(len(CHANGING)), ids=[each[0] for each in CHANGING])
def test_adaptive_speed_per_phase_near_best_tier(phase):
    static = [changing(tier).served[phase].speed for tier in range(len(TIERS))]
    adaptive = changing(None).served[phase].speed
    assert adaptive > 0.97 * max(static)
    assert adaptive > 0.98 * static[OFF]


@pytest.mark.parametrize("batch", [1, pytest.param(8, marks=pytest.mark.matrix), 32])
def test_adaptive_without_accepted_drafts_near_plain_speed(batch):
    """The cost of trials is bounded by their possible gain."""
    work = imposed([("nothing", batch, batch, 3000, always(0.02))], part=1 << 20)
    adaptive, off = Run(ExpectedValuePolicy(), *work), Run(Static(OFF), *work)
    assert off.seconds / adaptive.seconds > 0.98
    assert adaptive.tiers.count(OFF) > 0.85 * len(adaptive.tiers)


def test_adaptive_follows_acceptance_rate_changes_within_requests():
    """Rates change within long requests, so no new request signals the change."""
    work = imposed([("turns", 8, 8, 3000, lambda rng: (0.03, 0.9, 0.03))], part=1000)
    run = Run(ExpectedValuePolicy(), *work)
    first, last = run.tiers[100:900], run.tiers[-800:-100]
    assert first.count(OFF) > 0.9 * len(first)
    assert last.count(OFF) > 0.9 * len(last)
    assert len(run.tiers) < 2400  # of 3000 tokens two thirds take a step each
    best = min(Run(Static(tier), *work).seconds for tier in (OFF, 1, 2, LONG))
    assert best / run.seconds > 1.05


SLOW = seconds_of(
    {
        "none": {1: 6.3, 8: 9.7, 32: 30.0},
        "S1": {1: 9.8, 8: 19.3, 32: 60.0},
        "S3": {1: 12.5, 8: 29.9, 32: 100.0},
        "S7": {1: 17.1, 8: 47.5, 32: 170.0},
        "S5k4N16": {1: 21.8, 8: 72.9, 32: 290.0},
    }
)
"""Step times of a CPU, where a draft token costs nearly as much as a target token."""


def test_adaptive_tries_expensive_deep_drafts_when_they_pay():
    """A trial pays because it informs all requests, though it pays for none of them alone."""
    plan = [
        ("free text", 1, 10, 400, always(0.2)),
        ("mixed", 1, 10, 400, mixed),
        ("copying", 8, 40, 400, always(0.95)),
    ]
    work = imposed(plan, part=1 << 20)
    adaptive, deep = (Run(p, *work, seconds=SLOW) for p in (ExpectedValuePolicy(), Static(LONG)))
    assert adaptive.served[-1].speed > 0.93 * deep.served[-1].speed


def test_adaptive_finds_cheap_chain_beside_perfect_tree():
    """At batch 1 a tree is nearly as fast, and its steps do not measure a chain."""
    work = imposed([("copying", 1, 20, 400, always(0.95))], part=1 << 20)
    cheap = seconds_of({**MILLISECONDS, "S7": {1: 6.1, 8: 6.8, 32: 10.5}})
    adaptive, long = (Run(p, *work, seconds=cheap) for p in (ExpectedValuePolicy(), Static(LONG)))
    assert long.seconds / adaptive.seconds > 0.97


def test_adaptive_rarely_switches_between_equal_tiers():
    """At a rate where plain decoding and a chain are equal, only switches cost time."""
    work = imposed([("even", 32, 32, 1500, always(0.13))], part=1 << 20)
    run = Run(ExpectedValuePolicy(), *work)
    switches = np.count_nonzero(np.diff([tier != OFF for tier in run.tiers]))
    assert switches < 0.05 * len(run.tiers)
    assert Run(Static(OFF), *work).seconds / run.seconds > 0.98


@pytest.mark.parametrize("overlap", [0, 2])
def test_adaptive_near_best_tier_at_any_overlap(overlap):
    """Results arrive late for static and adaptive tiers alike."""
    work = imposed([("copying", 8, 16, 400, always(0.9))], part=1 << 20)
    adaptive, best = (Run(p, *work, overlap=overlap) for p in (ExpectedValuePolicy(), Static(LONG)))
    assert best.seconds / adaptive.seconds > 0.97


def test_adaptive_step_calls_four_loops(monkeypatch):
    """Prediction, choice, time and acceptance: on a fast device calls are most of the time."""
    changing(None)  # compiles them
    calls = Counter[str]()

    def counted(loop):
        calls[loop.__name__] += 1
        return vars(loop)["dispatcher"]

    monkeypatch.setattr(CompiledLoop, "dispatcher", property(counted))
    steps, found = [], []
    for tokens in (200, 400):  # the difference leaves out calls at the start
        calls.clear()
        phases, law = imposed([("copying", 1, 1, tokens, always(0.9))], part=1 << 20)
        steps.append(len(Run(ExpectedValuePolicy(), phases, law).tiers))
        found.append(calls.total())
    assert found[1] - found[0] <= 4 * (steps[1] - steps[0])


def test_adaptive_metrics_report_tiers():
    found = changing(None).snapshot
    steps = [found[f'spec_decode_adaptive_steps_total{{tier="{tier}"}}'] for tier in TIERS]
    assert sum(steps) == len(changing(None).tiers)
    assert all(steps)
    key = 'spec_decode_adaptive_step_seconds{{batch="32",tier="{}"}}'
    assert found[key.format("S7")] == pytest.approx(0.011, rel=0.1)
    assert found["spec_decode_adaptive_draft_tokens"] in (0, 1, 3, 7, 15)
