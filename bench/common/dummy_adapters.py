"""LoRA adapters with random weights, for an engine with dummy weights."""

import numpy as np

from shared.engine.adapter_slots import HostAdapter
from shared.engine.request import AdapterVersion
from shared.models.lora_shapes import AdapterArrays, AdapterShapes
from tests.support.in_process_engine import Served


def adapter_flags(slots: int, rank: int) -> list[str]:
    """Returns the flags of a server with adapter slots for all linear layers."""
    if not slots:
        return []
    sizes = ["--max-loras-per-batch", str(slots), "--max-lora-rank", str(rank)]
    return [*sizes, "--lora-target-modules", "all"]


def adapter_name(index: int) -> str:
    """Returns the name of an adapter."""
    return f"dummy-{index}"


def add_adapters(served: Served) -> None:
    """Adds an adapter for each slot of an engine; all have the same weights."""
    pool = served.backend.capacity.adapters
    if pool is None:
        return
    rng = np.random.default_rng(0)
    words = pool.pack({x.parameter.name: _arrays(rng, x) for x in pool.shapes})
    for index in range(pool.num_slots):
        name = adapter_name(index)
        served.engine.adapters.add(HostAdapter(AdapterVersion(name, name), "", words))


def _arrays(rng: np.random.Generator, shapes: AdapterShapes) -> AdapterArrays:
    """Returns small random arrays; large ones repeat their numbers."""
    drawn = rng.standard_normal(2**16 - 3, np.float32)
    sizes = shapes.arrays
    return AdapterArrays(
        a=np.resize(drawn, sizes["a"]) / np.float32(sizes["a"][-1] ** 0.5),
        b=np.resize(drawn, sizes["b"]) / np.float32(32),
        scales=np.ones(sizes["scales"], np.float32),
        factors=np.ones(sizes["factors"], np.float32),
    )
