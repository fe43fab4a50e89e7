"""Fields of a config.json with two spellings, null values or no value."""

from __future__ import annotations

import pytest

from shared.models.families import config_from_dict
from tests.support.tiny_models import tiny_config


def llama(**changes):
    return {**tiny_config("llama", nested=False, with_mtp=False, tied=False), **changes}


def experts(**changes):
    return {**tiny_config("qwen3_moe", nested=False, with_mtp=False, tied=False), **changes}


def test_rope_parameters_by_layer_type_apply_to_layers():
    """Covers two bases, and a scaling of one layer type."""
    by_type = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1000000},
    }
    fields = {"rope_scaling": None, "rope_theta": None, "sliding_window": 8}
    olmo = llama(architectures=["Olmo3ForCausalLM"], num_hidden_layers=4, **fields)
    sliding, full = config_from_dict(olmo | {"rope_parameters": by_type}).attentions
    assert (sliding.rotary.theta, sliding.rotary.type) == (10000.0, "default")
    assert (full.rotary.theta, full.rotary.type, full.rotary.factor) == (1e6, "linear", 4.0)
    del by_type["full_attention"]
    by_type["sliding_attention"]["rope_theta"] = 7.0
    sliding, full = config_from_dict(olmo | {"rope_parameters": by_type}).attentions
    assert (sliding.rotary.theta, full.rotary.theta) == (7.0, 500000.0)


def test_default_rope_theta_beside_rope_parameters_ignored():
    own = tiny_config("ministral3", nested=False, with_mtp=False, tied=False)
    own["rope_parameters"]["rope_theta"] = 7.0
    assert config_from_dict(own | {"rope_theta": 10000.0}) == config_from_dict(own)
    with pytest.raises(ValueError, match=r"rope_theta in config\.json is 8.0 .* is 7.0"):
        config_from_dict(own | {"rope_theta": 8.0})
    del own["rope_parameters"]
    rotary = config_from_dict(own).attention.rotary
    assert (rotary.theta, rotary.type, rotary.factor) == (1e6, "yarn", 16.0)


def test_null_and_absent_fields_follow_config_class():
    fields = {"max_position_embeddings": 8192, "rope_scaling": None, "num_attention_heads": 16}
    absent = llama(architectures=["MistralForCausalLM"], **fields)
    del absent["num_key_value_heads"]
    (attention,) = config_from_dict(absent).attentions
    assert (attention.num_kv_heads, attention.window) == (8, 4096)
    nulls = {"num_key_value_heads": None, "sliding_window": None, "tie_word_embeddings": None}
    (attention,) = config_from_dict(absent | nulls).attentions
    assert (attention.num_kv_heads, attention.window) == (16, None)


def test_vlm_config_accepts_model_type_without_architectures():
    outer = {"model_type": "mistral3", "text_config": llama(rope_scaling=None)}
    for field in ("architectures", "model_type", "tie_word_embeddings"):
        del outer["text_config"][field]
    config = config_from_dict(outer)
    assert (config.name, config.tied) == ("mistral", True)
    assert not config_from_dict(outer | {"tie_word_embeddings": False}).tied


@pytest.mark.parametrize(
    "fields", [{"max_window_layers": 2}, {"layer_types": ["full_attention"] * 3}]
)
def test_moe_sliding_window_rejects_excepted_layers(fields):
    windows = {"use_sliding_window": True, "sliding_window": 8}
    assert {x.mixer.window for x in config_from_dict(experts(**windows)).layers} == {8}
    assert config_from_dict(experts(**fields)) == config_from_dict(experts())
    with pytest.raises(ValueError, match=f"{next(iter(fields))} with use_sliding_window: true"):
        config_from_dict(experts(**windows, **fields))


def test_config_from_dict_rejects_draft_head():
    for fields in (
        {"architectures": ["LlamaForCausalLMEagle3"]},
        {"architectures": ["DFlashDraftModel"]},
        {"architectures": [], "model_type": "x", "speculators_model_type": "eagle3"},
    ):
        with pytest.raises(ValueError, match="a draft head; .* --speculative-draft-model-path"):
            config_from_dict(llama(**fields))


def test_field_in_two_spellings_requires_equal_values():
    both = experts(num_local_experts=8.0)
    assert config_from_dict(both) == config_from_dict(experts())
    alone = experts(num_experts=None, num_local_experts=8)
    assert config_from_dict(alone) == config_from_dict(experts())
    with pytest.raises(ValueError, match="num_local_experts and num_experts .* got 4 and 8"):
        config_from_dict(experts(num_local_experts=4))


def test_eos_token_id_defaults_to_config_class():
    absent = llama()
    del absent["eos_token_id"]
    assert config_from_dict(absent).eos_ids == (2,)
    assert config_from_dict(absent, {"eos_token_id": 5}).eos_ids == (5,)
    assert config_from_dict(absent | {"eos_token_id": None}).eos_ids == ()
    beyond = absent | {"architectures": ["Olmo2ForCausalLM"]}
    assert config_from_dict(beyond).eos_ids == ()
    assert config_from_dict(beyond | {"eos_token_id": [50279, 7]}).eos_ids == (7,)
    with pytest.raises(ValueError, match="eos_token_id must name tokens"):
        config_from_dict(beyond | {"eos_token_id": 50278})
