"""Checkpoints in FP8 as files, in the layouts of releases, and the same with widened weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shared.models.config import ModelConfig
from shared.models.families import config_from_dict
from shared.models.formats import fp8
from shared.models.formats.fp8 import Granularity
from shared.models.parameters import parameters
from tests.support.files import KINDS, Stored, read_stored, write_stored
from tests.support.tiny_models import tiny_weights

FILE = "model.safetensors"


def compressed(granularity: Granularity, *, is_static: bool = False) -> dict[str, Any]:
    """A `quantization_config` as compressed-tensors writes it."""
    block = [fp8.BLOCK, fp8.BLOCK] if granularity is Granularity.BLOCK else None
    each = {"actorder": None, "num_bits": 8, "observer_kwargs": {}, "symmetric": True}
    each |= {"group_size": None, "type": "float"}
    group = {
        "input_activations": each
        | {"block_structure": None, "dynamic": not is_static, "observer": None}
        | {"strategy": "tensor" if is_static else "token"},
        "output_activations": None,
        "targets": ["Linear"],
        "weights": each
        | {"block_structure": block, "dynamic": False, "observer": "minmax"}
        | {"strategy": granularity.value},
    }
    return {
        "config_groups": {"group_0": group},
        "format": "float-quantized",
        "global_compression_ratio": 1.239,
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.11.0",
    }


@dataclass(frozen=True)
class Layout:
    """Layout of FP8 weights in a checkpoint file.

    Attributes:
      kind: Dtype of scales.
      end: Suffix of the names of scales.
      tensors_shape: Shape of a per-tensor scale.
      of_activations: Suffix of the activation scale stored next to each weight, or None.
      has_kv_scales: True if scales of an FP8 KV cache are stored.
      stated: The `quantization_config`.
    """

    granularity: Granularity
    kind: str
    end: str
    stated: dict[str, Any]
    tensors_shape: tuple[int, ...] = (1,)
    of_activations: str | None = None
    has_kv_scales: bool = False


_STATIC = {"dynamic": False, "num_bits": 8, "type": "float"}
MODELOPT = {
    "config_groups": {
        "group_0": {"input_activations": _STATIC, "weights": _STATIC, "targets": ["Linear"]}
    },
    "ignore": ["lm_head", "backbone.layers.0.mixer.conv1d"],
    "kv_cache_scheme": _STATIC,
    "producer": {"name": "modelopt", "version": "0.29.0"},
    "quant_algo": "FP8",
    "quant_method": "modelopt",
}
"""A `quantization_config` as NVIDIA's Model Optimizer writes it."""

LAYOUTS = {
    "compressed-tensors, block": Layout(
        Granularity.BLOCK, "BF16", "_scale", compressed(Granularity.BLOCK)
    ),
    "compressed-tensors, channel": Layout(
        Granularity.CHANNEL, "BF16", "_scale", compressed(Granularity.CHANNEL)
    ),
    "compressed-tensors, channel, float32": Layout(
        Granularity.CHANNEL, "F32", "_scale", compressed(Granularity.CHANNEL)
    ),
    "compressed-tensors, tensor": Layout(
        *(Granularity.TENSOR, "BF16", "_scale", compressed(Granularity.TENSOR, is_static=True)),
        of_activations="input_scale",
    ),
    "AutoFP8": Layout(
        *(Granularity.TENSOR, "F32", "_scale"),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
        of_activations="input_scale",
    ),
    "Mistral": Layout(
        *(Granularity.TENSOR, "BF16", "_scale_inv"),
        {
            "activation_scheme": "static",
            "dequantize": False,
            "modules_to_not_convert": ["model.vision_tower", "lm_head"],
            "quant_method": "fp8",
            "weight_block_size": None,
        },
        tensors_shape=(),
        of_activations="activation_scale",
    ),
    "ModelOpt": Layout(
        *(Granularity.TENSOR, "F32", "_scale", MODELOPT),
        tensors_shape=(),
        of_activations="input_scale",
        has_kv_scales=True,
    ),
}


