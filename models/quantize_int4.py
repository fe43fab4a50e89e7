"""Quantises a checkpoint to INT4: `python -m models.quantize_int4 FOLDER OUT`.

The copy is in the format `pack-quantized` of compressed-tensors: symmetric, with a bfloat16 scale
per output and group of 128 inputs. A scale is the largest
magnitude of its group over 7, rounded to bfloat16; each code is the nearest to weight / scale, ties
to even. No calibration data is used, so the copy is less accurate than published checkpoints.

The projections that published FP8 checkpoints quantise become INT4. MTP layers, and projections
with inputs that are no multiple of 128, keep their type. Stacked experts are written one by one.
"""

from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float, Int32, Shaped, UInt8

from models import quantized_copy
from shared.models.formats import fp8
from shared.models.formats.int4_encoding import ZERO, spread

GROUP = 128
LARGEST = 7
STACKED = (".experts.gate_up_proj", ".experts.down_proj")
_WEIGHTS = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group"}
STATED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*mtp.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {**_WEIGHTS, "group_size": GROUP},
        }
    },
}


def quantised(
    weight: Float[np.ndarray, "outputs inputs"],
) -> tuple[UInt8[np.ndarray, "outputs inputs"], Shaped[np.ndarray, "outputs groups"]]:
    """Returns the codes of a weight, and the bfloat16 scale of each output and group."""
    wide = weight.astype(np.float32)
    outputs, inputs = wide.shape
    largest = np.abs(wide).reshape(outputs, -1, GROUP).max(axis=-1)
    scales = (largest / np.float32(LARGEST)).astype(ml_dtypes.bfloat16)
    across = spread(scales.astype(np.float32), inputs)
    codes = np.divide(wide, across, out=np.zeros_like(wide), where=across > 0)
    return (np.rint(codes) + ZERO).clip(0, 2 * ZERO - 1).astype(np.uint8), scales


def packed(codes: UInt8[np.ndarray, "outputs inputs"]) -> Int32[np.ndarray, "outputs words"]:
    """Packs eight neighbouring codes in an int32, the first in the lowest bits."""
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    return np.ascontiguousarray(pairs).view("<i4")


def quantised_tensors(tensors: quantized_copy.Tensors) -> quantized_copy.Tensors:
    """Returns the tensors of a file of the copy."""
    found = {}
    for name, tensor in (each for item in tensors.items() for each in _matrices(item)):
        is_kept = "mtp." in name or tensor.ndim != 2 or tensor.shape[-1] % GROUP
        if is_kept or not fp8.is_quantised(name):
            found[name] = tensor
            continue
        codes, scales = quantised(tensor)
        found[f"{name}_packed"], found[f"{name}_scale"] = packed(codes), scales
        found[f"{name}_shape"] = np.array(tensor.shape, np.int64)
    return found


def _matrices(item: tuple[str, np.ndarray]) -> Iterator[tuple[str, np.ndarray]]:
    """Yields a tensor, or the matrices of stacked experts."""
    name, tensor = item
    if not name.endswith(STACKED) or "mtp." in name:
        yield item
        return
    experts, _, matrix = name.rpartition(".")
    names = [f"{part}_proj" for part in matrix.removesuffix("_proj").split("_")]
    for number, each in enumerate(tensor):
        for part, own in zip(names, np.split(each, len(names)), strict=True):
            yield f"{experts}.{number}.{part}.weight", own


def write(folder: Path, out: Path) -> None:
    """Writes the INT4 copy of a checkpoint; see `quantized_copy.write`."""
    quantized_copy.write(folder, out, STATED, quantised_tensors)


if __name__ == "__main__":
    quantized_copy.run("models.quantize_int4", __doc__, write)
