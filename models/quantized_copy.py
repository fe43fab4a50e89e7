"""Copies of checkpoints with quantised weights, written file by file."""

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from shared.models.checkpoint import INDEX_FILE, weight_files
from shared.models.config_fields import read_json

Tensors = dict[str, np.ndarray]


def write(
    folder: Path, out: Path, stated: dict[str, Any], quantised: Callable[[Tensors], Tensors]
) -> None:
    """Writes the quantised copy of a checkpoint file by file, with its tokenizer.

    An index may name a file in another folder; the copy prefixes its name with that folder's name.

    Args:
      folder, out: Folders of the checkpoint and of the copy.
      stated: `quantization_config` of the copy.
      quantised: Returns the tensors of a file of the copy.

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
        tensors = quantised(load_file(file))
        save_file(tensors, out / name)
        places |= dict.fromkeys(tensors, name)
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copyfile(file, out / file.name)
    _write_json(out / "config.json", {**config, "quantization_config": stated})
    if (folder / INDEX_FILE).is_file():
        _write_json(out / INDEX_FILE, {"metadata": {}, "weight_map": places})


def run(module: str, description: str | None, write: Callable[[Path, Path], None]) -> None:
    """Runs the command line of a module that writes such copies."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument("folder", type=Path, help="folder of the checkpoint")
    parser.add_argument("out", type=Path, help="folder to write")
    given = parser.parse_args()
    try:
        write(given.folder, given.out)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _write_json(path: Path, contents: object) -> None:
    path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