def write_fp8(folder: Path, stated: dict[str, Any], layout: Layout) -> ModelConfig:
    """Writes a random checkpoint of a config.json in FP8, experts one by one."""
    config = config_from_dict(stated)
    folder.mkdir(exist_ok=True)
    whole = stated | {"quantization_config": layout.stated}
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    weights, tensors = tiny_weights(config, 0), {}
    for parameter in parameters(config, config.has_mtp):
        pieces = [[y for x in piece for y in x.parts or (x,)] for piece in parameter.pieces]
        for source, at, _ in parameter.places(pieces):
            numbers = weights[parameter.name][at].reshape(source.shape)
            if fp8.is_quantised(source.name):
                tensors |= _quantised(source.name, numbers, layout)
                if layout.has_kv_scales and source.name.endswith(
                    ("k_proj.weight", "v_proj.weight")
                ):
                    module = source.name.removesuffix(".weight")
                    tensors[f"{module}.{module[-6]}_scale"] = ("F32", np.float32([0.5]).reshape(()))
            else:
                tensors[source.name] = ("F32", numbers)
    write_stored(folder / FILE, tensors)
    return config


def write_widened(source: Path, target: Path) -> None:
    """Writes a checkpoint of `write_fp8` in float32, with each code times its scale."""
    target.mkdir(exist_ok=True)
    stated = json.loads((source / "config.json").read_text(encoding="utf-8"))
    del stated["quantization_config"]
    (target / "config.json").write_text(json.dumps(stated), encoding="utf-8")
    tensors, widened = read_stored(source / FILE), {}
    for name, (kind, numbers) in tensors.items():
        if kind == "F8_E4M3":
            (end,) = (end for end in fp8.SCALE_SUFFIXES if f"{name}{end}" in tensors)
            scales = tensors[f"{name}{end}"][1].astype(np.float32)
            numbers = numbers.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
            numbers, kind = numbers * _spread(scales, numbers.shape), "F32"
        if not name.endswith(("_scale", "_scale_inv")):
            widened[name] = (kind, numbers)
    write_stored(target / FILE, widened)


def _spread(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The scale of each weight of a matrix, or of a stack of matrices."""
    if scales.size == 1:
        return np.full(shape, scales.reshape(()))
    if len(shape) > 2:
        return np.stack([_spread(each, shape[1:]) for each in scales])
    if scales.shape == (shape[0], 1):
        return np.repeat(scales, shape[1], axis=1)
    return np.kron(scales, np.ones((fp8.BLOCK, fp8.BLOCK), np.float32))[: shape[0], : shape[1]]


def _scales(numbers: np.ndarray, granularity: Granularity) -> np.ndarray:
    """The largest weight of each block over the largest code."""
    if numbers.ndim > 2:
        return np.stack([_scales(each, granularity) for each in numbers])
    shape = fp8.scale_shape(numbers.shape, granularity)
    rows, columns = (-(-x // y) for x, y in zip(numbers.shape, shape, strict=True))
    if granularity is Granularity.BLOCK:
        rows = columns = fp8.BLOCK
    largest = np.zeros(shape, np.float32)
    for row, column in np.ndindex(*shape):
        block = numbers[row * rows : (row + 1) * rows, column * columns : (column + 1) * columns]
        largest[row, column] = np.abs(block).max()
    return largest / np.float32(448)


def _quantised(name: str, numbers: np.ndarray, layout: Layout) -> Stored:
    scales = _scales(numbers, layout.granularity).astype(KINDS[layout.kind])
    codes = numbers / _spread(scales.astype(np.float32), numbers.shape)
    codes = codes.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    if layout.granularity is Granularity.TENSOR:
        scales = scales.reshape((*numbers.shape[:-2], *layout.tensors_shape))
    found: Stored = {name: ("F8_E4M3", codes), f"{name}{layout.end}": (layout.kind, scales)}
    if layout.of_activations is not None:
        beside = f"{name.removesuffix('weight')}{layout.of_activations}"
        found[beside] = ("F32", np.full(layout.tensors_shape, 0.25, np.float32))
    return found
