"""`python -m jax_impl.convert SRC DST` writes a checkpoint folder with its weights in Orbax form.

DST gets `orbax/`, with one array per parameter under the names of `shared.models.parameters`, and a
copy of everything else in SRC: configuration and tokenizer. It gives the same tokens as SRC.
"""

import argparse
import math
import shutil
import sys
from collections.abc import Callable, Sequence
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
from shared.models.fp8_packing import InWords
from shared.models.parameters import Parameter, parameters
from shared.models.tied import as_stored

EXIT_REFUSED = 2
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")


def orbax() -> Any:
    """Imports Orbax, which takes a second and which a folder of safetensors does not need.

    Raises:
      CheckpointError: It is not installed.
    """
    if find_spec("orbax") is None:
        raise CheckpointError(
            "an Orbax checkpoint needs orbax-checkpoint, which is not installed. Install the extra "
            "`train`, or give a folder with safetensors files"
        )
    return import_module("orbax.checkpoint")


class OrbaxCheckpoint:
    """The arrays of an Orbax folder, with the methods of `shared.models.checkpoint.Checkpoint`."""

    def __init__(self, folder: Path) -> None:
        """Reads names, shapes and dtypes.

        Raises:
          CheckpointError: The folder is no complete Orbax checkpoint.
        """
        self._folder, self._orbax = folder, orbax()
        self._reader = self._orbax.PyTreeCheckpointer()
        try:
            saved = self._reader.metadata(folder).item_metadata
            if saved is None:
                raise ValueError("nothing is stored")
            self._arrays = {name: (tuple(a.shape), np.dtype(a.dtype)) for name, a in saved.items()}
        except (OSError, ValueError, AttributeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{folder} is no complete Orbax checkpoint") from error

    @property
    def has_mtp(self) -> bool:
        """Whether the folder holds an MTP layer; a config may name one that is not there."""
        return any(name.startswith("mtp.") for name in self._arrays)

    @property
    def has_tower(self) -> bool:
        """Never: a folder of Orbax is made of the text model alone."""
        return False

    def unties(self, config: ModelConfig) -> bool:
        """Returns whether there is an LM head of its own, though the config ties it."""
        return config.tied and "lm_head" in self._arrays

    def num_bytes(self, wanted: Sequence[Parameter]) -> int:
        """How many stored bytes loading these parameters reads."""
        return sum(map(self._num_bytes, wanted))

    def check(self, config: ModelConfig, with_mtp: bool) -> None:
        """Checks presence and shape of every array of a model before any is read.

        Raises:
          CheckpointError: The first fault, by the name of its array.
        """
        if with_mtp and not self.has_mtp:
            raise CheckpointError("the checkpoint has no mtp.* arrays, so it cannot draft NEXTN")
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
        return parameter.share(read).astype(np.float32 if parameter.float32 else dtype)

    def as_w8a16(self, wanted: Sequence[Parameter]) -> InWords:
        """None: what is FP8 was widened when the folder was made."""
        return {}

    def as_w8a8(self, wanted: Sequence[Parameter]) -> frozenset[str]:
        """None, for the same reason."""
        return frozenset()

    has_scales = as_w8a8

    def _shape_and_dtype(self, parameter: Parameter) -> tuple[tuple[int, ...], np.dtype]:
        name = parameter.tied_to or parameter.name
        if name not in self._arrays:
            raise CheckpointError(f"the checkpoint has no array {name}")
        return self._arrays[name]

    def _num_bytes(self, parameter: Parameter) -> int:
        shape, dtype = self._shape_and_dtype(parameter)
        return math.prod(shape) * dtype.itemsize


def open_checkpoint(folder: str | Path) -> Checkpoint | OrbaxCheckpoint:
    """Opens a model folder of either form.

    Raises:
      CheckpointError: The folder or a file is missing or broken.
    """
    arrays = Path(folder) / ORBAX_FOLDER
    return (
        OrbaxCheckpoint(arrays.resolve()) if arrays.is_dir() else checkpoint.open_checkpoint(folder)
    )


def convert(source: Path, target: Path) -> None:
    """Writes the Orbax form of a checkpoint folder; each array keeps the dtype it is stored in.

    Raises:
      ValueError: The source cannot be loaded, or the target is there already; one sentence.
    """
    opened = checkpoint.open_checkpoint(source)
    config = as_stored(config_from_folder(source), opened)
    with_mtp = config.has_mtp and opened.has_mtp
    opened.check(config, with_mtp)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} exists already; name a folder that is new or empty")
    checkpointer = orbax().StandardCheckpointer
    arrays = {p.name: opened.load(p, _stored(opened, p)) for p in parameters(config, with_mtp)}
    target.mkdir(parents=True, exist_ok=True)
    with checkpointer() as writer:
        writer.save((target / ORBAX_FOLDER).resolve(), arrays)
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(WEIGHT_FILES):
            shutil.copyfile(file, target / file.name)


def _stored(opened: Checkpoint, parameter: Parameter) -> np.dtype:
    """The dtype that holds all of a parameter's tensors without loss."""
    dtypes = opened.dtypes(parameter)
    return dtypes.pop() if len(dtypes) == 1 else np.dtype(np.float32)


def main(argv: Sequence[str]) -> int:
    """Converts; returns the process's exit code: 2 with one sentence where it is refused."""
    parser = argparse.ArgumentParser(prog="python -m jax_impl.convert", allow_abbrev=False)
    parser.add_argument("source", metavar="SRC", type=Path, help="folder with safetensors files")
    parser.add_argument("target", metavar="DST", type=Path, help="folder to write, new or empty")
    given = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")  # whatever the environment names: nothing is computed
    try:
        convert(given.source, given.target)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return EXIT_REFUSED
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
