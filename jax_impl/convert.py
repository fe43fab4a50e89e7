"""`python -m jax_impl.convert SRC DST` writes a checkpoint folder with its weights in Orbax form.

DST receives `orbax/`, with one array per parameter by the names of `shared.models.parameters`, and
a copy of all other files in SRC: configuration and tokenizer. It yields the same tokens as SRC.
"""

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Shaped

from shared.models import checkpoint
from shared.models.checkpoint import Checkpoint, CheckpointError
from shared.models.config import ModelConfig
from shared.models.families import config_from_folder
from shared.models.file_kind import ORBAX_FOLDER
from shared.models.formats.weight_format import StoredTensor
from shared.models.parameter import Parameter
from shared.models.parameter_arrays import shard_array
from shared.models.parameters import parameters
from shared.models.tied import as_stored

EXIT_INVALID = 2
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def orbax() -> Any:
    """Imports Orbax on demand: the import takes a second, and safetensors do not require it.

    Raises:
      CheckpointError: Orbax is not installed.
    """
    if find_spec("orbax") is None:
        raise CheckpointError(
            "an Orbax checkpoint requires orbax-checkpoint, which is not installed. Install the "
            "extra `train`, or use a folder with safetensors files"
        )
    return import_module("orbax.checkpoint")


class OrbaxCheckpoint:
    """Arrays of an Orbax folder, with the methods of `shared.models.checkpoint.Checkpoint`."""

    def __init__(self, folder: Path) -> None:
        """Reads names, shapes and dtypes.

        Raises:
          CheckpointError: The folder is not a complete Orbax checkpoint.
        """
        self._folder, self._orbax = folder, orbax()
        self._reader = self._orbax.PyTreeCheckpointer()
        try:
            saved = self._reader.metadata(folder).item_metadata
            if saved is None:
                raise ValueError("no arrays are stored")
            self._arrays = {name: (tuple(a.shape), np.dtype(a.dtype)) for name, a in saved.items()}
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{folder} is not a complete Orbax checkpoint; convert the model again"
            ) from error

    @property
    def names(self) -> Collection[str]:
        """Names of all arrays, which are those of parameters."""
        return self._arrays.keys()

    @property
    def has_vision_encoder(self) -> bool:
        """Returns False: an Orbax folder has the text model only."""
        return False

    def has_mtp(self, config: ModelConfig) -> bool:
        """Returns True if the folder has an MTP layer that the config names."""
        return config.has_mtp and any(name.startswith("mtp.") for name in self.names)

    def unties(self, config: ModelConfig) -> bool:
        """Returns True if a separate LM head is stored although the config ties it."""
        return config.tied and "lm_head" in self.names

    def num_bytes(self, wanted: Sequence[Parameter]) -> int:
        """Returns the number of stored bytes of these parameters."""
        return sum(map(self._num_bytes, wanted))

    def check(self, config: ModelConfig, with_mtp: bool) -> None:
        """Checks the presence and shape of all arrays of a model before one is read.

        Raises:
          CheckpointError: An array is missing or has another shape; the message names the first.
        """
        if with_mtp and not self.has_mtp(config):
            raise CheckpointError(
                "the checkpoint has no mtp.* arrays, which NEXTN requires; use another drafter"
            )
        for parameter in parameters(config, with_mtp):
            shape, _ = self._shape_and_dtype(parameter)
            if shape != parameter.shape:
                raise CheckpointError(
                    f"the array {parameter.name} has shape {list(shape)}, "
                    f"expected {list(parameter.shape)}"
                )

    def load(
        self,
        parameter: Parameter,
        dtype: np.dtype | type,
        progress: Callable[[int], None] = lambda num_bytes: None,
    ) -> Shaped[np.ndarray, "..."]:
        self._shape_and_dtype(parameter)
        name = parameter.tied_to or parameter.name
        wanted = self._orbax.args.PyTreeRestore(
            item={name: 0},
            restore_args={name: self._orbax.RestoreArgs(restore_type=np.ndarray)},
            partial_restore=True,
        )
        try:
            read = self._reader.restore(self._folder, args=wanted)[name]
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the array {name} in {self._folder} is damaged") from error
        progress(self._num_bytes(parameter))
        return shard_array(parameter, read).astype(np.float32 if parameter.float32 else dtype)

    def stored(self, parameter: Parameter) -> list[StoredTensor | None]:
        """Returns no tensors: quantised weights were dequantised on conversion."""
        return []

    def _shape_and_dtype(self, parameter: Parameter) -> tuple[tuple[int, ...], np.dtype]:
        name = parameter.tied_to or parameter.name
        if name not in self._arrays:
            raise CheckpointError(f"the checkpoint has no array {name}")
        return self._arrays[name]

    def _num_bytes(self, parameter: Parameter) -> int:
        shape, dtype = self._shape_and_dtype(parameter)
        return math.prod(shape) * dtype.itemsize


def open_checkpoint(folder: str | Path) -> Checkpoint | OrbaxCheckpoint:
    """Opens a model folder with safetensors files or Orbax arrays.

    Raises:
      CheckpointError: The folder or a file is missing or broken.
    """
    arrays = Path(folder) / ORBAX_FOLDER
    return (
        OrbaxCheckpoint(arrays.resolve()) if arrays.is_dir() else checkpoint.open_checkpoint(folder)
    )


def convert(source: Path, target: Path) -> None:
    """Writes the Orbax form of a checkpoint folder; each array keeps its stored dtype.

    Raises:
      ValueError: The source cannot be loaded, or the target is a file or a folder with files.
    """
    opened = checkpoint.open_checkpoint(source)
    config = as_stored(config_from_folder(source), opened)
    with_mtp = opened.has_mtp(config)
    opened.check(config, with_mtp)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} already exists; use a new or empty folder")
    checkpointer = orbax().StandardCheckpointer
    arrays = {p.name: opened.load(p, _stored(opened, p)) for p in parameters(config, with_mtp)}
    target.mkdir(parents=True, exist_ok=True)
    with checkpointer() as writer:
        writer.save((target / ORBAX_FOLDER).resolve(), arrays)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_FILES):
            shutil.copyfile(file, target / file.name)


def _stored(opened: Checkpoint, parameter: Parameter) -> np.dtype:
    """Returns the dtype that represents all tensors of a parameter exactly."""
    dtypes = opened.dtypes(parameter)
    return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)


def main(argv: Sequence[str]) -> int:
    """Converts; returns the exit code: 2, with one line on stderr, for invalid input."""
    parser = argparse.ArgumentParser(prog="python -m jax_impl.convert", allow_abbrev=False)
    parser.add_argument("source", metavar="SRC", type=Path, help="folder with safetensors files")
    parser.add_argument("target", metavar="DST", type=Path, help="output folder, new or empty")
    given = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # overrides the environment: nothing is computed
    try:
        convert(given.source, given.target)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_INVALID
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
