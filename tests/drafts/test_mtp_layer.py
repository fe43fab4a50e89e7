"""External MTP layers in the speculators format: replacement of own layers, and errors."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.drafts.checkpoint import kind_of, open_head
from shared.drafts.mtp import with_mtp_of
from shared.models.checkpoint import SINGLE_FILE, CheckpointError, open_checkpoint
from shared.models.families import config_from_folder
from shared.models.model_folder import ModelFolder
from shared.models.parameters import parameters
from shared.process.device import Device
from shared.process.launch import launch
from tests.support.serve_reference import PLATFORM
from tests.support.tiny_models import tiny_config, write_tiny

RENAMED = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.layers.0.": "mtp_layers.0.",
}
"""Tensor names of a checkpoint, and their names in the speculators format."""

FAMILIES = ("qwen3_5", "qwen3_5_moe")


def write_layer(folder: Path, family: str, seed: int, **fields) -> dict[str, np.ndarray]:
    """Writes the MTP layer of another tiny checkpoint; returns its tensors by usual name."""
    write_tiny(folder / "from", family, seed)
    taken = {k: v for k, v in load_file(folder / "from" / SINGLE_FILE).items() if "mtp." in k}
    tensors, found = {}, {}
    for name, array in taken.items():
        name = name[name.index("mtp.") :]
        begin = next(old for old in RENAMED if name.startswith(old))
        found[name], tensors[RENAMED[begin] + name.removeprefix(begin)] = array, array
    layer = tiny_config(family, nested=False, with_mtp=True, tied=False)
    config = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_config": {"algorithm": "mtp"},
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": layer | fields.pop("layer", {}),
        **fields,
    }
    if family == "qwen3_5":
        config["transformer_layer_config"]["model_type"] = "qwen3_5_text"
    (folder / "layer").mkdir()
    (folder / "layer" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(tensors, folder / "layer" / SINGLE_FILE)
    return found


def joined(folder: Path, target: Path):
    layer, model = open_head(folder / "layer"), config_from_folder(target)
    config = ModelFolder(folder / "layer").config
    return with_mtp_of(config, layer, model, open_checkpoint(target))


@pytest.mark.parametrize("with_mtp", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_external_mtp_layer_replaces_checkpoint_tensors(family, with_mtp, tmp_path):
    write_tiny(tmp_path / "target", family, 0, with_mtp=with_mtp)
    write_layer(tmp_path, family, 7)
    assert kind_of(open_head(tmp_path / "layer").names) == "NEXTN"
    model, files = joined(tmp_path, tmp_path / "target")
    assert model.has_mtp
    files.check(model, with_mtp=True)
    own, theirs = (open_checkpoint(tmp_path / name) for name in ("target", "from"))
    for parameter in parameters(model, with_mtp=True):
        from_where = theirs if parameter.name.startswith("mtp.") else own
        want = from_where.load(parameter, np.float32)
        np.testing.assert_array_equal(files.load(parameter, np.float32), want)


REFUSED = {
    "another width": ({"layer": {"hidden_size": 96}}, "hidden_size"),
    "another rotation": ({"layer": {"rope_parameters": {"rope_theta": 5.0}}}, "rope_theta"),
    "other heads": ({"layer": {"num_attention_heads": 2}}, "num_attention_heads"),
    "another model": ({"layer": {"model_type": "qwen3_next"}}, "qwen3_next"),
    "two layers": ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
    "an unknown field": ({"unheard_of": 1}, "unheard_of"),
    "another kind": ({"speculators_model_type": "peagle"}, "peagle"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_incompatible_mtp_layer_names_field(case, tmp_path):
    fields, named = REFUSED[case]
    write_tiny(tmp_path / "target", "qwen3_5_moe", 0)
    write_layer(tmp_path, "qwen3_5_moe", 7, **fields)
    with pytest.raises(ValueError, match=named):
        joined(tmp_path, tmp_path / "target")


def test_mtp_layer_rejects_unsupported_target_and_tensors(tmp_path):
    write_tiny(tmp_path / "llama", "llama", 0)
    write_tiny(tmp_path / "target", "qwen3_5", 0)
    write_layer(tmp_path, "qwen3_5", 7)
    with pytest.raises(ValueError, match="not supported for a llama model"):
        joined(tmp_path, tmp_path / "llama")
    path, more = tmp_path / "layer" / SINGLE_FILE, np.ones(3, np.float32)
    tensors = load_file(path)
    save_file({**tensors, "mtp_layers.1.norm.weight": more}, path)
    with pytest.raises(CheckpointError, match=r"mtp_layers\.1\.norm"):
        joined(tmp_path, tmp_path / "target")
    save_file({**tensors, "mtp_layers.0.self_attn.q_proj.bias": more}, path)
    model, files = joined(tmp_path, tmp_path / "target")
    with pytest.raises(
        CheckpointError, match=r"mtp\.layers\.0\.self_attn\.q_proj\.bias is not part of"
    ):
        files.check(model, with_mtp=True)


def test_nextn_startup_passes_external_layer_to_backend(tmp_path):
    write_tiny(tmp_path / "target", "qwen3_5", 0, with_mtp=False)
    want, reached = write_layer(tmp_path, "qwen3_5", 7), []

    def load_backend(blueprint, checkpoint, draft_files, progress):
        (fc,) = (p for p in parameters(blueprint.config, True) if p.name == "mtp.fc")
        reached.append((blueprint.drafts.with_mtp, checkpoint.load(fc, np.float32)))
        raise CheckpointError("enough")

    platform = replace(
        PLATFORM, find_device=lambda: Device("cpu", "CPU", 1 << 30), load=load_backend
    )
    line = ["--port", "0", "--model-path", str(tmp_path / "target")]
    line += ["--speculative-algorithm", "NEXTN"]
    assert (
        launch([*line, "--speculative-draft-model-path", str(tmp_path / "layer")], lambda: platform)
        == 2
    )
    ((with_mtp, fc),) = reached
    assert with_mtp
    np.testing.assert_array_equal(fc, want["mtp.fc.weight"])
