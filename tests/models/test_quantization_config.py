"""Supported fields of `quantization_config`, and the FP8 layouts of checkpoint files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from transformers import FineGrainedFP8Config

from jax_impl import weights as jax_weights
from shared.models.checkpoint import CheckpointError, load_all, open_checkpoint
from shared.models.config import ModelConfig
from shared.models.families import config_from_dict
from shared.models.formats import fp8
from shared.models.formats.fp8 import Granularity
from shared.models.parameters import parameters
from tests.support.files import read_stored, write_stored
from tests.support.fp8_files import FILE, LAYOUTS, compressed, write_fp8, write_widened
from tests.support.op_records import leaves
from torch_impl import weights as torch_weights

GOLDEN = Path(__file__).parents[1] / "golden"
STATED: dict[str, Any] = json.loads((GOLDEN / "qwen3_moe_fp8" / "config.json").read_text())
STATED = {field: value for field, value in STATED.items() if field != "quantization_config"}
QUERY = "layers.0.self_attn.q_proj.weight"
CPU, JAX_CPU = torch.device("cpu"), jax.devices("cpu")[0]
each_layout = pytest.mark.parametrize("layout", LAYOUTS)


def written(folder: Path, layout: str) -> ModelConfig:
    """Writes and checks a checkpoint of this layout, and writes its dequantised copy."""
    config = write_fp8(folder / "fp8", STATED, LAYOUTS[layout])
    open_checkpoint(folder / "fp8").check(config, False)
    write_widened(folder / "fp8", folder / "wide")
    return config


@each_layout
def test_fp8_layout_load_equals_dequantized(layout, tmp_path) -> None:
    config = written(tmp_path, layout)
    got, want = (load_all(tmp_path / name, config, False) for name in ("fp8", "wide"))
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_array_equal(got[name], want[name], err_msg=name)


@each_layout
def test_backends_load_fp8_layouts_as_dequantized(layout, tmp_path) -> None:
    config = written(tmp_path, layout)
    of_torch, of_jax = [], []
    for name in ("fp8", "wide"):
        opened, how = open_checkpoint(tmp_path / name), (lambda count: None, {})
        of_torch.append(torch_weights.load(opened, config, False, "bfloat16", CPU, *how))
        half = ml_dtypes.bfloat16
        of_jax.append(jax_weights.load(opened, config, False, half, JAX_CPU, *how))
    both = [list(leaves(torch.Tensor, each)) for each in of_torch]
    assert len(both[0]) == len(both[1]) > 8
    assert all(torch.equal(one, other) for one, other in zip(*both, strict=True))
    jax.tree.map(np.testing.assert_array_equal, *of_jax)


@each_layout
def test_fp8_layout_progress_counts_values_and_scales(layout, tmp_path) -> None:
    config, seen = written(tmp_path, layout), []
    opened, wanted = open_checkpoint(tmp_path / "fp8"), parameters(config, False)
    for parameter in wanted:
        opened.load(parameter, np.float32, seen.append)
    stored = read_stored(tmp_path / "fp8" / FILE).items()
    unused = (*fp8.OF_ACTIVATIONS, *fp8.OF_KV)
    needed = [x.nbytes for name, (_, x) in stored if not name.endswith(unused)]
    assert sum(seen) == opened.num_bytes(wanted) == sum(needed)


def test_dequantize_accepts_stacked_scales_of_any_granularity() -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 0x7F, (3, 200, 130), np.uint8)
    places = (2, 150, 129)
    for shape, place in {
        (3, 2, 2): (2, 1, 1),
        (3, 200, 1): (2, 150, 0),
        (3, 1, 1): (2, 0, 0),
        (3, 1): (2, 0),
        (3,): (2,),
    }.items():
        scales = rng.uniform(0.1, 0.2, shape).astype(np.float32)
        got = fp8.dequantize(codes, scales)
        assert got[places] == fp8.VALUES[codes[places]] * scales[place]
        for number in range(3):
            np.testing.assert_array_equal(
                got[number], fp8.dequantize(codes[number], scales[number])
            )


def changed(name: str, numbers: np.ndarray, kind: str = "F32"):
    return lambda tensors: tensors | {name: (kind, numbers)}


FAULTS = {
    rf"{QUERY}_scale has shape \[128\], expected \[1, 1\] or \[128, 1\] or \[1\] or \[\]": changed(
        f"{QUERY}_scale", np.ones(128, np.float32)
    ),
    rf"{QUERY}_scale has shape \[64, 1\]": changed(f"{QUERY}_scale", np.ones((64, 1), np.float32)),
    rf"{QUERY}_scale is stored as F8_E8M0": changed(
        f"{QUERY}_scale", np.ones((128, 1), np.uint8), "F8_E8M0"
    ),
    "layers.0.self_attn.q_proj.weight_zero_point is not part of a": changed(
        "layers.0.self_attn.q_proj.weight_zero_point", np.zeros((128, 1), np.float32)
    ),
    "layers.0.self_attn.k_scale is not part of a": changed(
        "layers.0.self_attn.k_scale", np.ones(1, np.float32)
    ),
    "layers.0.mlp.gate.input_scale is not part of a": changed(
        "layers.0.mlp.gate.input_scale", np.ones(1, np.float32)
    ),
    rf"{QUERY}_scale is not part of a": changed(
        f"{QUERY}_scale_inv", np.ones((128, 1), np.float32)
    ),
}


@pytest.mark.parametrize("message", FAULTS)
def test_faulty_fp8_layout_tensor_named_in_error(message, tmp_path) -> None:
    config = write_fp8(tmp_path, STATED, LAYOUTS["compressed-tensors, channel"])
    write_stored(tmp_path / FILE, FAULTS[message](read_stored(tmp_path / FILE)))
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(tmp_path).check(config, False)


def edited(place: str, value: object) -> dict[str, Any]:
    """A compressed-tensors config with one field changed, or removed for the value `...`."""
    stated = compressed(Granularity.CHANNEL)
    *outer, field = place.split(".")
    inner = stated
    for name in outer:
        inner = inner[name]
    inner[field] = value
    if value is ...:
        del inner[field]
    return stated


WEIGHTS, INPUTS = "config_groups.group_0.weights", "config_groups.group_0.input_activations"


@each_layout
def test_fp8_layout_config_equals_unquantized_config(layout) -> None:
    config = config_from_dict(STATED | {"quantization_config": LAYOUTS[layout].stated})
    assert config == config_from_dict(STATED)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("format", "naive-quantized"),
        ("format", ...),
        ("quantization_status", "frozen"),
        ("ignore", ...),
        ("sparsity_config", {"format": "dense", "global_sparsity": 0.1}),
        ("config_groups.group_0.format", "float-quantized"),
        ("config_groups.group_0.input_activations", None),
        (f"{WEIGHTS}.group_size", -1),
        (f"{WEIGHTS}.scale_dtype", "torch.bfloat16"),
    ],
    ids=str,
)
def test_compressed_tensors_config_is_accepted(place, value) -> None:
    config = STATED | {"quantization_config": edited(place, value)}
    assert config_from_dict(config) == config_from_dict(STATED)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("quant_method", "bitsandbytes"),
        ("format", "marlin-24"),
        ("format", "int-quantized"),
        ("format", "mixed-precision"),
        ("kv_cache_scheme", {"num_bits": 8, "type": "float"}),
        ("sparsity_config.format", "sparse-24-bitmask"),
        ("transform_config", {"config_groups": {}}),
        ("config_groups", ...),
        ("config_groups.group_1", ["Linear"]),
        ("config_groups.group_0.format", "nvfp4-pack-quantized"),
        ("config_groups.group_0.weights", ...),
        ("config_groups.group_0.output_activations", {"num_bits": 8}),
        (f"{WEIGHTS}.num_bits", 4),
        (f"{WEIGHTS}.type", "int"),
        (f"{WEIGHTS}.type", ...),
        (f"{WEIGHTS}.symmetric", False),
        (f"{WEIGHTS}.strategy", "group"),
        (f"{WEIGHTS}.group_size", 128),
        (f"{WEIGHTS}.block_structure", [64, 64]),
        (f"{WEIGHTS}.actorder", "group"),
        (f"{WEIGHTS}.dynamic", True),
        (f"{INPUTS}.num_bits", 4),
        (f"{INPUTS}.type", "int"),
    ],
    ids=str,
)
def test_unsupported_compressed_tensors_config_names_field(place, value) -> None:
    how = "without" if value is ... else "with"
    with pytest.raises(ValueError, match=rf"^quantization_config {how} {place}[^\n]*$"):
        config_from_dict(STATED | {"quantization_config": edited(place, value)})


WRITTEN = {
    "transformers 5": {
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": None,
        "modules_to_convert": None,
        "dequantize": False,
        "scale_fmt": "float",
        "expert_dtype": "fp8",
    },
    "transformers": json.loads(json.dumps(FineGrainedFP8Config().to_dict(), default=str)),
    "transformers 4": {"activation_scheme": "dynamic", "modules_to_not_convert": ["lm_head"]},
    "Qwen": {"fmt": "e4m3", "weight_block_size": [128, 128], "modules_to_not_convert": []},
    "DeepSeek-V3.1": {"fmt": "e4m3", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
    "dequantised at loading": {"weight_block_size": [128, 128], "dequantize": True},
    "an embedding": {"modules_to_convert": ["model.embed_tokens"]},
    "a cache without scales": {"kv_cache_scheme": None, "kv_cache_dtype": ""},
}


@pytest.mark.parametrize("writer", WRITTEN)
def test_fp8_config_ignores_fields_without_effect(writer) -> None:
    stated = {"quant_method": "fp8", **WRITTEN[writer]}
    assert config_from_dict(STATED | {"quantization_config": stated}) == config_from_dict(STATED)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_method", "fbgemm_fp8"),
        ("expert_dtype", "fp4"),
        ("dequantize", "later"),
        ("fmt", "e5m2"),
        ("weight_block_size", [64, 64]),
        ("activation_scheme", "other"),
        ("scale_fmt", "e5m3"),
        ("kv_cache_scheme", "static"),
    ],
)
def test_unsupported_fp8_config_names_field(field, value) -> None:
    for layout in ("AutoFP8", "Mistral"):
        stated = LAYOUTS[layout].stated | {field: value}
        with pytest.raises(ValueError, match=f"^quantization_config with {field}"):
            config_from_dict(STATED | {"quantization_config": stated})


@pytest.mark.parametrize("algorithm", ["NVFP4", "MIXED_PRECISION", "FP8_PER_CHANNEL_PER_TOKEN"])
def test_modelopt_config_requires_fp8(algorithm: str) -> None:
    stated = LAYOUTS["ModelOpt"].stated
    assert config_from_dict(STATED | {"quantization_config": stated}) == config_from_dict(STATED)
    other = STATED | {"quantization_config": stated | {"quant_algo": algorithm}}
    with pytest.raises(ValueError, match=f"with quant_algo: '{algorithm}' is not supported; it"):
        config_from_dict(other)
