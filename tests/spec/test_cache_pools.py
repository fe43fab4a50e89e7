"""Cache pools of the specification: one for each pool of a model, with its shapes."""

from dataclasses import replace

import numpy as np

from shared.models.layers import LayerConfig
from shared.spec import cache_pools
from tests.support.tiny_models import tiny_model

HYBRID = tiny_model("qwen3_5", 0)[0]


def test_new_pools_have_shapes_of_their_layers():
    attention = HYBRID.attention
    wide = replace(attention, head_size=2 * attention.head_size)
    layers = (*HYBRID.layers, LayerConfig(mixer=wide, mlp=HYBRID.layers[0].mlp))
    first, second = cache_pools.new_pools(replace(HYBRID, layers=layers), 5, 16)
    count = sum(each.mixer == attention for each in HYBRID.layers)
    heads, size = attention.num_kv_heads, attention.head_size
    assert first.shape == (count, 2, 5, 16, heads, size)
    assert second.shape == (1, 2, 5, 16, heads, 2 * size)


def test_new_state_stacks_gdn_layers_and_rows():
    delta = HYBRID.recurrent
    state = cache_pools.new_state(HYBRID, 3)
    layers = sum(each.mixer == delta for each in HYBRID.layers)
    assert state.recurrent.shape == (layers, 3, *delta.cache_specs[0].shape)
    assert state.window.shape == (layers, 3, *delta.cache_specs[1].shape)
    assert not np.any(state.recurrent)


def test_new_state_of_attention_model_has_no_layers():
    assert len(cache_pools.new_state(tiny_model("qwen3", 0)[0], 3).recurrent) == 0
