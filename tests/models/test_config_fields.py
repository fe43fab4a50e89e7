"""Invalid values of a config.json: errors of one sentence that name the field."""

import copy
import json
import re

import pytest

from shared.models.config_fields import MOST_LEVELS
from shared.models.families import config_from_dict, config_from_folder
from tests.support.tiny_models import tiny_config

LONG = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}


def config_of(family, place=None, value=None):
    """The config.json of a tiny model, optionally with one changed field, also a nested one."""
    config = copy.deepcopy(tiny_config(family, nested=False, with_mtp=True, tied=False))
    if place is not None:
        *outer, field = place.split(".")
        inner = config
        for name in outer:
            inner = inner[name]
        inner[field] = value
    return config


BETA = "rope_parameters.llama_4_scaling_beta"
REFUSED = {
    "list strings": [
        *(("llama", "architectures", value) for value in (5, True, "LlamaForCausalLM", {}, [[]])),
        *(("llama", "layer_types", value) for value in (True, 0, "full_attention", [None], [{}])),
        ("olmo3", "layer_types", [["full_attention"]] * 3),
        ("qwen3_5", "layer_types", 2.5),
    ],
    "list integers": [
        *(("smollm3", "no_rope_layers", value) for value in (True, 3, {}, [True, False, True])),
        *(("qwen3_moe", "mlp_only_layers", value) for value in (5, "", [None], [[1]], [{}])),
    ],
    "list 0 or 1 for each layer": [("smollm3", "no_rope_layers", [1, 2, 1])],
    "be true or false": [
        *(("llama", "tie_word_embeddings", value) for value in ("false", 1, [])),
        ("llama", "attention_bias", "x"),
        ("llama", "mlp_bias", 0),
        ("llama", "mtp_use_dedicated_embeddings", {}),
        ("qwen2", "use_sliding_window", "x"),
        ("qwen3_5", "attn_output_gate", 0),
        ("qwen3_moe", "norm_topk_prob", "x"),
        ("glm4_moe", "use_qk_norm", 1),
    ],
    "be a string": [
        ("llama", "model_type", ["llama"]),
        ("llama", "rope_scaling.rope_type", []),
        ("phi3", "rope_scaling.type", 5),
    ],
    "be a non-negative integer": [
        ("mistral", "sliding_window", ""),
        ("qwen2", "max_window_layers", {}),
        ("qwen3_5", "mtp_num_hidden_layers", []),
        ("glm4_moe", "first_k_dense_replace", False),
    ],
    "be a positive number": [
        *(("ministral3", BETA, value) for value in ("x", "", "0.1", True, -1, [], float("nan"))),
    ],
    "be a number above 1, ": [("llama", "rope_theta", 1.0)],
    "be a number above 8, ": [("llama", "rope_scaling.high_freq_factor", 8.0)],
    "be at most 1, ": [("llama", "partial_rotary_factor", 2)],
    "be at most 16384, ": [
        ("llama", "num_hidden_layers", 10**9),
        ("qwen3_moe", "num_experts", 10**9),
        ("glm4_moe", "num_nextn_predict_layers", 10**9),
    ],
    "be at most 2147483647, ": [
        ("llama", "head_dim", 10**400),
        ("phi3", "max_position_embeddings", 10**400),
        ("mistral", "sliding_window", 10**30),
    ],
    "be at most 1.701411835e": [
        ("llama", "rms_norm_eps", 10**400),
        ("llama", "rope_theta", float("inf")),
        ("llama", "rope_scaling.factor", 1e300),
        ("ministral3", BETA, float("inf")),
    ],
}


@pytest.mark.parametrize(
    ("family", "place", "value", "must"),
    [(*case, must) for must, cases in REFUSED.items() for case in cases],
)
def test_config_from_dict_rejects_invalid_field_value(family, place, value, must):
    config = config_of(family, place, value)
    if place.startswith("rope_scaling.high"):
        config["rope_scaling"]["low_freq_factor"] = 8.0
    field = place.split(".")[-1]
    with pytest.raises(ValueError, match=rf"^{field}( in [a-z_.]+)? must {must}") as refused:
        config_from_dict(config)
    assert re.search(", got [^\n]{1,60}$", str(refused.value))


def test_rotary_settings_reject_division_by_zero():
    one = {"rope_scaling": LONG, "original_max_position_embeddings": 1}
    with pytest.raises(ValueError, match="original_max_position_embeddings must be above 1"):
        config_from_dict(config_of("llama") | one)
    with pytest.raises(ValueError, match="llama_4_scaling_beta is not supported with rope_type"):
        config_from_dict(config_of("ministral3", "rope_parameters.rope_type", "default"))


def test_partial_rotary_factor_rejects_odd_dimensions():
    with pytest.raises(ValueError, match=r"partial_rotary_factor \(0.2\) .* 16 .* must give an"):
        config_from_dict(config_of("llama", "partial_rotary_factor", 0.2))


@pytest.mark.parametrize("field", ["attention_bias", "layer_types", "sliding_window", "model_type"])
def test_null_field_equals_absent_field(field):
    config = config_of("mistral")
    config.pop(field, None)
    assert config_from_dict(config | {field: None}) == config_from_dict(config)


@pytest.mark.parametrize("growth", [None, 0, 0.0])
def test_zero_query_scaling_beta_disables_scaling(growth):
    assert config_from_dict(config_of("ministral3", BETA, growth)).attention.query_scaling_beta == 0


def test_config_from_folder_rejects_deep_nesting(tmp_path):
    """An error message with such a value would recurse too deeply."""
    for levels, message in ((MOST_LEVELS + 1, "deeper than 64 levels"), (10**5, "not valid JSON")):
        text = json.dumps(config_of("llama"))[:-1]
        deep = f'{text}, "vocab_size": {"[" * levels}{"]" * levels}}}'
        (tmp_path / "config.json").write_text(deep, encoding="utf-8")
        with pytest.raises(ValueError, match=message):
            config_from_folder(tmp_path)
