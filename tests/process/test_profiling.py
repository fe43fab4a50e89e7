"""What decode steps cost, measured on a simulated device before anything is served."""

from collections import Counter

import pytest

from bench.phases import Imposed
from bench.simulated import SimulatedBackend, simulated_limits
from shared.boundary.backend import StepPlan, Work
from shared.engine.adaptive.tiers import Tier
from shared.process.profiling import step_seconds

TIERS = (Tier(1, 0, 0), Tier(4, 3, 1))
BATCHES = (1, 4)
PROGRAMS = {(batch, tier.nodes) for batch in BATCHES for tier in TIERS}


class Counted(SimulatedBackend):
    """Every step takes as long, and those of each program are counted."""

    def __init__(self, seconds: float) -> None:
        limits = simulated_limits(TIERS, BATCHES, overlap=1)
        super().__init__(limits, lambda batch, tier: seconds * batch * tier.nodes, Imposed({}, 1))
        self.steps = Counter[tuple[int, int]]()

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
    assert timed < min(backend.steps.values()) <= max(backend.steps.values()) < timed + 9
