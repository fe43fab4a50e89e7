"""Safetensors checkpoints: opens and checks the files, and reads them parameter by parameter."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Shaped, UInt8

from shared.models.config import ModelConfig
from shared.models.file_kind import INDEX_FILE as INDEX_FILE
from shared.models.file_kind import SINGLE_FILE as SINGLE_FILE
from shared.models.file_kind import folder_fault
from shared.models.formats.registry import readers
from shared.models.formats.weight_format import (
    PlanePiece,
    QuantizedFormat,
    StoredTensor,
    TensorReader,
)
from shared.models.parameter import CheckpointTensor, Parameter, slice_runs
from shared.models.parameter_arrays import from_stored, slice_tensor
from shared.models.parameters import parameters, unread_kv
from shared.models.safetensors_file import contents, open_file
from shared.models.stored_tensor import DTYPE_BYTES, UNNEEDED, check_stored, without_prefix
from shared.models.tied import EMBEDDING, LM_HEAD, has_own_head
from shared.models.vision_config import TENSORS
from shared.models.weight_files import CheckpointError, weight_files

Array = Shaped[np.ndarray, "..."]
Weights = dict[str, Array]

DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
"""Dtypes in memory by those of files."""

LARGE = 1 << 27
"""Elements above which a tensor, such as an embedding, is read in runs of rows."""


class _Owner(NamedTuple):
    """Location of a tensor: the open file, its path, and the tensor's name in it."""

    handle: Any
    path: Path
    stored: str


