"""INT4 checkpoints as files, in the layouts of releases, and the same with dequantised weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shared.models.config import ModelConfig
from shared.models.families import config_from_dict
from shared.models.formats import fp8
from shared.models.formats.int4_checkpoint import AWQ_ORDER
from shared.models.parameters import parameters
from tests.support.files import Stored, write_stored
from tests.support.tiny_models import tiny_weights

FILE = "model.safetensors"
SHIFTS = 4 * np.arange(8, dtype=np.uint32)
HALF = ml_dtypes.bfloat16


@dataclass(frozen=True)
class Int4Layout:
    """Layout of INT4 weights in a checkpoint.

    Attributes:
      stated: The `quantization_config`.
      kind: Type of the scales.
      is_symmetric: Whether all zero points are 8.
      write: Returns the tensors of a weight for codes, scales, zero points and groups of inputs.
      is_permuted: Whether the inputs of a group are no neighbours.
    """

    stated: dict[str, Any]
    kind: str
    is_symmetric: bool
    write: Callable[..., Stored]
    group: int
    is_permuted: bool = False


def compressed_int4(*, group: int, is_symmetric: bool) -> dict[str, Any]:
    """A `quantization_config` as llm-compressor writes it."""
    weights = {"actorder": None, "block_structure": None, "dynamic": False, "num_bits": 4}
    weights |= {"group_size": group, "observer": "minmax", "observer_kwargs": {}}
    weights |= {"strategy": "group", "symmetric": is_symmetric, "type": "int"}
    group_0 = {"input_activations": None, "output_activations": None, "targets": ["Linear"]}
    return {
        "config_groups": {"group_0": group_0 | {"weights": weights}},
        "format": "pack-quantized",
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def gptq(*, desc_act: bool, group: int) -> dict[str, Any]:
    """A `quantization_config` as AutoGPTQ writes it."""
    stated = {"bits": 4, "group_size": group, "damp_percent": 0.01, "desc_act": desc_act}
    stated |= {"static_groups": False, "sym": True, "true_sequential": True, "quant_method": "gptq"}
    return stated | {"model_name_or_path": None, "model_file_base_name": "model"}


def packed(codes: np.ndarray) -> np.ndarray:
    """Eight neighbouring columns in an int32, the first in the lowest bits."""
    eights = codes.reshape(len(codes), -1, 8).astype(np.uint32) << SHIFTS
    return np.bitwise_or.reduce(eights, axis=-1).view(np.int32)


def _compressed(name: str, parts: list, layout: Int4Layout) -> Stored:
    codes, scales, zeros, _ = parts
    found: Stored = {
        f"{name}_packed": ("I32", packed(codes)),
        f"{name}_scale": (layout.kind, scales),
        f"{name}_shape": ("I64", np.array(codes.shape)),
    }
    if not layout.is_symmetric:
        found[f"{name}_zero_point"] = ("I32", packed(zeros.T).T)
    return found


def _gptq(name: str, parts: list, layout: Int4Layout) -> Stored:
    codes, scales, zeros, groups = parts
    module = name.removesuffix(".weight")
    return {
        f"{module}.qweight": ("I32", packed(codes).T),
        f"{module}.qzeros": ("I32", packed(zeros.T - 1)),
        f"{module}.scales": (layout.kind, scales.T),
        f"{module}.g_idx": ("I32", groups.astype(np.int32)),
        f"{module}.bias": ("F16", np.zeros(len(codes), np.float16)),
    }


def _awq(name: str, parts: list, layout: Int4Layout) -> Stored:
    codes, scales, zeros, _ = parts
    module, places = name.removesuffix(".weight"), np.argsort(AWQ_ORDER)
    qweight, qzeros = (
        packed(x.T.reshape(x.shape[1], -1, 8)[..., places].reshape(x.shape[1], -1))
        for x in (codes, zeros)
    )
    return {
        f"{module}.qweight": ("I32", qweight),
        f"{module}.qzeros": ("I32", qzeros),
        f"{module}.scales": (layout.kind, scales.T),
    }


def _compressed_layout(kind: str, is_symmetric: bool, group: int) -> Int4Layout:
    stated = compressed_int4(group=group, is_symmetric=is_symmetric)
    return Int4Layout(stated, kind, is_symmetric, _compressed, group)


LAYOUTS = {
    "compressed-tensors": _compressed_layout("BF16", True, 32),
    "compressed-tensors, asymmetric": _compressed_layout("BF16", False, 64),
    "GPTQ": Int4Layout(gptq(desc_act=False, group=128), "F16", True, _gptq, 128),
    "GPTQ, desc_act": Int4Layout(gptq(desc_act=True, group=32), "F16", True, _gptq, 32, True),
    "AWQ": Int4Layout(
        {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
        | {"version": "gemm", "modules_to_not_convert": None},
        *("F16", False, _awq, 64),
    ),
}


def write_int4(
    folder: Path, stated: dict[str, Any], layout: Int4Layout, like: Path | None = None
) -> ModelConfig:
    """Writes a random INT4 checkpoint of a config.json, experts one by one; and to `like` the same
    with dequantised weights.
    """
    config = config_from_dict(stated)
    rng, weights = np.random.default_rng(0), tiny_weights(config, 0)
    tensors: Stored = {}
    widened: Stored = {}
    for parameter in parameters(config, config.has_mtp):
        pieces = [[y for x in piece for y in x.parts or (x,)] for piece in parameter.pieces]
        for source, at, _ in parameter.places(pieces):
            numbers = weights[parameter.name][at].reshape(source.shape)
            is_whole = source.shape[-1] % layout.group == 0
            is_usual = fp8.is_quantised(source.name) and not source.name.startswith("mtp.")
            if is_usual and is_whole:
                *parts, wide = _quantised(rng, numbers, layout)
                tensors |= layout.write(source.name, parts, layout)
                widened[source.name] = ("F32", wide)
            else:
                tensors[source.name] = widened[source.name] = ("BF16", numbers.astype(HALF))
    for place, found, config_json in (
        (folder, tensors, stated | {"quantization_config": layout.stated}),
        (like, widened, stated),
    ):
        if place is not None:
            place.mkdir(exist_ok=True)
            (place / "config.json").write_text(json.dumps(config_json), encoding="utf-8")
            write_stored(place / FILE, found)
    return config


def _quantised(rng: np.random.Generator, numbers: np.ndarray, layout: Int4Layout) -> tuple:
    """Returns codes, scales, zero points, groups of inputs, and the dequantised weight."""
    outputs, inputs = numbers.shape
    count = -(-inputs // layout.group)
    groups = np.arange(inputs) // layout.group
    if layout.is_permuted:
        groups = rng.permutation(groups)
    largest = np.stack([np.abs(numbers[:, groups == i]).max(axis=1) for i in range(count)], 1)
    scales = (largest / 7).astype({"BF16": HALF, "F16": np.float16}[layout.kind])
    zeros = np.full((outputs, count), 8, np.uint8)
    if not layout.is_symmetric:
        zeros = rng.integers(6, 10, zeros.shape, np.uint8)
    scale, zero = scales.astype(np.float32)[:, groups], zeros[:, groups]
    codes = (np.rint(numbers / scale) + zero).clip(0, 15).astype(np.uint8)
    return codes, scales, zeros, groups, (codes.astype(np.float32) - zero) * scale
