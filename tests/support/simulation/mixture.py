"""MoE on a simulated device: the cost of a step is the time to read its rows' experts.

Rows choose their experts independently, so the rows of a step read, of each layer, the expected
number of distinct ones. Padding, and nodes that a row did not draft, read none. The rest of a step
has a constant cost.
"""

from __future__ import annotations

import numpy as np

from shared.boundary.backend import StepPlan
from shared.engine.adaptive.tiers import Tier
from tests.support.simulation.device import SimulatedBackend

NUM_EXPERTS, NUM_CHOSEN = 256, 8
EXPERT_MS = 0.0376
"""Cost of one expert in all layers: 40 of 3.1 MB at 3.35 TB/s, as of a MoE of 35 billion in FP8."""

REST_MS, DRAFT_MS, ROW_MS = 2.2, 0.3, 0.005
"""Cost of the rest of a step, of each draft depth, and of each row."""


def distinct(rows: float) -> float:
    """Returns the mean number of experts of a layer that `rows` rows read."""
    return NUM_EXPERTS * (1 - (1 - NUM_CHOSEN / NUM_EXPERTS) ** rows)


def mixture_seconds(rows: float, tier: Tier) -> float:
    """Returns the cost of a step with `rows` rows."""
    experts = EXPERT_MS * distinct(rows)
    return (REST_MS + experts + DRAFT_MS * tier.depth + ROW_MS * rows) / 1000


class MixtureBackend(SimulatedBackend):
    """Backend with step costs of `mixture_seconds` by rows, independent of the batch bucket."""

    def _decode_seconds(self, plan: StepPlan, nodes: np.ndarray) -> float:
        rows = float(nodes[plan.slots > 0].sum())
        return mixture_seconds(rows, Tier.of(plan.program.shape, plan.program.batch))