class Checkpoint:
    """Tensors of opened safetensors files, looked up by their names without prefix and read one by
    one.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self.files = files
        self._slices: dict[str, Any] = {}
        self._handles = [open_file(path) for path in files]
        self._owners: dict[str, _Owner] = {}
        self._has_own_head: bool | None = None
        self._contents: dict[Path, tuple[dict[str, Any], int]] = {}
        for handle, path in zip(self._handles, files, strict=True):
            for stored in handle.keys():  # noqa: SIM118 - the handle is no mapping
                name = without_prefix(stored)
                if name in self._owners:
                    raise CheckpointError(f"tensor {name} is stored twice in the checkpoint")
                self._owners[name] = _Owner(handle, path, stored)

    @property
    def names(self) -> Collection[str]:
        """Names of the stored tensors, without prefix."""
        return self._owners.keys()

    @property
    def has_vision_encoder(self) -> bool:
        """True if the files contain a vision encoder; a config may name one that is missing."""
        return any(name.startswith(TENSORS) for name in self._owners)

    def has_mtp(self, config: ModelConfig) -> bool:
        """Returns True if the files contain an MTP layer that the config names."""
        return config.mtp is not None and config.mtp.is_in(self.names)

    def has(self, name: str) -> bool:
        """Returns True if a tensor is stored, by its name without prefix."""
        return name in self._owners

    def header(self, name: str) -> Any:
        """Returns the header of a tensor, from the safetensors library.

        Raises:
          CheckpointError: The tensor is missing.
        """
        if name not in self._slices:
            if name not in self._owners:
                raise CheckpointError(f"the checkpoint has no tensor {name}")
            owner = self._owners[name]
            self._slices[name] = owner.handle.get_slice(owner.stored)
        return self._slices[name]

    def tensor(self, name: str) -> Array:
        """Reads one tensor as stored, such as the integer map of a draft vocabulary."""
        self.header(name)
        owner = self._owners[name]
        return owner.handle.get_tensor(owner.stored)

    def num_bytes(self, wanted: Sequence[Parameter]) -> int:
        """Returns the stored bytes that loading these parameters reads."""
        return sum(self._num_bytes(source) for p in wanted for source in self._sources(p))

    def known(self, wanted: Sequence[Parameter]) -> set[str]:
        """Returns the names of the tensors that these parameters use, and of their scales."""
        names = {source.name for p in wanted for source in self._sources(p)}
        return names.union(*(self._companions(name) for name in names))

    def dtypes(self, parameter: Parameter) -> set[np.dtype]:
        """Returns the dtypes of the tensors that a parameter is read from; float32 if quantised."""
        return {self._dtype(source.name) for source in self._sources(parameter)}

    def stored(self, parameter: Parameter) -> list[StoredTensor | None]:
        """Returns the quantised tensors of a parameter; None for each that is not quantised."""
        return [self._stored(source) for source in self._sources(parameter)]

    def check(self, config: ModelConfig, with_mtp: bool) -> None:
        """Checks presence, dtype and shape of all tensors of a model before any is read.

        Tensors that the model's code would ignore (a bias, scales, experts) are an error too.

        Raises:
          CheckpointError: The first fault, with the name of its tensor.
        """
        if with_mtp and config.mtp is not None and not self.has_mtp(config):
            raise CheckpointError(
                f"NEXTN requires {config.mtp.prefixes[0]}* tensors, which the checkpoint does not "
                "contain; use a checkpoint with an MTP layer, or another drafter"
            )
        self.check_parameters(wanted := parameters(config, with_mtp))
        if self.unties(config):
            raise CheckpointError(
                f"tensor {LM_HEAD} differs from {EMBEDDING}, but config.json ties them; set "
                "tie_word_embeddings to false"
            )
        unused = ("mtp.",) if config.mtp is None else config.mtp.unused(with_mtp)
        unused = (*unused, *unread_kv(config))
        for name in sorted(self._owners.keys() - self.known(wanted)):
            left_out = name.startswith(unused) or any(part in name for part in UNNEEDED)
            of_head = config.tied and name in (LM_HEAD, *self._companions(LM_HEAD))
            if of_head or left_out or any(each.is_unused(name, self) for each in readers()):
                continue
            raise CheckpointError(
                f"tensor {name} is not part of a {config.name} model; use a checkpoint without it"
            )

    def unties(self, config: ModelConfig) -> bool:
        """Returns True if the files contain an LM head that differs from the embedding, though the
        config ties them.
        """
        if config.tied and self._has_own_head is None:
            self._has_own_head = has_own_head(config, self)
        return config.tied and bool(self._has_own_head)

    def check_parameters(self, wanted: Sequence[Parameter]) -> None:
        """Checks presence, dtype and shape of all tensors that these parameters need.

        Raises:
          CheckpointError: The first fault, with the name of its tensor.
        """
        for parameter in wanted:
            for source in self._sources(parameter):
                self._check_source(source)

    def load(
        self,
        parameter: Parameter,
        dtype: np.dtype | type,
        progress: Callable[[int], None] = lambda num_bytes: None,
    ) -> Array:
        """Reads one parameter into main memory.

        Args:
          parameter: The parameter to read; see `pieces`.
          dtype: Dtype of the result; parameters stored in float32 ignore it.
          progress: See `pieces`.
        """
        kind = np.float32 if parameter.float32 else dtype
        if len([*self._sources(parameter)]) == 1 and parameter.is_filled:
            # Returns the tensor as read, without a second copy.
            (source,) = self._sources(parameter)
            self._check_source(source)
            values = self._values(source)
            progress(self._num_bytes(source))
            return values.reshape(parameter.shape).astype(kind, copy=False)
        loaded = np.zeros(parameter.shape, kind)
        for at, values in self.pieces(parameter, progress):
            loaded[at] = values
        return loaded

    def pieces(
        self, parameter: Parameter, progress: Callable[[int], None]
    ) -> Iterator[tuple[tuple[int | slice, ...], Array]]:
        """Reads a parameter piece by piece, so that only one piece needs to be in main memory.

        A piece is a tensor, or some rows of a large one.

        Args:
          parameter: The parameter to read.
          progress: Called after each piece with the number of stored bytes read.

        Yields:
          The index of a piece in the parameter, and its values as stored. Quantised tensors are
          dequantised to float32.

        Raises:
          CheckpointError: A tensor is missing, has another shape or an unknown dtype, or contains
            NaN in FP8.
        """
        pieces = [[*chain(*map(self._in_parts, self._resolved(x)))] for x in parameter.pieces]
        for source, at, shape in parameter.places(pieces):
            self._check_source(source)
            yield at, self._values(source).reshape(shape)
            progress(self._num_bytes(source))

    def planes(
        self, parameter: Parameter, format: QuantizedFormat, progress: Callable[[int], None]
    ) -> Iterator[PlanePiece]:
        """Reads a parameter tensor by tensor without dequantising it.

        Args:
          parameter: The parameter to read.
          format: Its format, from `shared.models.formats.registry.choose_formats`.
          progress: See `pieces`.
        """
        for source, at, shape in parameter.places([self._resolved(x) for x in parameter.pieces]):
            self._check_source(source)
            stored = self._stored(source)
            assert stored is not None  # the format was chosen for it
            yield from format.pieces(stored, at, shape, parameter.shape)
            progress(self._num_bytes(source))

    def _sources(self, parameter: Parameter) -> list[CheckpointTensor]:
        return [source for piece in parameter.pieces for source in self._resolved(piece)]

    def _resolved(self, sources: Sequence[CheckpointTensor]) -> list[CheckpointTensor]:
        """Replaces each tensor that is not stored by its parts, if any of them is stored."""
        found = []
        for source in sources:
            is_apart = not self._is_stored(source) and any(map(self._is_stored, source.parts))
            found += source.parts if is_apart else [source]
        return found

    def _is_stored(self, source: CheckpointTensor) -> bool:
        """Returns True for a tensor of its name, or for quantised tensors of other names."""
        return self.has(source.name) or self._reader(source.name) is not None

    def _in_parts(self, source: CheckpointTensor) -> Iterator[CheckpointTensor]:
        """Yields a tensor, or the runs of rows of a large one that is not quantised."""
        shape = source.taken_shape
        are_rows = source.ranges is None or source.axis == 0
        is_quantised = self._reader(source.name) is not None
        if math.prod(shape) <= LARGE or not are_rows or is_quantised:
            yield source
            return
        runs, rows = source.ranges or ((0, shape[0]),), max(1, LARGE // math.prod(shape[1:]))
        for begin in range(0, shape[0], rows):
            yield replace(source, axis=0, ranges=slice_runs(runs, ((begin, begin + rows),)))

    def _values(self, source: CheckpointTensor) -> Array:
        """Reads the selected slice of a tensor."""
        if (reader := self._reader(source.name)) is not None:
            return reader.dequantized(source, self)
        is_by_outputs = source.axis > 0 and (source.is_transposed or source.is_interleaved)
        if source.ranges is None or is_by_outputs:
            return slice_tensor(source, from_stored(source, self.tensor(source.name)))
        stored = self.header(source.name)
        taken = [stored[source.index(run)] for run in source.ranges]
        values = taken[0] if len(taken) == 1 else np.concatenate(taken, source.axis)
        return from_stored(source, values)

    def bytes_of(self, source: CheckpointTensor) -> UInt8[np.ndarray, "..."]:
        """Reads a slice of a tensor of one byte per element, such as FP8, as uint8."""
        _, path, stored = self._owners[source.name]
        if path not in self._contents:
            self._contents[path] = contents(path)
        tensors, start = self._contents[path]
        offset = start + tensors[stored]["data_offsets"][0]
        if source.ranges is not None:
            return slice_tensor(source, np.memmap(path, np.uint8, "r", offset, source.shape))
        count = math.prod(source.shape)
        return np.fromfile(path, np.uint8, count, offset=offset).reshape(source.shape)

    def _reader(self, name: str) -> TensorReader | None:
        """Returns the reader of a tensor; None if it is not quantised."""
        return next((each for each in readers() if each.companions(name, self)), None)

    def _companions(self, name: str) -> tuple[str, ...]:
        """Returns the names of the tensors that belong to a quantised tensor, such as scales."""
        reader = self._reader(name)
        return () if reader is None else reader.companions(name, self)

    def _stored(self, source: CheckpointTensor) -> StoredTensor | None:
        reader = self._reader(source.name)
        return None if reader is None else reader.stored(source, self)

    def _dtype(self, name: str) -> np.dtype:
        if self._reader(name) is not None:
            return np.dtype(np.float32)
        return DTYPES[self.header(name).get_dtype()]

    def _num_bytes(self, source: CheckpointTensor) -> int:
        if (reader := self._reader(source.name)) is not None:
            return reader.num_bytes(source, self)
        item = DTYPE_BYTES[self.header(source.name).get_dtype()]
        return math.prod(source.taken_shape) * item

    def _check_source(self, source: CheckpointTensor) -> None:
        if (reader := self._reader(source.name)) is not None:
            reader.check(source, self)
            return
        header = self.header(source.name)
        for each in readers():
            each.check_unquantised(source, self)
        others = [each.stored_as for each in readers()] if len(source.shape) > 1 else []
        check_stored(source.name, header, [source.stored_shape], DTYPES, others)


def open_checkpoint(folder: str | Path, description: str = "the model folder") -> Checkpoint:
    """Opens the safetensors files of a folder: a single file, or the shards of an index.

    Args:
      folder: Path of the folder.
      description: Noun phrase for the folder in messages.

    Raises:
      CheckpointError: The folder or a file is missing, truncated or invalid.
    """
    folder = Path(folder)
    if fault := folder_fault(folder, description):
        raise CheckpointError(fault)
    return Checkpoint(weight_files(folder))


def load_all(folder: str | Path, config: ModelConfig, with_mtp: bool) -> Weights:
    """Loads all parameters of a checkpoint in float32.

    Args:
      folder: The model folder.
      config: Config of the model.
      with_mtp: True to load the MTP layer too.

    Raises:
      CheckpointError: See `open_checkpoint` and `Checkpoint.check`.
    """
    checkpoint = open_checkpoint(folder)
    checkpoint.check(config, with_mtp)
    return {p.name: checkpoint.load(p, np.float32) for p in parameters(config, with_mtp)}
