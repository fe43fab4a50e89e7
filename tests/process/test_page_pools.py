"""Sizes of the page pools of sliding windows in memory plans, and that a server needs no more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.drafts.drafter_spec import DrafterSpec
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.models.config import ModelConfig
from shared.models.families import config_from_dict
from shared.models.mixers import AttentionConfig
from shared.options.command_line import parse
from shared.process.device import Device
from shared.process.memory_plan import MemoryPlan, plan
from shared.process.page_pools import window_pools
from tests.support.cached_traffic import request, tokens
from tests.support.planned import GB, PLATFORMS, QWEN3_8B
from tests.support.random_traffic import plain_text
from tests.support.run_engine import drive
from tests.support.toy_backend import ToyBackend, toy_capacity
from tests.support.two_groups import two_groups

LONG = 131_072


def alternating(window: int | None) -> ModelConfig:
    """Qwen3-8B with 128k positions and a window in every second layer."""
    layers = []
    for index, layer in enumerate(QWEN3_8B.layers):
        assert isinstance(layer.mixer, AttentionConfig)
        mixer = replace(layer.mixer, window=window if index % 2 else None)
        layers.append(replace(layer, mixer=mixer))
    return replace(QWEN3_8B, layers=tuple(layers), context_length=LONG)


def planned(model: ModelConfig, flags: str = "", framework: str = "torch") -> MemoryPlan:
    device, costs = Device("gpu", "one", 140 * GB), PLATFORMS[framework].costs
    return plan(parse(flags.split()), model, DrafterSpec.none(), device, costs)


def bytes_of(memory: MemoryPlan) -> dict[str, int]:
    return {line.name: line.num_bytes for line in memory.lines}


@pytest.mark.parametrize("framework", PLATFORMS)
def test_window_of_128_tokens_costs_few_pages(framework):
    flags = f"--max-running-requests 1 --context-length {LONG} --chunked-prefill-size 2048"
    memory = planned(alternating(128), flags, framework)
    (pool,) = memory.capacity.window_pools
    assert pool.window == 128
    sizes, whole = bytes_of(memory), bytes_of(planned(alternating(None), flags, framework))
    assert sizes["KV"] == whole["KV"] / 2, "half of the layers keep all positions"
    assert sizes["KV of window 128"] < 0.07 * sizes["KV"]
    without = bytes_of(planned(alternating(128), f"{flags} --disable-radix-cache", framework))
    assert without["KV of window 128"] < 0.04 * sizes["KV"]


def test_windows_leave_memory_for_more_positions():
    """A pool that memory limits has nearly twice the positions."""
    flags = f"--context-length {LONG} --max-running-requests 32"
    few, many = (planned(alternating(window), flags).capacity for window in (None, 128))
    assert many.num_pages > 1.8 * few.num_pages
    assert few.window_pools == ()


def test_layers_with_shared_kv_cost_no_pages():
    """Half of the layers read the KV of the layer before them."""
    layers = []
    for index, layer in enumerate(QWEN3_8B.layers):
        mixer = replace(layer.mixer, has_kv=index % 2 == 0)
        source = index - 1 if index % 2 else None
        layers.append(replace(layer, mixer=mixer, kv_shared_layer_index=source))
    shared = replace(QWEN3_8B, layers=tuple(layers))
    flags = "--max-running-requests 2 --context-length 8192"
    sizes, whole = (bytes_of(planned(model, flags)) for model in (shared, QWEN3_8B))
    assert sizes["KV"] == whole["KV"] / 2
    assert sizes["weights"] < whole["weights"]


@pytest.mark.parametrize("window", [LONG, 100_000])
def test_wide_window_has_no_pool(window):
    memory = planned(alternating(window), f"--context-length {LONG} --max-running-requests 2")
    assert memory.capacity.window_pools == ()
    assert "KV of window" not in " ".join(bytes_of(memory))


def test_mistral_of_one_window_keeps_one_numbering():
    """All layers have the window; the other pages then cost nothing without a drafter."""
    mistral = config_from_dict(
        {
            "architectures": ["MistralForCausalLM"],
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 32_768,
            "sliding_window": 4096,
        }
    )
    memory = planned(mistral, "--max-running-requests 8")
    (pool,) = memory.capacity.window_pools
    assert bytes_of(memory)["KV"] == 0
    assert pool.num_pages < memory.capacity.num_pages / 2
    assert memory.max_request_tokens == 32_768


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_planned_pool_serves_all_requests_without_preemption(overlap):
    """Without cached pages the plan's pages suffice for all slots, with all steps in flight."""
    model, _ = two_groups()
    capacity = toy_capacity(
        num_pages=600, num_slots=5, overlap=overlap, batch_sizes=(4,), context_length=500
    )
    pools = window_pools(capacity, model, has_cache=False)
    (pool,) = pools
    assert pool.num_pages < 170
    engine = Engine(
        ToyBackend(replace(capacity, window_pools=pools)),
        StaticController(capacity, nodes=4, depth=3, width=1),
        overlap=overlap,
        chunked_prefill_size=128,
        cache=NO_CACHE,
    )
    asked = [request(tokens(n, 1 + 37 * n % 300), max_tokens=60) for n in range(24)]
    outcomes = drive(engine, asked)
    assert all(outcomes[each.request_id].tokens == plain_text(each) for each in asked)
    assert engine.scheduler.num_preemptions == 0
