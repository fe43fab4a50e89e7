"""Step times of decoding, measured on a simulated device before serving."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from shared.boundary.backend import Decode, StepPlan
from shared.boundary.program import StepKind
from shared.engine.adaptive.tiers import Tier
from shared.process.profiling import ROUNDS, step_seconds
from tests.support.simulation.device import (
    SimulatedBackend,
    TextBackend,
    simulated_capacity,
    with_host_drafts,
)
from tests.support.simulation.mixture import MixtureBackend, mixture_seconds
from tests.support.simulation.phases import Imposed

TIERS = (Tier(1, 0, 0), Tier(4, 3, 1))
BATCHES = (1, 4)
PROGRAMS = {(batch, tier.nodes) for batch in BATCHES for tier in TIERS}


class CountingDevice(SimulatedBackend):
    """A device with constant step times, which counts the steps of each program.

    Attributes:
      slow, slow_steps: A program, and the range of all steps in which it takes twice as long.
    """

    def __init__(self, seconds: float) -> None:
        capacity = simulated_capacity(TIERS, BATCHES, overlap=1)
        super().__init__(capacity, self._takes, Imposed({}, 1))
        self.steps, self._each = Counter[tuple[int, int]](), seconds
        self.plans: list[StepPlan] = []
        self.slow, self.slow_steps = (0, 0), range(0)

    def _takes(self, batch: int, tier: Tier) -> float:
        is_slow = (batch, tier.nodes) == self.slow and self.steps.total() in self.slow_steps
        return self._each * batch * tier.nodes * (2 if is_slow else 1)

    def submit(self, plan: StepPlan):
        if plan.program.work is StepKind.DECODE:
            self.steps[plan.program.batch, plan.program.shape.nodes] += 1
            self.plans.append(plan)
        return super().submit(plan)


@pytest.mark.parametrize(("seconds", "timed"), [(1e-5, 64), (0.003, 8), (1.0, 3)])
def test_step_seconds_times_more_short_steps(seconds, timed):
    backend = CountingDevice(seconds)
    found = step_seconds(
        backend, host_draft=False, has_experts=False, overlap=1, chunked_prefill_size=64
    )
    for batch in BATCHES:
        assert found[batch] == pytest.approx([seconds * batch * t.nodes for t in TIERS])
    assert set(backend.steps) == PROGRAMS
    # Also steps before all rows decode, the first two, and steps in flight at the end.
    steps = backend.steps.values()
    assert ROUNDS * timed < min(steps) <= max(steps) < ROUNDS * (timed + 9)


@pytest.mark.parametrize("first", [0, 80])
def test_step_seconds_ignores_temporary_slowdown(first):
    backend = CountingDevice(0.003)
    backend.slow, backend.slow_steps = (4, 4), range(first, first + 80)
    found = step_seconds(
        backend, host_draft=False, has_experts=False, overlap=1, chunked_prefill_size=64
    )
    assert 80 < backend.steps.total() < 240
    assert found[4] == pytest.approx([0.012, 0.048])


def test_step_seconds_of_moe_include_smallest_batches():
    """The step time of MoE depends on the rows of requests; padding rows read no experts."""
    tiers, batches = TIERS, (1, 2, 8)
    capacity = simulated_capacity(tiers, batches, overlap=1)
    backend = MixtureBackend(capacity, lambda batch, tier: 0.0, Imposed({}, 1))
    how = {"host_draft": False, "overlap": 1, "chunked_prefill_size": 64}
    found = step_seconds(backend, has_experts=True, **how)
    assert list(found) == [1, 2, 3, 8]
    for count, seconds in found.items():
        assert seconds == pytest.approx([mixture_seconds(count * t.nodes, t) for t in tiers])
    assert list(step_seconds(backend, has_experts=False, **how)) == [1, 2, 8]


@pytest.mark.parametrize("has_experts", [True, False])
def test_step_seconds_rows_use_distinct_seeds(has_experts):
    """Greedy outputs repeat themselves, and equal rows choose equal experts."""
    backend, how = CountingDevice(0.003), {"overlap": 1, "chunked_prefill_size": 64}
    step_seconds(backend, host_draft=False, has_experts=has_experts, **how)
    for plan in backend.plans:
        rows = plan.slots > 0
        assert (plan.sampling.temperature[rows] == has_experts).all()
        seeds = plan.sampling.seed[rows]
        assert len(np.unique(seeds)) == len(seeds)


def test_step_seconds_host_trees_are_distinct(monkeypatch):
    capacity = with_host_drafts(simulated_capacity(TIERS, BATCHES, overlap=1), vocab=4096)
    texts, seen = defaultdict[int, list[int]](list), list[np.ndarray]()
    backend = TextBackend(capacity, lambda batch, tier: 0.01, texts, noise=0.0)
    submit = backend.submit

    def watched(plan: StepPlan):
        if isinstance(plan.work, Decode) and plan.work.drafts is not None:
            seen.append(plan.work.drafts.tokens[plan.slots > 0])
        return submit(plan)

    monkeypatch.setattr(backend, "submit", watched)
    step_seconds(backend, host_draft=True, has_experts=False, overlap=1, chunked_prefill_size=64)
    assert seen
    for tokens in seen:
        assert len(np.unique(tokens[:, 1:], axis=0)) == len(tokens)
