"""MXFP4 checkpoints of gpt-oss as files, and the same with dequantised experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shared.models.config import ModelConfig
from shared.models.families import config_from_dict
from shared.models.parameter_arrays import to_stored
from shared.models.parameters import parameters
from tests.support.cases.gemm.linear import in_mxfp4
from tests.support.files import Stored, write_stored
from tests.support.tiny_models import tiny_weights

FILE = "model.safetensors"
STATED = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}


def write_mxfp4(folder: Path, stated: dict[str, Any], like: Path) -> ModelConfig:
    """Writes a random MXFP4 checkpoint, and to `like` the same in bfloat16."""
    config = config_from_dict(stated)
    weights = tiny_weights(config, 0)
    tensors: Stored = {}
    widened: Stored = {}
    for parameter in parameters(config, False):
        for source, at, _ in parameter.places(parameter.pieces):
            name, numbers = source.name, weights[parameter.name][at].reshape(source.shape)
            if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
                stored = to_stored(source, numbers).astype(ml_dtypes.bfloat16)
                tensors[name] = widened[name] = ("BF16", stored)
                continue
            found = written(name, numbers, is_interleaved=source.is_interleaved)
            wide = found.pop("wide")[1]
            tensors |= found
            widened[name] = ("BF16", to_stored(source, wide).astype(ml_dtypes.bfloat16))
    for place, found, more in (
        (folder, tensors, {"quantization_config": STATED}),
        (like, widened, {}),
    ):
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(stated | more), encoding="utf-8")
        write_stored(place / FILE, found)
    return config


def written(name: str, numbers: np.ndarray, *, is_interleaved: bool) -> Stored:
    """The tensors of a weight, gate and up outputs alternating, and its numbers as `wide`."""
    matrix = in_mxfp4(numbers)
    wide = matrix.format.dequantize(matrix.planes)
    codes, exponents = stored_parts(matrix.planes, numbers.shape[-1])
    if is_interleaved:
        codes, exponents = (
            np.stack(np.split(x, 2, axis=1), axis=2).reshape(x.shape) for x in (codes, exponents)
        )
    bytes_of = codes[..., ::2] | codes[..., 1::2] << 4
    return {
        f"{name}_blocks": ("U8", bytes_of.reshape((*exponents.shape, 16))),
        f"{name}_scales": ("U8", exponents),
        "wide": ("F32", wide),
    }


def stored_parts(planes: Any, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes and exponents as files have them."""
    from_planes = planes["scales"][..., : inputs // 32] - np.uint8(126)
    return unpacked(planes["values"])[..., :inputs], from_planes


def unpacked(words: np.ndarray) -> np.ndarray:
    blocks = words.reshape((*words.shape[:-1], -1, width_of(words.shape[-1])))
    parts = [blocks >> (4 * part) & 15 for part in range(8)]
    return np.stack(parts, axis=-2).reshape((*words.shape[:-1], -1)).astype(np.uint8)


def width_of(words: int) -> int:
    return 32 if words % 32 == 0 else 16
