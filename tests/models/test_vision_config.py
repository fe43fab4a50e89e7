"""Vision configs: encoder and image processor fields, and errors that name the field."""

import json
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from shared.models.checkpoint import CheckpointError, load_all, open_checkpoint
from shared.models.families import config_from_dict, config_from_folder, vision_from_folder
from shared.models.image_processor import images_from_folder, read_images
from shared.models.model_folder import ModelFolder
from shared.models.vision_config import read_vision
from shared.models.vision_parameters import check_vision_encoder
from tests.support.golden_images import IMAGES, MODEL, vision
from tests.support.tiny_models import write_tiny

TOWER = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
PROCESSOR = json.loads((IMAGES / "config.json").read_text(encoding="utf-8"))["preprocessor_config"]


def read(**changes):
    text = config_from_dict(TOWER)
    given = {"vision_config": {**TOWER["vision_config"], **changes}}
    return read_vision({**TOWER, **given}, text.hidden, text.vocab)


@pytest.fixture
def folder(tmp_path):
    return shutil.copytree(MODEL, tmp_path / "model")


def test_vision_from_folder_reads_config_fields():
    found = vision_from_folder(MODEL)
    assert found is not None
    assert (found.depth, found.hidden, found.num_heads, found.head_size) == (2, 32, 2, 16)
    assert (found.patch_numbers, found.merged, found.table_side, found.out) == (96, 4, 4, 64)
    assert found.image_token == TOWER["image_token_id"]
    assert read(initializer_range=0.5, dtype="bfloat16") == found


def test_vision_config_accepts_transformers_spellings():
    found = vision_from_folder(MODEL)
    rope = {"rope_parameters": {"rope_type": "axial", "rope_theta": 10000}}
    assert read(**rope, model_type="qwen3_5_vision", output_attentions=False) == found
    patch = TOWER["vision_config"]["patch_size"]
    assert read(patch_size=[patch, patch], deepstack_visual_indexes=[]) == found
    renamed = {"num_attention_heads": "num_heads", "num_hidden_layers": "depth"}
    stated = {alias: TOWER["vision_config"][name] for alias, name in renamed.items()}
    assert read(**stated, **dict.fromkeys(renamed.values())) == found
    assert read(in_channels=None, hidden_act=None) == found
    fault = (
        "num_hidden_layers and depth in vision_config are spellings of one field and must be equal"
    )
    with pytest.raises(ValueError, match=fault):
        read(num_hidden_layers=7)


def test_vision_config_absent_fields_use_class_defaults():
    text = config_from_dict(TOWER)
    kept = {"hidden_size": 32, "num_heads": 2, "out_hidden_size": text.hidden}
    found = read_vision({**TOWER, "vision_config": kept}, text.hidden, text.vocab)
    assert found is not None
    assert (found.depth, found.intermediate, found.patch_size, found.frames) == (27, 4304, 16, 2)
    assert (found.channels, found.merge_size, found.table_side) == (3, 2, 48)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_vision_from_folder_of_text_model_returns_none(family, tmp_path):
    write_tiny(tmp_path, family, 0)
    assert vision_from_folder(tmp_path) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("deepstack_visual_indexes", [8, 16, 24]),
        ("hidden_act", "silu"),
        ("in_channels", 1),
        ("num_position_embeddings", 15),
        ("num_heads", 3),
        ("num_heads", 16),
        ("out_hidden_size", 32),
        ("fullatt_block_indexes", [7]),
        ("rope_theta", 5000.0),
        ("rope_type", "linear"),
        ("patch_size", [16, 14]),
        ("depth", 0),
        ("depth in config.json must be at most", 10**9),
        ("num_position_embeddings in config.json must be at most", 10**400),
    ],
)
def test_unsupported_vision_config_names_field(field, value):
    name = field.split()[0]
    changed = {"rope_parameters": {name: value}} if name.startswith("rope") else {name: value}
    with pytest.raises(ValueError, match=field):
        read(**changed)


def test_text_model_loads_despite_unsupported_vision_config(folder):
    given = {"vision_config": {**TOWER["vision_config"], "window_size": 112}}
    (folder / "config.json").write_text(json.dumps({**TOWER, **given}))
    with pytest.raises(ValueError, match="window_size in vision_config"):
        vision_from_folder(folder)
    config = config_from_folder(folder)
    assert config == config_from_folder(MODEL)
    assert not [name for name in load_all(folder, config, True) if name.startswith("vision")]


