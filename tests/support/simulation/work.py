"""Costs of an H200 and rates of acceptance, for the tests of the adaptive choice."""

from collections.abc import Callable

import numpy as np

from shared.engine.adaptive.tiers import Tier
from tests.support.simulation.device import seconds_of

MILLISECONDS = {
    "none": {1: 4.3, 8: 4.6, 32: 5.3},
    "S1": {1: 4.6, 8: 5.0, 32: 6.0},
    "S3": {1: 5.2, 8: 5.75, 32: 7.5},
    "S7": {1: 6.6, 8: 7.5, 32: 11.0},
    "S5k4N16": {1: 5.9, 8: 8.2, 32: 18.0},
}
"""Milliseconds of a step, measured or interpolated (docs/performance.md, Qwen3-8B)."""

TIERS = (Tier(1, 0, 0), Tier(2, 1, 1), Tier(4, 3, 1), Tier(8, 7, 1), Tier(16, 5, 4))
BATCHES = (1, 2, 4, 8, 16, 32)
SECONDS = seconds_of(MILLISECONDS)


def always(rate: float) -> Callable[[np.random.Generator], tuple[float, ...]]:
    """The same rate for every request."""
    return lambda rng: (rate,)


def mixed(rng: np.random.Generator) -> tuple[float, ...]:
    """A rate of its own for every request."""
    return (float(rng.uniform(0.2, 0.95)),)
