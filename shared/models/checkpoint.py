"""Safetensors checkpoints: opens and checks the files, and reads them parameter by parameter."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Shaped, UInt8

from shared.models.config import ModelConfig
from shared.models.file_kind import INDEX_FILE as INDEX_FILE
from shared.models.file_kind import SINGLE_FILE as SINGLE_FILE
from shared.models.file_kind import folder_fault
from shared.models.formats import fp8, fp8_w8a16
from shared.models.formats.fp8 import Granularity
from shared.models.parameter import slice_runs
from shared.models.parameters import CheckpointTensor, Parameter, parameters
from shared.models.safetensors_file import contents, open_file
from shared.models.stored_tensor import (
    DTYPES,
    UNNEEDED,
    check_stored,
    missing_scales,
    without_prefix,
)
from shared.models.tied import EMBEDDING, LM_HEAD, has_own_head
from shared.models.vision_config import TENSORS
from shared.models.weight_files import CheckpointError, weight_files

Array = Shaped[np.ndarray, "..."]
Weights = dict[str, Array]

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
    def has_mtp(self) -> bool:
        """True if the files contain an MTP layer; a config may name one that is missing."""
        return any(name.startswith("mtp.") for name in self._owners)

    @property
    def has_vision_encoder(self) -> bool:
        """True if the files contain a vision encoder; a config may name one that is missing."""
        return any(name.startswith(TENSORS) for name in self._owners)

    def has(self, name: str) -> bool:
        """Returns True if a tensor is stored, by its name without prefix."""
        return name in self._owners

    def tensor(self, name: str) -> Array:
        """Reads one tensor as stored, such as the integer map of a draft vocabulary."""
        self._header(name)
        owner = self._owners[name]
        return owner.handle.get_tensor(owner.stored)

    def num_bytes(self, wanted: Sequence[Parameter]) -> int:
        """Returns the stored bytes that loading these parameters reads."""
        return sum(self._num_bytes(source) for p in wanted for source in self._sources(p))

    def known(self, wanted: Sequence[Parameter]) -> set[str]:
        """Returns the names of the tensors that these parameters use, and of their scales."""
        names = {source.name for p in wanted for source in self._sources(p)}
        return names | {scale for scale in map(self._scale_of, names) if scale is not None}

    def dtypes(self, parameter: Parameter) -> set[np.dtype]:
        """Returns the dtypes of the tensors that a parameter is read from; float32 for FP8."""
        return {self._dtype(source.name) for source in self._sources(parameter)}

    def as_w8a16(self, wanted: Sequence[Parameter]) -> fp8_w8a16.InWords:
        """Returns the parameters that can be stored as packed FP8 (W8A16); see
        `shared.models.formats.fp8_w8a16`.

        All their tensors are FP8 in whole blocks, their scales are exact in bfloat16 and have one
        granularity, block or channel. Reads the scales.
        """
        found = {}
        for parameter in wanted:
            if fp8_w8a16.is_kept_fp8(parameter.name):
                kinds = {self._kept_granularity(source) for source in self._sources(parameter)}
                if len(kinds) == 1 and (kind := kinds.pop()) is not None:
                    found[parameter.name] = kind
        return found

    def as_w8a8(self, wanted: Sequence[Parameter]) -> frozenset[str]:
        """Returns the names of the parameters that are entirely FP8 with block scales (usable as
        W8A8).
        """
        only = {Granularity.BLOCK}
        return frozenset(
            p.name for p in wanted if {*map(self._granularity, self._sources(p))} == only
        )

    def has_scales(self, wanted: Sequence[Parameter]) -> frozenset[str]:
        """Returns the names of the parameters with at least one FP8 tensor."""
        return frozenset(p.name for p in wanted if any(map(self._granularity, self._sources(p))))

    def check(self, config: ModelConfig, with_mtp: bool) -> None:
        """Checks presence, dtype and shape of all tensors of a model before any is read.

        Tensors that the model's code would ignore (a bias, scales, experts) are an error too.

        Raises:
          CheckpointError: The first fault, with the name of its tensor.
        """
        if with_mtp and not self.has_mtp:
            raise CheckpointError(
                "NEXTN requires mtp.* tensors, which the checkpoint does not contain"
            )
        self.check_parameters(wanted := parameters(config, with_mtp))
        if self.unties(config):
            raise CheckpointError(
                f"tensor {LM_HEAD} differs from {EMBEDDING}, but config.json ties them; set "
                "tie_word_embeddings to false"
            )
        spare = [f"layers.{config.num_layers + i}." for i in range(config.num_nextn_predict_layers)]
        unused = tuple(spare if with_mtp else ["mtp.", *spare])
        for name in sorted(self._owners.keys() - self.known(wanted)):
            left_out = name.startswith(unused) or any(part in name for part in UNNEEDED)
            if name in self._of_tied_head(config) or left_out or self._is_of_activations(name):
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
          The index of a piece in the parameter, and its values as stored. FP8 is dequantised to
          float32.

        Raises:
          CheckpointError: A tensor is missing, has another shape or an unknown dtype, or contains
            NaN in FP8.
        """
        pieces = [[*chain(*map(self._in_parts, self._resolved(x)))] for x in parameter.pieces]
        for source, at, shape in parameter.places(pieces):
            self._check_source(source)
            yield at, self._values(source).reshape(shape)
            progress(self._num_bytes(source))

    def codes(
        self,
        parameter: Parameter,
        granularity: Granularity,
        progress: Callable[[int], None],
        *,
        by_output: bool = False,
    ) -> Iterator[fp8_w8a16.FP8Shard]:
        """Reads a parameter of `as_w8a16` or `as_w8a8` tensor by tensor without dequantising it;
        see `pieces`.

        Args:
          parameter: The parameter to read.
          granularity: Granularity of the scales in the result; not finer than the files'.
          progress: See `pieces`.
          by_output: True to repeat block scales for each output; otherwise blocks must be whole.
        """
        for source, at, shape in parameter.places([self._resolved(x) for x in parameter.pieces]):
            self._check_source(source)
            scales = fp8.expand_scales(self._scales(source), source.shape, granularity)
            scales = scales.astype(np.float32)
            if by_output:
                place, scales = at, source.taken(fp8.scales_of_outputs(scales, source.shape[-2]))
                scales = scales.reshape(*shape[:-1], scales.shape[-1])
            else:
                place = fp8.place_of_scales(at, parameter.shape, granularity)
                share = fp8.BLOCK if granularity is Granularity.BLOCK else 1
                scales = source.every(share).taken(scales)
                scales = scales.reshape(fp8.scale_shape(shape, granularity))
            codes = self._numbers(source).reshape(shape)
            yield fp8_w8a16.FP8Shard(at, codes, place_of_scales=place, scales=scales)
            progress(self._num_bytes(source))

    def _sources(self, parameter: Parameter) -> list[CheckpointTensor]:
        return [source for piece in parameter.pieces for source in self._resolved(piece)]

    def _resolved(self, sources: Sequence[CheckpointTensor]) -> list[CheckpointTensor]:
        """Replaces each tensor that is not stored by its parts, if any of them is stored."""
        found = []
        for source in sources:
            is_apart = not self.has(source.name) and any(self.has(x.name) for x in source.parts)
            found += source.parts if is_apart else [source]
        return found

    def _in_parts(self, source: CheckpointTensor) -> Iterator[CheckpointTensor]:
        """Yields a tensor, or the runs of rows of a large one that is not FP8."""
        shape = source.taken_shape
        are_rows = source.ranges is None or source.axis == 0
        is_fp8 = self._scale_of(source.name) is not None
        if math.prod(shape) <= LARGE or not are_rows or is_fp8:
            yield source
            return
        runs, rows = source.ranges or ((0, shape[0]),), max(1, LARGE // math.prod(shape[1:]))
        for begin in range(0, shape[0], rows):
            yield replace(source, axis=0, ranges=slice_runs(runs, ((begin, begin + rows),)))

    def _values(self, source: CheckpointTensor) -> Array:
        """Reads the selected slice of a tensor."""
        if self._scale_of(source.name) is not None:
            whole = replace(source, ranges=None)
            return source.taken(fp8.dequantize(self._numbers(whole), self._scales(source)))
        if source.ranges is None:
            return self.tensor(source.name)
        stored = self._header(source.name)
        taken = [stored[source.index(run)] for run in source.ranges]
        return taken[0] if len(taken) == 1 else np.concatenate(taken, source.axis)

    def _scales(self, source: CheckpointTensor) -> Array:
        """Reads the scales of an FP8 tensor as stored."""
        scale = self._scale_of(source.name)
        assert scale is not None  # the tensor is FP8
        return self.tensor(scale)

    def _numbers(self, source: CheckpointTensor) -> UInt8[np.ndarray, "..."]:
        """Reads the quantised values of an FP8 tensor, which must not contain NaN."""
        codes = self._codes(source)
        if fp8.has_nan(codes):
            raise CheckpointError(f"tensor {source.name} contains NaN")
        return codes

    def _codes(self, source: CheckpointTensor) -> UInt8[np.ndarray, "..."]:
        """Reads an FP8 tensor as bytes, because numpy has no FP8 dtype."""
        _, path, stored = self._owners[source.name]
        if path not in self._contents:
            self._contents[path] = contents(path)
        tensors, start = self._contents[path]
        offset = start + tensors[stored]["data_offsets"][0]
        if source.ranges is not None:
            return source.taken(np.memmap(path, np.uint8, "r", offset, source.shape))
        count = math.prod(source.shape)
        return np.fromfile(path, np.uint8, count, offset=offset).reshape(source.shape)

    def _granularity(self, source: CheckpointTensor) -> Granularity | None:
        """Returns the granularity of an FP8 tensor whose scales have been checked; None if it is
        not FP8.
        """
        scale = self._scale_of(source.name)
        if scale is None:
            return None
        return fp8.stored_shapes(source.shape)[tuple(self._header(scale).get_shape())]

    def _kept_granularity(self, source: CheckpointTensor) -> Granularity | None:
        """Returns the granularity of a tensor that can be stored as packed FP8; None if it
        cannot.
        """
        granularity = self._granularity(source)
        if granularity is None or not fp8_w8a16.has_whole_blocks(source, granularity):
            return None
        if not fp8_w8a16.are_in_bfloat16(self._scales(source)):
            return None
        return fp8_w8a16.kept_granularity(granularity)

    def _scale_of(self, name: str) -> str | None:
        """Returns the name of a tensor's scales; None if it is not FP8."""
        return next((f"{name}{end}" for end in fp8.SCALES if self.has(f"{name}{end}")), None)

    def _of_tied_head(self, config: ModelConfig) -> Collection[str]:
        """Returns the names of an LM head that repeats the embedding, and of its scales."""
        return {LM_HEAD, *(f"{LM_HEAD}{end}" for end in fp8.SCALES)} if config.tied else ()

    def _is_of_activations(self, name: str) -> bool:
        """Returns True if a tensor contains the activation scales of an FP8 weight."""
        module, _, last = name.rpartition(".")
        return last in fp8.OF_ACTIVATIONS and self._scale_of(f"{module}.weight") is not None

    def _dtype(self, name: str) -> np.dtype:
        if self._scale_of(name) is not None:
            return np.dtype(np.float32)
        return DTYPES[self._header(name).get_dtype()]

    def _header(self, name: str) -> Any:
        if name not in self._slices:
            if name not in self._owners:
                raise CheckpointError(f"the checkpoint has no tensor {name}")
            owner = self._owners[name]
            self._slices[name] = owner.handle.get_slice(owner.stored)
        return self._slices[name]

    def _num_bytes(self, source: CheckpointTensor) -> int:
        scale = self._scale_of(source.name)
        if scale is None:
            header = self._header(source.name)
            return math.prod(source.taken_shape) * DTYPES[header.get_dtype()].itemsize
        header = self._header(scale)
        item = DTYPES[header.get_dtype()].itemsize
        return math.prod(source.taken_shape) + item * math.prod(header.get_shape())

    def _check_source(self, source: CheckpointTensor) -> None:
        scale = self._scale_of(source.name)
        if scale is None:
            header = self._header(source.name)
            if header.get_dtype() == fp8.STORED and len(source.shape) > 1:
                raise missing_scales(source.name)
            check_stored(source.name, header, [source.shape], DTYPES)
            return
        check_stored(source.name, self._header(source.name), [source.shape], (fp8.STORED,))
        if len(source.shape) < 2:
            raise CheckpointError(f"tensor {scale} is not supported: only matrices may have scales")
        check_stored(scale, self._header(scale), fp8.stored_shapes(source.shape), DTYPES)


def open_checkpoint(folder: str | Path) -> Checkpoint:
    """Opens the safetensors files of a folder: a single file, or the shards of an index.

    Raises:
      CheckpointError: The folder or a file is missing, truncated or invalid.
    """
    folder = Path(folder)
    if fault := folder_fault(folder):
        raise CheckpointError(fault)
    return Checkpoint(weight_files(folder))


def load_all(
    folder: str | Path, config: ModelConfig, with_mtp: bool, *, quantises: bool = False
) -> Weights:
    """Loads all parameters of a checkpoint in float32.

    Args:
      folder: The model folder.
      config: Config of the model.
      with_mtp: True to load the MTP layer too.
      quantises: True to load block-scaled FP8 parameters without dequantising them, with scales per
        output.

    Raises:
      CheckpointError: See `open_checkpoint` and `Checkpoint.check`.
    """
    checkpoint = open_checkpoint(folder)
    checkpoint.check(config, with_mtp)
    wanted = parameters(config, with_mtp)
    as_w8a8 = checkpoint.as_w8a8(wanted) if quantises else frozenset()
    loaded = {p.name: checkpoint.load(p, np.float32) for p in wanted if p.name not in as_w8a8}
    for parameter in (p for p in wanted if p.name in as_w8a8):
        name, shape = parameter.name, parameter.shape
        codes = np.empty(shape, np.uint8)
        blocks = Granularity.BLOCK
        scales = np.empty(fp8.code_scale_shape(shape, by_output=True), np.float32)
        for piece in checkpoint.codes(parameter, blocks, lambda num_bytes: None, by_output=True):
            codes[piece.place], scales[piece.place_of_scales] = piece.codes, piece.scales
        loaded[name], loaded[f"{name}{fp8_w8a16.SCALES}"] = codes, scales
    return loaded