def test_check_tower_covers_exactly_vision_tensors():
    checkpoint = open_checkpoint(MODEL)
    wanted = check_vision_encoder(checkpoint, vision())
    stored = {x: y for x, y in load_file(MODEL / "model.safetensors").items() if "visual." in x}
    assert {f"model.{source.name}" for p in wanted for source in p.sources} == stored.keys()
    loaded = {p.name: checkpoint.load(p, np.float32) for p in wanted}
    assert {p.name: p.shape for p in wanted} == {x: y.shape for x, y in loaded.items()}
    assert sum(x.size for x in loaded.values()) == sum(x.size for x in stored.values())
    second = stored["model.visual.blocks.1.mlp.linear_fc1.bias"]
    np.testing.assert_array_equal(loaded["vision.mlp.up_bias"][1], second)


@pytest.mark.parametrize("fault", ["missing", "shape", "unknown"])
def test_faulty_vision_tensor_named_in_error(fault, folder):
    path, name = folder / "model.safetensors", "model.visual.merger.norm.bias"
    tensors = load_file(path)
    if fault == "unknown":
        tensors[f"{name}s"] = tensors[name]
    elif fault == "shape":
        tensors[name] = np.zeros(3, np.float32)
    else:
        del tensors[name]
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match="visual.merger.norm.bias"):
        check_vision_encoder(open_checkpoint(folder), vision())


def test_image_processor_config_accepts_both_spellings(folder):
    found = read_images(PROCESSOR, vision())
    assert (found.multiple, found.min_pixels, found.max_pixels, found.mean) == (
        8,
        512,
        2048,
        (0.5,) * 3,
    )
    older = {x: y for x, y in PROCESSOR.items() if x != "size"}
    (folder / "preprocessor_config.json").write_text(
        json.dumps({**older, "min_pixels": 512, "max_pixels": 2048, "size": None})
    )
    assert images_from_folder(ModelFolder(folder), vision()) == found
    both = read_images({**PROCESSOR, "max_pixels": 1024}, vision())
    assert (both.min_pixels, both.max_pixels) == (512, 1024), "same as transformers"
    neither = read_images(older, vision())
    assert (neither.min_pixels, neither.max_pixels) == (3136, 1_003_520)


def test_processor_config_precedes_preprocessor_config(folder):
    """Uses the nested format of transformers 5, with nulls for unset fields."""
    joint, own = folder / "processor_config.json", folder / "preprocessor_config.json"
    nested = {**PROCESSOR, "do_pad": None, "min_pixels": None, "max_pixels": None}
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "patch_size": 14}
    whole = {"processor_class": "Qwen3VLProcessor", "video_processor": video}
    joint.write_text(json.dumps({**whole, "image_processor": nested}))
    assert images_from_folder(ModelFolder(folder), vision()) == read_images(PROCESSOR, vision())
    own.write_text(json.dumps({**PROCESSOR, "image_mean": [0.25] * 3}))
    assert images_from_folder(ModelFolder(folder), vision()).mean == (0.5,) * 3
    joint.write_text(json.dumps({**whole, "image_processor": {**nested, "patch_size": 0}}))
    with pytest.raises(ValueError, match="patch_size in image_processor of processor_config.json"):
        images_from_folder(ModelFolder(folder), vision())
    joint.write_text(json.dumps(whole))
    assert images_from_folder(ModelFolder(folder), vision()).mean == (0.25,) * 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("image_processor_type", "SiglipImageProcessor"),
        ("do_resize: false", False),
        ("do_resize in preprocessor_config.json must be true or false, got 'x'", "x"),
        ("do_normalize", False),
        ("resample", 2),
        ("rescale_factor", 1.0),
        ("patch_size", 14),
        ("merge_size", 1),
        ("temporal_patch_size", 1),
        ("image_mean", [0.5]),
        ("image_std", [0.5, 0.5, 0.0]),
        ("size", {"height": 224, "width": 224}),
    ],
)
def test_unsupported_image_processor_config_names_field(field, value):
    with pytest.raises(ValueError, match=field):
        read_images({**PROCESSOR, re.split("[: ]", field)[0]: value}, vision())


def test_image_processor_rejects_contradicting_pixel_limits():
    size = {"shortest_edge": 4096, "longest_edge": 512}
    with pytest.raises(ValueError, match=r"minimum pixels \(4096\) .* exceed the maximum \(512\)"):
        read_images({**PROCESSOR, "size": size}, vision())


def test_missing_image_processor_config_raises():
    with pytest.raises(
        ValueError, match="has no image processor settings; add preprocessor_config.json"
    ):
        images_from_folder(ModelFolder(MODEL), vision())
