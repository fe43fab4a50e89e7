"""Checkpoints: every layout loads under internal names, faulty tensors are named."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.models.checkpoint import CheckpointError, load_all, open_checkpoint
from shared.models.families import config_from_folder
from shared.models.parameters import parameters
from shared.models.saving import save_checkpoint
from shared.models.tied import as_stored
from tests.support.tiny_models import (
    DIVIDED,
    EXPERTS,
    FAMILIES,
    WITH_MTP,
    tiny_config,
    tiny_model,
    write_tiny,
)

FILE = "model.safetensors"


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


def edit(folder, **fields):
    """Replaces fields of config.json; None removes one."""
    path = folder / "config.json"
    stated = json.loads(path.read_text()) | fields
    path.write_text(json.dumps({k: v for k, v in stated.items() if v is not None}))


def rewrite(folder, change):
    """Applies `change` to the tensors of a single-file checkpoint."""
    tensors = load_file(folder / FILE)
    save_file(change(tensors), folder / FILE)


@pytest.mark.parametrize("family", [*FAMILIES, *EXPERTS])
@pytest.mark.parametrize("num_shards", [1, 3])
def test_save_checkpoint_round_trips(family, num_shards, tmp_path):
    config = write_tiny(tmp_path, family, 0, num_shards=num_shards)
    assert config == config_from_folder(tmp_path)
    assert_same(load_all(tmp_path, config, config.has_mtp), tiny_model(family, 0)[1])


@pytest.mark.parametrize("tied", [False, True])
def test_nested_checkpoint_loads_same_arrays(tied, tmp_path):
    config = write_tiny(tmp_path, "qwen3_5", 0, nested=True, tied=tied)
    assert "model.language_model.norm.weight" in load_file(tmp_path / FILE)
    assert_same(load_all(tmp_path, config, True), tiny_model("qwen3_5", 0, tied=tied)[1])


@pytest.mark.parametrize("prefix", ["language_model.", "language_model.model.", ""])
def test_checkpoint_accepts_other_tensor_prefixes(prefix, tmp_path):
    config = write_tiny(tmp_path, "qwen3", 0)
    rewrite(tmp_path, lambda t: {k.replace("model.", prefix, 1): v for k, v in t.items()})
    assert_same(load_all(tmp_path, config, False), tiny_model("qwen3", 0)[1])


def test_stacked_parameters_fuse_projections_by_layer(tmp_path):
    config = write_tiny(tmp_path, "qwen3_5", 0)
    stored, ours = load_file(tmp_path / FILE), load_all(tmp_path, config, True)
    layer = "model.layers.3.self_attn."  # the second attention layer
    fused = np.concatenate([stored[f"{layer}{x}_proj.weight"] for x in "qkv"])
    np.testing.assert_array_equal(ours["attention.inputs"][1], fused)
    layer = "model.layers.2.linear_attn."  # the second gated-delta layer
    fused = np.concatenate([stored[f"{layer}in_proj_{x}.weight"] for x in ("qkv", "z", "b", "a")])
    np.testing.assert_array_equal(ours["gated_delta.inputs"][1], fused)
    conv = stored[f"{layer}conv1d.weight"]
    np.testing.assert_array_equal(ours["gated_delta.conv"][1], conv[:, 0])


def test_fused_delta_projections_are_separated_by_kind(tmp_path):
    """The file has the rows of a key head together: q, k, v, z, and b, a."""
    config, sizes = write_tiny(tmp_path, "qwen3_next", 0), (16, 16, 32, 32)
    stored, ours = load_file(tmp_path / FILE), load_all(tmp_path, config, True)
    layer = "model.layers.2.linear_attn.in_proj_"
    heads = np.split(stored[f"{layer}qkvz.weight"], 2)
    parts = zip(*(np.split(head, np.cumsum(sizes)[:-1]) for head in heads), strict=True)
    rates = np.split(stored[f"{layer}ba.weight"], 4)
    separated = [*(np.concatenate(part) for part in parts), *rates[::2], *rates[1::2]]
    np.testing.assert_array_equal(ours["gated_delta.inputs"][1], np.concatenate(separated))


def test_load_converts_dtype_except_float32_parameters(tmp_path):
    config = write_tiny(tmp_path, "qwen3_5", 0)
    rewrite(tmp_path, lambda t: {k: v.astype(ml_dtypes.bfloat16) for k, v in t.items()})
    checkpoint = open_checkpoint(tmp_path)
    for parameter in parameters(config, True):
        loaded = checkpoint.load(parameter, ml_dtypes.bfloat16)
        kept = parameter.name.endswith(("a_log", "dt_bias", "norm"))
        assert loaded.dtype == (np.float32 if kept else ml_dtypes.bfloat16), parameter.name
        assert loaded.shape == parameter.shape


def test_load_progress_counts_every_stored_byte(tmp_path):
    config = write_tiny(tmp_path, "qwen3_5", 0)
    checkpoint, wanted = open_checkpoint(tmp_path), parameters(config, True)
    seen = []
    for parameter in wanted:
        checkpoint.load(parameter, np.float32, seen.append)
    assert sum(seen) == checkpoint.num_bytes(wanted)
    assert sum(seen) == sum(tensor.nbytes for tensor in load_file(tmp_path / FILE).values())


@pytest.mark.parametrize("family", [name for name in WITH_MTP if name not in DIVIDED.values()])
def test_missing_mtp_tensors_raise_only_when_required(family, tmp_path):
    config = write_tiny(tmp_path, family, 0)
    (prefix,) = config.mtp.prefixes
    layer, prefix = prefix if prefix == "mtp." else f"model.{prefix}", f"{prefix}*"
    assert open_checkpoint(tmp_path).has_mtp(config)
    rewrite(tmp_path, lambda t: {k: v for k, v in t.items() if not k.startswith(layer)})
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.has_mtp(config)
    checkpoint.check(config, False)
    with pytest.raises(CheckpointError, match=f"requires {re.escape(prefix)}"):
        checkpoint.check(config, True)
    with pytest.raises(ValueError, match="names no MTP layer"):
        parameters(write_tiny(tmp_path, "qwen3_5", 0, with_mtp=False), True)


NESTED = "model.language_model."


@pytest.mark.parametrize("nested", [False, True])
def test_differing_lm_head_unties_model(nested, tmp_path):
    family = "qwen3_5" if nested else "llama"
    config = write_tiny(tmp_path, family, 0, nested=nested, with_mtp=False, tied=True)
    embedding = f"{NESTED if nested else 'model.'}embed_tokens.weight"
    rewrite(tmp_path, lambda t: {**t, "lm_head.weight": t[embedding]})
    assert as_stored(config, open_checkpoint(tmp_path)).tied
    rewrite(tmp_path, lambda t: {**t, "lm_head.weight": 2 * t[embedding]})
    untied = as_stored(config, open_checkpoint(tmp_path))
    assert not untied.tied
    loaded = load_all(tmp_path, untied, False)
    np.testing.assert_array_equal(loaded["lm_head"], 2 * loaded["embed"])
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from embed_tokens\.weight"):
        load_all(tmp_path, config, False)


def test_checkpoint_ignores_unused_tensors(tmp_path):
    config = write_tiny(tmp_path, "qwen3_5", 0, nested=True, tied=True)
    extra = {
        "model.visual.patch_embed.proj.bias": np.zeros(3, np.float32),
        "model.language_model.layers.1.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32),
    }
    rewrite(tmp_path, lambda t: {**t, **extra, "lm_head.weight": t[f"{NESTED}embed_tokens.weight"]})
    assert_same(load_all(tmp_path, config, True), tiny_model("qwen3_5", 0, tied=True)[1])


def split_experts(tensors, only=""):
    """Splits stacked experts into one tensor per expert, in layers with the given prefix."""
    found = {}
    for name, array in tensors.items():
        head, leaf = name.rsplit(".", 1)
        if not head.endswith(".experts") or not name.startswith(only):
            found[name] = array
            continue
        for expert, one in enumerate(array):
            halves = np.split(one, 2) if leaf == "gate_up_proj" else [one]
            parts = ("gate", "up") if leaf == "gate_up_proj" else ("down",)
            for part, half in zip(parts, halves, strict=True):
                found[f"{head}.{expert}.{part}_proj.weight"] = half.copy()
    return found


@pytest.mark.parametrize("only", ["", "model.layers.2.", "mtp."])
def test_experts_load_from_stacked_or_separate_tensors(only, tmp_path):
    config = write_tiny(tmp_path, "qwen3_5_moe", 0)
    before = load_file(tmp_path / FILE)
    rewrite(tmp_path, lambda t: split_experts(t, only))
    assert len(load_file(tmp_path / FILE)) >= len(before) + 3 * 8 - 2
    assert_same(load_all(tmp_path, config, True), tiny_model("qwen3_5_moe", 0)[1])


def test_shared_expert_of_same_width_stacked_last(tmp_path):
    config = write_tiny(tmp_path, "glm4_moe", 0)
    stored, ours = load_file(tmp_path / FILE), load_all(tmp_path, config, False)
    shared = "model.layers.2.mlp.shared_experts."
    gate, up, down = (stored[f"{shared}{x}_proj.weight"] for x in ("gate", "up", "down"))
    np.testing.assert_array_equal(ours["experts.gate_up"][1, 8], np.concatenate([gate, up]))
    np.testing.assert_array_equal(ours["experts.down"][1, 8], down)
    bias = stored["model.layers.2.mlp.gate.e_score_correction_bias"]
    np.testing.assert_array_equal(ours["experts.score_bias"][1], bias)


def test_shared_expert_gate_is_last_router_row(tmp_path):
    config = write_tiny(tmp_path, "qwen3_5_moe", 0)
    stored, ours = load_file(tmp_path / FILE), load_all(tmp_path, config, True)
    gate = stored["mtp.layers.0.mlp.shared_expert_gate.weight"]
    np.testing.assert_array_equal(ours["mtp.layer.experts.router"][0, 8:], gate)
    assert ours["experts.shared_down"].shape == (4, 64, 40)


@pytest.mark.parametrize("with_mtp", [False, True])
def test_further_mtp_layers_and_copies_ignored(with_mtp, tmp_path):
    write_tiny(tmp_path, "glm4_moe", 0)
    copies = ("3.embed_tokens.weight", "3.shared_head.head.weight", "4.eh_proj.weight")
    more = {f"model.layers.{name}": np.zeros((2, 2), np.float32) for name in copies}
    rewrite(tmp_path, lambda t: t | more)
    edit(tmp_path, num_nextn_predict_layers=2)
    stored = tiny_model("glm4_moe", 0)[1]
    want = {k: v for k, v in stored.items() if with_mtp or not k.startswith("mtp.")}
    assert_same(load_all(tmp_path, config_from_folder(tmp_path), with_mtp), want)


def test_mtp_layers_beyond_configured_count_raise(tmp_path):
    """An absent `num_nextn_predict_layers` has the default of the config class."""
    write_tiny(tmp_path, "glm4_moe", 0)
    edit(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(CheckpointError, match=r"layers\.3\.eh_proj\.weight is not part of"):
        load_all(tmp_path, config_from_folder(tmp_path), False)
    edit(tmp_path, num_nextn_predict_layers=None)
    assert config_from_folder(tmp_path).has_mtp
    rewrite(tmp_path, lambda t: {**t, "model.layers.4.enorm.weight": np.zeros(2, np.float32)})
    with pytest.raises(CheckpointError, match=r"layers\.4\.enorm\.weight is not part of"):
        load_all(tmp_path, config_from_folder(tmp_path), True)


QUERY = "layers.1.self_attn.q_proj.weight"


def without(name):
    return lambda t: {k: v for k, v in t.items() if not k.endswith(name)}


def changed(name, change):
    return lambda t: {k: change(v) if k.endswith(name) else v for k, v in t.items()}


FAULTS = {
    f"no tensor {QUERY}": without(QUERY),
    rf"{QUERY} has shape \[40, 48\], expected \[64, 48\]": changed(QUERY, lambda q: q[:40].copy()),
    f"{QUERY} is stored as I8": changed(QUERY, lambda q: q.astype(np.int8)),
    r"layers\.1\.self_attn\.q_proj\.bias is not part of": lambda t: {
        **t,
        "model.layers.1.self_attn.q_proj.bias": np.zeros(64, np.float32),
    },
    "stored twice": lambda t: {**t, QUERY: t[f"model.{QUERY}"]},
}


@pytest.mark.parametrize("message", FAULTS)
def test_faulty_tensor_named_before_reading(message, tmp_path, monkeypatch):
    config = write_tiny(tmp_path, "qwen3", 0)
    rewrite(tmp_path, FAULTS[message])
    monkeypatch.setattr("shared.models.checkpoint.Checkpoint.load", None)
    with pytest.raises(CheckpointError, match=message):
        load_all(tmp_path, config, False)


GATE = "layers.2.mlp.experts.5.gate_proj.weight"
EXPERT_FAULTS = {
    f"no tensor {GATE}": lambda t: without(GATE)(split_experts(t)),
    rf"{GATE} has shape \[48, 24\], expected \[24, 48\]": lambda t: changed(
        GATE, lambda g: g.T.copy()
    )(split_experts(t)),
    r"no tensor layers\.2\.mlp\.experts\.gate_up_proj": without(
        "layers.2.mlp.experts.gate_up_proj"
    ),
    r"layers\.0\.mlp\.experts\.down_proj has shape \[8, 24, 48\]": changed(
        "layers.0.mlp.experts.down_proj", lambda d: d.swapaxes(1, 2).copy()
    ),
    r"layers\.0\.mlp\.experts\.0\.down_proj\.weight is not part of": lambda t: split_experts(t) | t,
    r"layers\.2\.mlp\.experts\.8\.down_proj\.weight is not part of": lambda t: {
        **split_experts(t),
        "model.layers.2.mlp.experts.8.down_proj.weight": np.zeros((48, 24), np.float32),
    },
    r"layers\.0\.mlp\.shared_expert_gate\.weight is not part of": lambda t: {
        **t,
        "model.layers.0.mlp.shared_expert_gate.weight": np.zeros((1, 48), np.float32),
    },
    r"layers\.3\.mlp\.gate\.weight is not part of": lambda t: {
        **t,
        "model.layers.3.mlp.gate.weight": np.zeros((8, 48), np.float32),
    },
}


@pytest.mark.parametrize("message", EXPERT_FAULTS)
def test_faulty_expert_tensor_named_before_reading(message, tmp_path, monkeypatch):
    config = write_tiny(tmp_path, "qwen3_moe", 0)
    rewrite(tmp_path, EXPERT_FAULTS[message])
    monkeypatch.setattr("shared.models.checkpoint.Checkpoint.load", None)
    with pytest.raises(CheckpointError, match=message):
        load_all(tmp_path, config, False)


def test_open_checkpoint_rejects_faulty_folder(tmp_path):
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        open_checkpoint(tmp_path)
    write_tiny(tmp_path, "qwen3", 0)
    whole = (tmp_path / FILE).read_bytes()
    for length in (len(whole) - 5, 4, 0):
        (tmp_path / FILE).write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match="truncated"):
            open_checkpoint(tmp_path)
    (tmp_path / FILE).unlink()
    with pytest.raises(CheckpointError, match="neither"):
        open_checkpoint(tmp_path)


def test_missing_shard_and_broken_index_raise(tmp_path):
    write_tiny(tmp_path, "qwen3", 0, num_shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="shard model-00002-of-00002"):
        open_checkpoint(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"embed": 5}}))
    with pytest.raises(CheckpointError, match="is not a valid index of shards"):
        open_checkpoint(tmp_path)
    index.write_text(json.dumps({"weight_map": 3}))
    with pytest.raises(CheckpointError, match="index"):
        open_checkpoint(tmp_path)


def test_save_checkpoint_rejects_missing_weights(tmp_path):
    config = tiny_config("qwen3", nested=False, with_mtp=False, tied=False)
    _, weights = tiny_model("qwen3", 0)
    del weights["lm_head"]
    with pytest.raises(KeyError, match="lm_head"):
        save_checkpoint(tmp_path, config, weights)
