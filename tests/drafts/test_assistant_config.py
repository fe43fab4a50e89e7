"""Config and tensors of Gemma 4 assistants: what is read, and errors that name the field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.drafts.assistant import TOKEN_ORDERING, clusters_of_rank, clusters_of_tokens
from shared.drafts.checkpoint import check_head, load_head, open_head
from shared.drafts.config import DraftConfig
from shared.models.checkpoint import SINGLE_FILE, CheckpointError
from tests.support.tiny_assistants import tiny_assistant_config, write_tiny_assistant
from tests.support.tiny_models import tiny_model

TARGET, WEIGHTS = tiny_model("gemma4", 0)


def read(text: dict[str, Any] | None = None, **fields: Any) -> DraftConfig:
    config = tiny_assistant_config(TARGET, **fields)
    return DraftConfig.from_dict(
        config | {"text_config": config["text_config"] | (text or {})}, TARGET
    )


def test_layers_have_queries_only():
    config = read()
    assert all(not layer.mixer.cache_specs for layer in config.layer.layers)
    assert [layer.mixer.window for layer in config.layer.layers] == [12, 12, None]
    assert config.kv_layers == (2, 2, 1)
    assert config.fc_inputs == 2 * TARGET.hidden
    assert not config.layer.tied


def test_defaults_follow_config_class():
    """transformers writes neither, if they have the default values."""
    config = tiny_assistant_config(TARGET)
    for field in ("num_kv_shared_layers", "hidden_size_per_layer_input"):
        del config["text_config"][field]
    assert DraftConfig.from_dict(config, TARGET) == read()
    assert read(use_ordered_embeddings=False).clusters is None


def test_wide_mlps_are_twice_as_wide():
    widths = [
        config.layer.dense.intermediate for config in (read(), read({"use_double_wide_mlp": True}))
    ]
    assert widths == [40, 80]


def test_window_beyond_context_follows_target():
    """A target with a short context has no windows, and its assistant none."""
    layers = tuple(replace(x, mixer=replace(x.mixer, window=None)) for x in TARGET.layers)
    short = replace(TARGET, layers=layers)
    config = DraftConfig.from_dict(tiny_assistant_config(TARGET), short)
    assert [layer.mixer.window for layer in config.layer.layers] == [None] * 3
    assert config.kv_layers == (2, 2, 1)


@pytest.mark.parametrize(
    ("fields", "text", "message"),
    [
        (
            {"backbone_hidden_size": 64},
            {},
            r"backbone_hidden_size \(64\) is not the target's \(48\)",
        ),
        ({}, {"vocab_size": 289}, r"vocab_size \(289\) is not the target's \(288\)"),
        ({}, {"num_kv_shared_layers": 2}, r"num_kv_shared_layers must be num_hidden_layers \(3\)"),
        ({}, {"global_head_dim": 64}, "full_attention layers read 1 KV heads of size 64"),
        ({}, {"num_key_value_heads": 4}, "sliding_attention layers read 4 KV heads of size 16"),
        ({}, {"sliding_window": 13}, "sliding_attention layers read 2 KV heads of size 16"),
        (
            {},
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_theta": 5.0},
                    "full_attention": {"rope_theta": 5.0},
                }
            },
            "rope_parameters; use an assistant",
        ),
        (
            {},
            {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 288},
            "hidden_size_per_layer_input is not supported",
        ),
        (
            {},
            {
                "enable_moe_block": True,
                "num_experts": 4,
                "top_k_experts": 2,
                "moe_intermediate_size": 8,
            },
            "enable_moe_block is not supported",
        ),
        ({}, {"hidden_activation": "relu"}, "the draft model is not supported: hidden_activation"),
        ({"num_centroids": 7}, {}, r"num_centroids \(7\) must divide vocab_size \(288\)"),
        ({"centroid_intermediate_top_k": 17}, {}, r"at least centroid_intermediate_top_k \(17\)"),
        ({"tie_word_embeddings": False}, {}, "tie_word_embeddings must be true"),
        ({"parallel_drafting": True}, {}, "parallel_drafting .* is not supported for ASSISTANT"),
    ],
)
def test_unsupported_field_raises(fields, text, message):
    with pytest.raises(ValueError, match=message):
        read(text, **fields)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_tiny_assistant(tmp_path / "draft", TARGET, WEIGHTS, 1)
    return tmp_path / "draft"


def changed(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    save_file(load_file(folder / SINGLE_FILE) | tensors, folder / SINGLE_FILE)


def test_spare_kv_tensors_are_not_read(folder):
    config, spare = DraftConfig.from_folder(folder, TARGET), np.zeros((32, 32), np.float32)
    before = load_head(open_head(folder), config, np.float32).weights
    changed(folder, {"model.layers.0.self_attn.k_proj.weight": spare, "lm_head.weight": spare})
    after = load_head(open_head(folder), config, np.float32).weights
    assert before.keys() == after.keys()


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {"layers.0.self_attn.sinks": np.zeros(4, np.float32)},
            "sinks is not part of an ASSISTANT",
        ),
        ({TOKEN_ORDERING: np.zeros(288, np.int64)}, "must contain each of the 288 tokens once"),
        ({TOKEN_ORDERING: np.zeros(288, np.float32)}, "as integers"),
        ({"post_projection.weight": np.zeros((48, 31), np.float32)}, "post_projection.weight"),
    ],
)
def test_invalid_tensor_raises(tensors, message, folder):
    changed(folder, tensors)
    with pytest.raises(CheckpointError, match=message):
        check_head(open_head(folder), DraftConfig.from_folder(folder, TARGET))


def test_clusters_of_tokens_invert_ordering():
    clusters = read().clusters
    assert clusters is not None
    ordering = np.random.default_rng(0).permutation(288)
    found = clusters_of_tokens(ordering, clusters, 288)
    np.testing.assert_array_equal(found[ordering], np.repeat(np.arange(16), 18))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_shards_of_clusters_cover_vocabulary(count):
    clusters = np.arange(288, dtype=np.int32)
    shards = [clusters_of_rank(clusters, rank, count) for rank in range(count)]
    assert len({len(shard) for shard in shards}) == 1
    np.testing.assert_array_equal(np.concatenate(shards)[:288], clusters)
