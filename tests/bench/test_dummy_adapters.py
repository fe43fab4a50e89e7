"""LoRA adapters with random weights of the step benches."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from bench.common.draft_config import PLAIN, Draft
from bench.common.dummy_adapters import adapter_flags, adapter_name, add_adapters
from bench.common.session import Load, Session
from shared.boundary.adapter_pool import AdapterPoolSpec
from shared.engine.adapter_slots import AdapterSlots
from shared.models.families import config_from_folder
from shared.models.lora_shapes import AdapterShapes, adaptable
from shared.models.parameters import parameters

QWEN3 = Path(__file__).parents[1] / "golden" / "qwen3"


def test_requests_take_adapters_in_turn() -> None:
    sizes: dict[str, Any] = {"batch": 3, "prompt": 4, "output": 4, "temperature": 0, "top_p": 1}
    names = [x.sampling.lora for x in Load(**sizes, adapters=2).requests(100)]
    assert names == [adapter_name(0), adapter_name(1), adapter_name(0)]
    assert [x.sampling.lora for x in Load(**sizes).requests(100)] == [""] * 3
    assert adapter_flags(0, 16) == []


def test_dummy_adapters_fill_every_slot() -> None:
    wanted = adaptable(parameters(config_from_folder(QWEN3), False))
    pool = AdapterPoolSpec(2, tuple(AdapterShapes(x, 16) for x in wanted), "float32")
    capacity: Any = SimpleNamespace(adapters=pool)
    slots = AdapterSlots(capacity)
    served: Any = SimpleNamespace(
        backend=SimpleNamespace(capacity=capacity), engine=SimpleNamespace(adapters=slots)
    )
    add_adapters(served)
    assert list(slots.folders) == [adapter_name(0), adapter_name(1)]
    words = slots.host_copy(slots.find(adapter_name(1))).words
    assert 4 * sum(map(len, words)) == pool.adapter_bytes
    assert all(np.isfinite(x.view(np.float32)).all() and x.any() for x in words)


def test_session_without_checkpoint_serves_dummy_adapters() -> None:
    load = Load(batch=2, prompt=4, output=10, temperature=0, top_p=1)
    flags = ["--load-format", "dummy", *adapter_flags(2, 16)]
    session = Session.begin("torch", QWEN3, Draft.parse(PLAIN), {}, flags, load)
    try:
        plain, one, two, again = (
            session.round(replace(load, adapters=n)).texts for n in (0, 1, 2, 0)
        )
    finally:
        session.end()
    assert one == two
    assert plain == again
    assert all(a != b for a, b in zip(plain, one, strict=True))
