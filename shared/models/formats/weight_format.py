"""Interfaces of weight formats: planes of a weight in memory, quantised tensors of a checkpoint.

A weight `[outputs, inputs]`, or a stack of weights, is stored in memory as named planes: its
elements, and for quantised formats scales and zero points. A checkpoint has an encoding of its own,
which several formats may read. `shared.models.formats.registry` lists all of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple, Protocol, Self, runtime_checkable

import numpy as np
from jaxtyping import Float32, Shaped

from shared.models.dummy_elements import InitSpec
from shared.models.parameter import CheckpointTensor, Parameter

Array = Shaped[np.ndarray, "..."]
Place = tuple[int | slice, ...]

PLAIN = "plain"
"""Name of the format of unquantised weights."""

Planes = Mapping[str, Any]
"""Planes of a weight by name, as arrays of a backend."""

VALUES, SCALES, ZEROS = "values", "scales", "zeros"
"""Planes of elements, one row per output, of their scales and of their zero points."""

MATRICES = (
    *(".inputs", ".queries", ".out"),
    *(
        f".{kind}{matrix}"
        for kind in ("", "shared_", "parallel_")
        for matrix in ("gate_up", "down")
    ),
)
"""Suffixes of the names of the parameters that kernels also read packed: matrices of the layers."""

ITEM_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float64": 8,
    "float8_e4m3fn": 1,
    "int32": 4,
    "uint8": 1,
}
"""Bytes of an element by dtype."""


class UnsupportedFormatError(ValueError):
    """Weights that a flag or a device does not support."""


class Plane(NamedTuple):
    """An array of a weight in memory.

    Attributes:
      shape: Shape `[*stack, outputs or blocks of outputs, columns]`.
      dtype: Name of the dtype in NumPy and ml_dtypes.
    """

    shape: tuple[int, ...]
    dtype: str


class PlanePiece(NamedTuple):
    """A slice of a plane, read from one tensor of a checkpoint.

    Attributes:
      plane: Name of the plane.
      place: Index of the slice in the plane.
      part: Values; elements are in the order of the checkpoint, which each backend converts.
    """

    plane: str
    place: Place
    part: Array


@dataclass(frozen=True, kw_only=True)
class FormatContext:
    """Flags and device that decide on the formats of a model.

    Attributes:
      on_gpu: True if steps run on a GPU.
      device_name: Name of the device.
      dtype: Dtype of activations and unquantised weights.
      fp8_activations: True with `--fp8-activations`.
    """

    on_gpu: bool
    device_name: str
    dtype: str
    fp8_activations: bool

    @property
    def reads_packed(self) -> bool:
        """True if kernels read packed weights, which they do on a GPU in bfloat16."""
        return self.on_gpu and self.dtype == "bfloat16"


@runtime_checkable
class TensorEncoding(Protocol):
    """Encoding of quantised tensors in checkpoints; a value, compared by its fields."""

    @property
    def name(self) -> str:
        """Value of `--quantization` that requires it."""
        ...

    @property
    def of_dummies(self) -> Self:
        """Encoding of dummy weights of a release."""
        ...

    @property
    def init(self) -> InitSpec:
        """Distribution of the elements of dummy weights."""
        ...

    def is_usual(self, name: str) -> bool:
        """Returns True if releases quantise tensors of this name."""
        ...

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the stored bytes of a weight of a shape."""
        ...

    def scaled_dummy(
        self, parameter: Parameter, elements: Float32[np.ndarray, "..."]
    ) -> Float32[np.ndarray, "..."]:
        """Returns the dequantised elements of a whole dummy parameter; may change them in place."""
        ...


class StoredTensor(NamedTuple):
    """A quantised tensor of a checkpoint, or the slice of it that a rank reads.

    Attributes:
      source: The tensor.
      encoding: Its encoding.
      read: Reads the stored elements of the slice (`VALUES`), or their scales or zero points
        (`SCALES`, `ZEROS`). The scales of FP8 are those of the whole tensor.
    """

    source: CheckpointTensor
    encoding: TensorEncoding
    read: Callable[[str], Array]


StoredTensors = Callable[[Parameter], Sequence[StoredTensor | None]]
"""Tensors of a parameter; None for each that is not quantised."""


@runtime_checkable
class TensorFiles(Protocol):
    """Tensors of opened checkpoint files, by their names without prefix."""

    def has(self, name: str) -> bool:
        """Returns True if a tensor is stored."""
        ...

    def tensor(self, name: str) -> Array:
        """Reads a tensor."""
        ...

    def header(self, name: str) -> Any:
        """Returns the header of a tensor, with its shape and dtype."""
        ...

    def bytes_of(self, source: CheckpointTensor) -> Array:
        """Reads a slice of a tensor of one byte per element as uint8."""
        ...


