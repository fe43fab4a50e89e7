"""Fields of Gemma 4: layers of two shapes, shared KV, per-layer embeddings, and their errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.models.checkpoint import CheckpointError, load_all
from shared.models.families import config_from_dict, config_from_folder
from shared.models.mixers import AttentionConfig
from shared.spec.layers import rotary_frequencies

GOLDEN = Path(__file__).parents[1] / "golden" / "gemma4"
CONFIG = json.loads((GOLDEN / "config.json").read_text(encoding="utf-8"))


def test_per_layer_config_equals_global_fields():
    want = config_from_dict(CONFIG | {"attention_k_eq_v": True, "num_global_key_value_heads": 1})
    own = {name: value for name, value in CONFIG.items() if name != "global_head_dim"}
    sizes = {"head_dim": 16, "num_key_value_heads": 1}
    own |= {"attention_k_eq_v": True, "per_layer_config": {"2": sizes, "5": sizes}}
    assert config_from_dict(own) == want


@pytest.mark.parametrize(
    "stated",
    [
        {"2": {"head_dim": 16}},
        {"2": {"head_dim": 16}, "5": {"head_dim": 32}},
        {"2": {"num_attention_heads": 2}, "5": {"num_attention_heads": 2}},
    ],
    ids=["one layer", "two sizes", "other field"],
)
def test_other_per_layer_config_raises(stated):
    with pytest.raises(ValueError, match="per_layer_config must give each full_attention layer"):
        config_from_dict(CONFIG | {"per_layer_config": stated})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_kv_shared_layers": 4}, "leaves no layer of full_attention with KV of its own"),
        ({"vocab_size_per_layer_input": 95}, r"must be vocab_size \(96\), got 95"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention: 'all' is not"),
    ],
)
def test_unsupported_gemma4_field_raises(fields, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(CONFIG | fields)


def test_last_layer_has_full_attention():
    types = ["sliding_attention", "full_attention", *["sliding_attention"] * 4]
    config = config_from_dict(CONFIG | {"layer_types": types, "num_kv_shared_layers": 0})
    assert [each.mixer.window for each in config.layers] == [8, None, 8, 8, 8, None]


def test_proportional_rotary_rotates_first_pairs():
    full = config_from_folder(GOLDEN).layers[2].mixer
    assert isinstance(full, AttentionConfig)
    got = rotary_frequencies(full.rotary)
    want = [1e6 ** (-2 * pair / 16) if pair < 2 else 0 for pair in range(8)]
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_kv_tensors_of_sharing_layers_are_ignored(tmp_path):
    shutil.copytree(GOLDEN, tmp_path, dirs_exist_ok=True)
    tensors = load_file(GOLDEN / "model.safetensors")
    spare = tensors["model.layers.3.self_attn.k_proj.weight"]
    config, path = config_from_folder(GOLDEN), tmp_path / "model.safetensors"
    save_file(tensors | {"model.layers.4.self_attn.k_proj.weight": spare}, path)
    assert load_all(tmp_path, config, False).keys() == load_all(GOLDEN, config, False).keys()
    save_file(tensors | {"model.layers.6.self_attn.k_proj.weight": spare}, path)
    with pytest.raises(CheckpointError, match=r"layers.6.self_attn.k_proj.weight is not part"):
        load_all(tmp_path, config, False)


@pytest.mark.parametrize("kind", ["Gemma4Assistant", "Gemma4UnifiedAssistant"])
def test_assistant_as_model_raises(kind):
    with pytest.raises(ValueError, match=f"{kind}ForCausalLM, a draft head; serve its"):
        config_from_dict({"architectures": [f"{kind}ForCausalLM"], "text_config": CONFIG})
