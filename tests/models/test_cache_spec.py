"""Cache specs of layers: equal to the memory plan and to the allocations of both backends."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
import torch

from jax_impl import device_state as jax_state
from jax_impl import platform as jax_platform
from shared.drafts.drafter_spec import DrafterSpec
from shared.models.layers import LayerConfig
from shared.models.mixers import AttentionConfig
from shared.models.parameters import parameters
from shared.models.tp_sharding import shard_config
from shared.options.options import Options
from shared.process.device import Device
from shared.process.memory_plan import plan
from tests.support.tiny_models import tiny_model
from torch_impl import device_state as torch_state
from torch_impl import platform as torch_platform

MODEL = tiny_model("qwen3_5", 0, with_mtp=True)[0]
TYPES = {"float32": (torch.float32, jnp.float32), "bfloat16": (torch.bfloat16, jnp.bfloat16)}
PLACES = ("kv", "delta", "snapshots")


def bytes_of(state: object) -> int:
    """Bytes of all per-layer arrays of a state and its drafter."""
    held = [getattr(owner, name) for owner in (state, state.draft) for name in PLACES]
    return sum(x.nbytes for each in held if each is not None for x in parts(each))


def parts(held: object) -> list:
    if isinstance(held, tuple) and not hasattr(held, "recurrent"):
        return list(held)  # KV pools
    return [getattr(held, name) for name in ("recurrent", "window")]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_cache_bytes_in_plan_equal_allocated_state(framework, dtype):
    asked = {
        "model_path": "model",
        "max_running_requests": 3,
        "max_total_tokens": 512,
        "speculative_algorithm": "NEXTN",
        "dtype": dtype,
    }
    platform = torch_platform.PLATFORM if framework == "torch" else jax_platform.PLATFORM
    device = Device("cpu", "a CPU", 1 << 34)
    drafts = DrafterSpec.of_mtp(MODEL)
    memory = plan(Options.from_values(asked), MODEL, drafts, device, platform.costs)
    capacity, kinds = memory.blueprint.capacity, TYPES[dtype]
    if framework == "torch":
        where = (kinds[0], torch.device("cpu"))
        state = torch_state.allocate(MODEL, capacity, drafts.sizes, *where, 1)
    else:
        where = (kinds[1], jax.devices("cpu")[0])
        state = jax_state.allocate(MODEL, capacity, drafts.sizes, *where, 1)
    names = ("KV", "draft KV", "state", "snapshots")
    counted = {line.name: line.num_bytes for line in memory.lines if line.name in names}
    assert set(counted) == set(names)
    assert bytes_of(state) == sum(counted.values())


def test_cache_spec_bytes_scale_with_mixer_sizes():
    attention, delta = MODEL.attention, MODEL.recurrent
    wide = replace(attention, num_kv_heads=4)
    assert [x.piece_bytes(2) for x in wide.cache_specs] == [
        2 * x.piece_bytes(2) for x in attention.cache_specs
    ]
    recurrent, window = replace(delta, value_size=2 * delta.value_size).cache_specs
    assert recurrent.piece_bytes(2) == 2 * delta.cache_specs[0].piece_bytes(2)
    assert recurrent.piece_bytes(2) == recurrent.piece_bytes(4)  # its own dtype
    assert window.piece_bytes(2) < 2 * delta.cache_specs[1].piece_bytes(2)


def test_attention_layers_of_other_sizes_have_own_pools():
    odd = LayerConfig(mixer=replace(MODEL.attention, num_heads=8, head_size=64), mlp=MODEL.dense)
    model = replace(MODEL, layers=(*MODEL.layers, odd))
    assert [each.name for each in model.groups] == ["gated_delta", "attention", "attention_2"]
    assert [len(pool) for pool in model.kv_pools] == [len(MODEL.kv_pools[0]), 1]
    assert (model.places[-1].mixer, model.places[-1].pool) == ("attention_2", 1)


def reader(mixer: AttentionConfig, source: int | None) -> LayerConfig:
    """A layer that reads the KV of layer `source`."""
    mixer = replace(mixer, has_kv=False)
    return LayerConfig(mixer=mixer, mlp=MODEL.dense, kv_shared_layer_index=source)


def test_layers_with_shared_kv_have_no_pool():
    whole, slides = MODEL.attention, replace(MODEL.attention, window=8)
    own = LayerConfig(mixer=slides, mlp=MODEL.dense)
    layers = (*MODEL.layers, own, reader(whole, 3), reader(slides, 4), reader(whole, 1))
    model = replace(MODEL, layers=layers)
    assert [each.layers for each in model.groups] == [(0, 2), (1, 3, 4), (5, 6, 7)]
    assert [pool.layers for pool in model.kv_pools] == [(1, 3), (4,)]
    placed = [(at.pool, at.pool_index, at.mixer_index) for at in model.places[-3:]]
    assert placed == [(0, 1, 0), (1, 0, 1), (0, 0, 2)]
    shapes = {p.name: p.shape for p in parameters(model, False)}
    assert shapes["attention_2.inputs"][1] == shapes["attention.inputs"][1] - 2 * whole.key_size
    assert "attention_2.q_norm" in shapes
    assert "attention_2.k_norm" not in shapes
    assert [each.kv_shared_layer_index for each in shard_config(model, 2).layers[-3:]] == [3, 4, 1]


@pytest.mark.parametrize(
    ("source", "changed"),
    [(0, {}), (4, {}), (-1, {}), (5, {}), (1, {"window": 8}), (1, {"head_size": 64})],
    ids=str,
)
def test_model_config_rejects_unreadable_kv(source, changed):
    layer = reader(replace(MODEL.attention, **changed), source)
    with pytest.raises(ValueError, match=f"layer 4 reads the KV of layer {source}, which must be"):
        replace(MODEL, layers=(*MODEL.layers, layer))


def test_model_config_rejects_kv_of_reader():
    layers = (*MODEL.layers, reader(MODEL.attention, 1), reader(MODEL.attention, 4))
    with pytest.raises(ValueError, match="layer 5 reads the KV of layer 4, which must be"):
        replace(MODEL, layers=layers)


@pytest.mark.parametrize(("has_kv", "source"), [(False, None), (True, 1)])
def test_model_config_rejects_contradicting_kv_source(has_kv, source):
    layer = reader(MODEL.attention, source)
    layer = replace(layer, mixer=replace(layer.mixer, has_kv=has_kv))
    with pytest.raises(ValueError, match=f"layer 4 has kv_shared_layer_index {source}"):
        replace(MODEL, layers=(*MODEL.layers, layer))


def test_model_config_rejects_states_of_different_sizes():
    odd = LayerConfig(mixer=replace(MODEL.recurrent, num_value_heads=8), mlp=MODEL.dense)
    with pytest.raises(ValueError, match="recurrent layers of different sizes"):
        replace(MODEL, layers=(*MODEL.layers, odd))
