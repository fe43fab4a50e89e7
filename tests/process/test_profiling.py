"""What decode steps cost, measured on a simulated device before anything is served."""

from collections import Counter

import pytest

from shared.boundary.backend import StepPlan
from shared.boundary.program import Work
from shared.engine.adaptive.tiers import Tier
from shared.process.profiling import ROUNDS, step_seconds
from tests.support.simulation.device import SimulatedBackend, simulated_capacity
from tests.support.simulation.phases import Imposed

TIERS = (Tier(1, 0, 0), Tier(4, 3, 1))
BATCHES = (1, 4)
PROGRAMS = {(batch, tier.nodes) for batch in BATCHES for tier in TIERS}


class Counted(SimulatedBackend):
    """Every step takes as long, and those of each program are counted.

    Attributes:
      slow, slow_steps: A program, and during which steps of all its own take twice as long.
    """

    def __init__(self, seconds: float) -> None:
        capacity = simulated_capacity(TIERS, BATCHES, overlap=1)
        super().__init__(capacity, self._takes, Imposed({}, 1))
        self.steps, self._each = Counter[tuple[int, int]](), seconds
        self.slow, self.slow_steps = (0, 0), range(0)

    def _takes(self, batch: int, tier: Tier) -> float:
        is_slow = (batch, tier.nodes) == self.slow and self.steps.total() in self.slow_steps
        return self._each * batch * tier.nodes * (2 if is_slow else 1)

    def submit(self, plan: StepPlan):
        if plan.program.work is Work.DECODE:
            self.steps[plan.program.batch, plan.program.shape.nodes] += 1
        return super().submit(plan)


@pytest.mark.parametrize(("seconds", "timed"), [(1e-5, 64), (0.003, 8), (1.0, 3)])
def test_the_shorter_a_step_is_the_more_of_them_are_timed(seconds, timed):
    backend = Counted(seconds)
    found = step_seconds(backend, host_draft=False, overlap=1, chunked_prefill_size=64)
    for batch in BATCHES:
        assert found[batch] == pytest.approx([seconds * batch * t.nodes for t in TIERS])
    assert set(backend.steps) == PROGRAMS
    # Beside them those before all rows decode, the first two, and what was ahead of the last.
    steps = backend.steps.values()
    assert ROUNDS * timed < min(steps) <= max(steps) < ROUNDS * (timed + 9)


@pytest.mark.parametrize("first", [0, 80])
def test_what_slows_the_machine_down_for_a_while_is_not_held_against_a_program(first):
    backend = Counted(0.003)
    backend.slow, backend.slow_steps = (4, 4), range(first, first + 80)
    found = step_seconds(backend, host_draft=False, overlap=1, chunked_prefill_size=64)
    assert 80 < backend.steps.total() < 240
    assert found[4] == pytest.approx([0.012, 0.048])
