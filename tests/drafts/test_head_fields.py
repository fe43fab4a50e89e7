"""Fields of a draft head config: written by current tools, or absent."""

from __future__ import annotations

import pytest

from shared.drafts.config import DraftConfig
from shared.models.config_classes.llama import LLAMA
from shared.models.config_classes.qwen import QWEN3
from tests.support.tiny_heads import tiny_block_config, tiny_head_config
from tests.support.tiny_models import tiny_model

TARGET, _ = tiny_model("llama", 0)

WRITTEN = {
    "_attn_implementation_autoset": True,
    "unsloth_version": "2026.1",
    "unsloth_fixed": True,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "head_dtype": "float32",
    "max_seq_len": 4096,
    "model_max_length": 4096,
    "do_sample": True,
    "transformers_version": "5.24.0",
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
    "output_router_logits": False,
    "pad_token_id": 0,
    "bad_words_ids": [[1]],
    "num_labels": 2,
    "problem_type": "regression",
}


WRITTEN["tie_word_embeddings"] = True


def flat(kind: str) -> dict:
    return tiny_block_config(TARGET) if kind == "DFLASH" else tiny_head_config(TARGET, kind)


def speculators(**layer) -> dict:
    """Config of an EAGLE-3 head in the speculators format with changed layer fields."""
    stated = tiny_head_config(TARGET, "EAGLE3")
    outer = {name: stated.pop(name) for name in ("draft_vocab_size", "eagle_config")}
    del stated["architectures"]
    return {
        "speculators_model_type": "eagle3",
        "draft_vocab_size": outer["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "transformer_layer_config": {**stated, "model_type": "llama", **layer},
    }


def read(config: dict) -> DraftConfig:
    return DraftConfig.from_dict(config, TARGET)


@pytest.mark.parametrize("field", WRITTEN)
@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3", "DFLASH"])
def test_head_config_ignores_fields_without_effect(kind, field):
    assert read(flat(kind) | {field: WRITTEN[field]}) == read(flat(kind))


@pytest.mark.parametrize("kind", ["EAGLE", "EAGLE3", "DFLASH"])
def test_head_rotary_settings_accept_every_spelling(kind):
    config = flat(kind) | {"rope_scaling": None, "rope_theta": None}
    want = read(config | {"rope_theta": 7.0}).layer
    nested = {"full_attention": {"rope_theta": 7}, "sliding_attention": {"rope_theta": 7}}
    for rope in ({"rope_theta": 7.0, "rope_type": "default"}, nested):
        assert read(config | {"rope_parameters": rope}).layer == want
    nested["sliding_attention"] = {"rope_theta": 8}
    with pytest.raises(ValueError, match="rope_parameters that differ by layer type"):
        read(config | {"rope_parameters": nested})


def test_speculators_layer_accepts_nested_rope_parameters():
    rope = {"rope_type": "default", "rope_theta": 7.0}
    absent = {"rope_theta": None, "rope_scaling": None}
    config = speculators(rope_parameters=rope, **absent)
    assert read(config).layer.attention.rotary.theta == 7.0
    config = speculators(rope_parameters=rope | {"rope_theta": 8}, rope_theta=7.0)
    with pytest.raises(ValueError, match=r"rope_theta in config\.json is 7.0 .* is 8"):
        read(config)


@pytest.mark.parametrize(
    ("kind", "model_type", "of"),
    [("EAGLE", None, LLAMA), ("EAGLE3", "llama", LLAMA), ("DFLASH", "qwen3", QWEN3)]
    + [("EAGLE3", "qwen3", QWEN3), ("DFLASH", None, QWEN3)],
)
def test_absent_head_fields_use_class_defaults(kind, model_type, of):
    config = flat(kind) | {"model_type": model_type, "rope_scaling": None}
    for field in ("rms_norm_eps", "rope_theta", "head_dim", "intermediate_size"):
        config.pop(field, None)
    attention = read(config).layer.attention
    assert read(config).layer.rms_eps == of.fields["rms_norm_eps"]
    assert attention.rotary.theta == of.theta
    assert attention.head_size == (of.fields["head_dim"] or TARGET.hidden // attention.num_heads)
    dense = read(config).layer.dense
    assert dense is not None
    assert dense.intermediate == of.fields["intermediate_size"]