@runtime_checkable
class TensorReader(Protocol):
    """Reader of one encoding from checkpoint files.

    Attributes:
      stored_as: Dtype and further tensors of the encoding, for messages.
    """

    stored_as: str

    def companions(self, name: str, files: TensorFiles) -> tuple[str, ...]:
        """Returns the tensors that belong to a tensor; none if it has another encoding."""
        ...

    def is_unused(self, name: str, files: TensorFiles) -> bool:
        """Returns True if a tensor belongs to a quantised one and is not needed."""
        ...

    def check_unquantised(self, source: CheckpointTensor, files: TensorFiles) -> None:
        """Raises `CheckpointError` for a tensor with missing companions."""
        ...

    def check(self, source: CheckpointTensor, files: TensorFiles) -> None:
        """Raises `CheckpointError` for an invalid tensor or companion."""
        ...

    def num_bytes(self, source: CheckpointTensor, files: TensorFiles) -> int:
        """Returns the stored bytes of a slice and of its companions."""
        ...

    def stored(self, source: CheckpointTensor, files: TensorFiles) -> StoredTensor:
        """Returns a checked tensor."""
        ...

    def dequantized(
        self, source: CheckpointTensor, files: TensorFiles
    ) -> Float32[np.ndarray, "..."]:
        """Reads the dequantised values of a slice."""
        ...


@runtime_checkable
class WeightFormat(Protocol):
    """Format of weights in memory; a value, compared by its fields and hashable."""

    @property
    def name(self) -> str:
        """Name, by which kernels select the block loader."""
        ...

    @property
    def label(self) -> str | None:
        """Name in the memory plan; None for unquantised weights."""
        ...

    @property
    def item_bytes(self) -> float:
        """Bytes of an element, by which tile configs are selected."""
        ...

    @property
    def quantizes_activations(self) -> bool:
        """True if activations are quantised before the product."""
        ...

    @property
    def padding(self) -> int:
        """Inputs that fill the last block of a weight in memory."""
        ...

    @property
    def expands_dense(self) -> bool:
        """True if kernels dequantise a dense weight in memory for many rows."""
        ...

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        """Returns the planes of a weight or a stack of weights, by name."""
        ...

    def dequantize(self, planes: Mapping[str, Array]) -> Array:
        """Returns the numbers of a weight."""
        ...


@runtime_checkable
class QuantizedFormat(WeightFormat, Protocol):
    """Format of weights that stay quantised in memory."""

    @classmethod
    def choose(
        cls, parameter: Parameter, stored: StoredTensors, context: FormatContext
    ) -> Self | None:
        """Returns the format of a rank's parameter; None if it is not stored in such a format.

        Raises:
          UnsupportedFormatError: A flag requires the format, and the device does not support it.
        """
        ...

    def pieces(
        self, tensor: StoredTensor, at: Place, shape: tuple[int, ...], whole: tuple[int, ...]
    ) -> Iterator[PlanePiece]:
        """Reads a checkpoint tensor without dequantising it.

        Args:
          tensor: The tensor.
          at: Index of the tensor in the parameter.
          shape: Shape of the tensor in the parameter.
          whole: Shape of the parameter.
        """
        ...


@dataclass(frozen=True)
class FormatOps:
    """Operations of a quantised format in one backend.

    Attributes:
      dequantized: Returns the numbers of a weight.
      converted: Converts elements from the order of the checkpoint to that of their plane.
      dummy: Generates the planes of a dummy parameter, or of a rank's shard, for a format and a
        device.
    """

    dequantized: Callable[[Planes], Any]
    converted: Callable[[Any], Any]
    dummy: Callable[[Any, Any, Any], Planes]


def plane_bytes(format: WeightFormat, shape: tuple[int, ...]) -> int:
    """Returns the bytes of a weight of a shape in a format."""
    return sum(
        prod(plane.shape) * ITEM_BYTES[plane.dtype] for plane in format.planes(shape).values()
    )


def first_row(first: int, outputs: int, rows: int) -> int:
    """Returns the row of a plane that starts at an output.

    Args:
      first: The output.
      outputs: Outputs of the weight.
      rows: Rows of the plane; each belongs to the same number of outputs.

    Raises:
      ValueError: No row starts at the output.
    """
    share = outputs // rows
    if first % share:
        raise ValueError(
            f"the first output of a quantised weight must be a multiple of {share}, got {first}"
        )
    return first // share
