"""Quantises a checkpoint to FP8: `python -m models.quantize_fp8 FOLDER OUT`.

The copy has the same tensors. Those that published FP8 checkpoints quantise become e4m3 values in
blocks of 128 x 128. A block's scale is the smallest bfloat16 number for which its largest weight
fits; each value is the nearest to weight / scale, ties to even.
"""

from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, Shaped

from models import quantized_copy
from shared.models.formats import fp8
from shared.models.formats.fp8 import Granularity

SCALE = fp8.SCALE_SUFFIXES[0]
STATED = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [fp8.BLOCK, fp8.BLOCK],
    "activation_scheme": "dynamic",
}
LARGEST = float(np.nanmax(fp8.VALUES))


def quantised(
    weight: Float[np.ndarray, "*stack rows columns"],
) -> tuple[
    Shaped[np.ndarray, "*stack rows columns"], Shaped[np.ndarray, "*stack row_blocks column_blocks"]
]:
    """Returns the float8_e4m3fn values of a weight and the bfloat16 scale of each block."""
    wide = weight.astype(np.float32)
    scales = _rounded_up(_largest_of_blocks(wide) / np.float32(LARGEST))
    inverse = fp8.apply_scales(np.ones_like(wide), scales)
    codes = np.divide(wide, inverse, out=np.zeros_like(wide), where=inverse > 0)
    return codes.astype(ml_dtypes.float8_e4m3fn), scales.astype(ml_dtypes.bfloat16)


def _largest_of_blocks(
    wide: Float32[np.ndarray, "*stack rows columns"],
) -> Float32[np.ndarray, "*stack row_blocks column_blocks"]:
    *stack, rows, columns = wide.shape
    *_, row_blocks, column_blocks = fp8.scale_shape(wide.shape, Granularity.BLOCK)
    spare = (row_blocks * fp8.BLOCK - rows, column_blocks * fp8.BLOCK - columns)
    whole = np.pad(np.abs(wide), [(0, 0)] * len(stack) + [(0, more) for more in spare])
    blocks = whole.reshape(*stack, row_blocks, fp8.BLOCK, column_blocks, fp8.BLOCK)
    return blocks.max(axis=(-3, -1))


def _rounded_up(scales: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Rounds up to bfloat16; the scales are not negative."""
    bits = scales.view(np.uint32)
    return ((bits + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)).view(np.float32)


def write(folder: Path, out: Path) -> None:
    """Writes the FP8 copy of a checkpoint; see `quantized_copy.write`."""
    quantized_copy.write(folder, out, STATED, _quantised_tensors)


def _quantised_tensors(tensors: quantized_copy.Tensors) -> quantized_copy.Tensors:
    found = {}
    for name, tensor in tensors.items():
        if fp8.is_quantised(name):
            found[name], found[f"{name}{SCALE}"] = quantised(tensor)
        else:
            found[name] = tensor
    return found


if __name__ == "__main__":
    quantized_copy.run("models.quantize_fp8", __doc__, write)
