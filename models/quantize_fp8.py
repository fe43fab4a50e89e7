"""Quantises a checkpoint to FP8: `python -m models.quantize_fp8 FOLDER OUT`.

The copy has the same tensors. Those that published FP8 checkpoints quantise become e4m3 values in
blocks of 128 x 128. A block's scale is the smallest bfloat16 number for which its largest weight
fits; each value is the nearest to weight / scale, ties to even.
"""

import argparse
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float32, Shaped
from safetensors.numpy import load_file, save_file

from shared.models.checkpoint import INDEX_FILE, weight_files
from shared.models.config_fields import read_json
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
    """Writes the FP8 copy of a checkpoint file by file, with its tokenizer.

    An index may name a file in another folder; the copy prefixes its name with that folder's name.

    Raises:
      ValueError: `out` is the checkpoint's folder, the checkpoint is already quantised, or one of
        its weight files is missing.
    """
    config = read_json(folder / "config.json")
    if "quantization_config" in config or out.resolve() == folder.resolve():
        raise ValueError(
            f"{folder} must be an unquantised checkpoint and a different folder from {out}"
        )
    files = weight_files(folder)
    out.mkdir(parents=True, exist_ok=True)
    places = {}
    for file in files:
        name = file.name if file.parent == folder else f"{file.parent.name}-{file.name}"
        tensors = _quantised_tensors(load_file(file))
        save_file(tensors, out / name)
        places |= dict.fromkeys(tensors, name)
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copyfile(file, out / file.name)
    _write_json(out / "config.json", {**config, "quantization_config": STATED})
    if (folder / INDEX_FILE).is_file():
        _write_json(out / INDEX_FILE, {"metadata": {}, "weight_map": places})


def _quantised_tensors(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = {}
    for name, tensor in tensors.items():
        if fp8.is_quantised(name):
            found[name], found[f"{name}{SCALE}"] = quantised(tensor)
        else:
            found[name] = tensor
    return found


def _write_json(path: Path, contents: object) -> None:
    path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(prog="python -m models.quantize_fp8", description=__doc__)
    parser.add_argument("folder", type=Path, help="folder of the checkpoint")
    parser.add_argument("out", type=Path, help="folder to write")
    given = parser.parse_args()
    try:
        write(given.folder, given.out)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
