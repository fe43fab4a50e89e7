"""LoRA adapters of the reference backend, and the load step; see `shared.boundary.adapter_pool`."""

from __future__ import annotations

import numpy as np

from shared.boundary.adapter_pool import AdapterPoolSpec, LoadAdapter
from shared.boundary.backend import StepPlan
from shared.spec.lora import AdapterWeights


def new_adapters(pool: AdapterPoolSpec | None) -> dict[str, AdapterWeights]:
    """Returns empty adapter slots, by parameter."""
    if pool is None:
        return {}

    def empty(shape: tuple[int, ...]) -> np.ndarray:
        return np.zeros((pool.num_slots, *shape), np.float32)

    return {
        name: AdapterWeights(
            **{x: empty(shape) for x, shape in each.arrays.items()}, parts=each.parts
        )
        for name, each in pool.local(0, 1).items()
    }


def load_adapter(
    adapters: dict[str, AdapterWeights], pool: AdapterPoolSpec, plan: StepPlan
) -> None:
    """Writes the layers of a load step."""
    assert isinstance(plan.work, LoadAdapter)
    assert plan.adapters is not None
    for array, span in pool.arrays(plan.program):
        values = plan.work.words[span].view(np.float32).reshape(array.shape)
        getattr(adapters[array.parameter], array.name)[plan.adapters[0] - 1, array.layers] = values
