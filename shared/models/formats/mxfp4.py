"""MXFP4 experts of gpt-oss: encoding, reader, spelling and format in memory (W4A16).

A weight is an FP4 number (e2m1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives) times a power of
two, which 32 neighbouring inputs share. The product is exact in bfloat16. A file stores the experts
of a layer as `X_blocks` `[experts, outputs, inputs / 32, 16]`, two codes a byte with the first in
the lower bits, and `X_scales` `[experts, outputs, inputs / 32]`. A scale s is
2^(s - 127).

In memory the codes are packed as INT4 is, with the last block of inputs filled with zeros. A kernel
moves the bits of a code into a bfloat16, which makes the number 2^-126 of what it is. Stored scales
are therefore s + 126, the exponent bits of a bfloat16 that compensates.

Source: OCP Microscaling Formats (MX) Specification 1.0.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from jaxtyping import Float32, UInt8

from shared.models.dummy_elements import InitSpec, init_of, parameter_array
from shared.models.formats import four_bit
from shared.models.formats.four_bit import PARTS, filled, padded
from shared.models.formats.fp8_encoding import SIZES_LAW
from shared.models.formats.names import MXFP4
from shared.models.formats.quantization_config import Spelling
from shared.models.formats.weight_format import (
    SCALES,
    VALUES,
    Array,
    FormatContext,
    Place,
    Plane,
    PlanePiece,
    StoredTensor,
    StoredTensors,
    TensorFiles,
)
from shared.models.parameter import EXPERTS, CheckpointTensor, Parameter
from shared.models.parameter_arrays import in_halves, shard_array, slice_tensor
from shared.models.stored_tensor import check_stored
from shared.models.weight_files import CheckpointError

GROUP = 32
"""Inputs with a scale."""
NUMBERS = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
NUMBERS = np.concatenate([NUMBERS, -NUMBERS])
"""Number of each code."""
EXPONENT_SHIFT = 126
"""Added to stored exponents in memory."""
LARGEST_EXPONENT = 254 - EXPONENT_SHIFT
"""Largest exponent of packed weights; a larger one has no bfloat16 that compensates."""
MXFP4_INIT = InitSpec(4, 0.5, 7.5)
"""Distribution of the codes of dummy weights."""
_BIAS, _NAN = 127, 255


@dataclass(frozen=True)
class MXFP4Encoding:
    """Encoding of MXFP4 tensors; see `TensorEncoding`."""

    name = MXFP4
    init = MXFP4_INIT

    @property
    def of_dummies(self) -> Self:
        """Encoding of dummy weights: the same."""
        return self

    def is_usual(self, name: str) -> bool:
        """Returns True for the matrices of experts."""
        return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the stored bytes of a weight of a shape."""
        return math.prod(shape) // 2 + math.prod(shape) // GROUP

    def scaled_dummy(
        self, parameter: Parameter, elements: Float32[np.ndarray, "..."]
    ) -> Float32[np.ndarray, "..."]:
        """Returns the numbers of codes times their scales."""
        return dequantize(elements.astype(np.uint8), dummy_exponents(parameter))


@dataclass(frozen=True)
class MXFP4W4A16:
    """Format of packed MXFP4 weights; see `QuantizedFormat`.

    Attributes:
      inputs: Inputs of the weight, without those that fill its last block.
    """

    inputs: int
    name = "mxfp4_w4a16"
    label = "MXFP4"
    item_bytes = 0.5
    quantizes_activations = False
    expands_dense = False

    @property
    def padding(self) -> int:
        """Inputs that fill the last block."""
        return padded(self.inputs) - self.inputs

    @classmethod
    def choose(
        cls, parameter: Parameter, stored: StoredTensors, context: FormatContext
    ) -> Self | None:
        """Returns the format of experts with MXFP4 tensors only, on a GPU in bfloat16.

        Reads the scales: an exponent above `LARGEST_EXPONENT` is dequantised when loaded.
        """
        if not context.reads_packed or not parameter.name.endswith(EXPERTS):
            return None
        tensors = stored(parameter)
        if not all(x is not None and isinstance(x.encoding, MXFP4Encoding) for x in tensors):
            return None
        largest = max(int(x.read(SCALES).max(initial=0)) for x in tensors if x is not None)
        return cls(parameter.shape[-1]) if largest <= LARGEST_EXPONENT else None

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        """Returns packed codes and exponents."""
        whole = padded(shape[-1])
        words = Plane((*shape[:-1], whole // PARTS), "int32")
        return {VALUES: words, SCALES: Plane((*shape[:-1], whole // GROUP), "uint8")}

    def pieces(
        self, tensor: StoredTensor, at: Place, shape: tuple[int, ...], whole: tuple[int, ...]
    ) -> Iterator[PlanePiece]:
        """Reads codes, which the backend packs, expert by expert, and exponents."""
        words, exponents = tensor.read(VALUES), tensor.read(SCALES)
        words = filled(words, padded(self.inputs) // PARTS)
        scales = filled(exponents + np.uint8(EXPONENT_SHIFT), padded(self.inputs) // GROUP)
        *outer, experts = at
        assert isinstance(experts, slice)
        for number, (one, other) in enumerate(zip(words, scales, strict=True)):
            place = (*outer, experts.start + number)
            yield PlanePiece(VALUES, place, one)
            yield PlanePiece(SCALES, place, other)

    def dequantize(self, planes: Mapping[str, Array]) -> Array:
        """Returns numbers times scales."""
        codes, scales = four_bit.unpack(planes[VALUES]), planes[SCALES]
        return dequantize(codes, scales - np.uint8(EXPONENT_SHIFT))[..., : self.inputs]


def dequantize(
    codes: UInt8[np.ndarray, "*stack K"], exponents: UInt8[np.ndarray, "*stack groups"]
) -> Float32[np.ndarray, "*stack K"]:
    """Returns the numbers of codes times their scales."""
    powers = exponents.astype(np.int32) - _BIAS
    return np.ldexp(NUMBERS[codes], np.repeat(powers, GROUP, axis=-1)[..., : codes.shape[-1]])


def dummy_exponents(parameter: Parameter) -> UInt8[np.ndarray, "*stack groups"]:
    """Returns the exponents of an MXFP4 parameter; neighbouring ones differ."""
    whole = parameter.whole or parameter
    shape = (*whole.shape[:-1], whole.shape[-1] // GROUP)
    own = replace(whole, name=f"{whole.name}_scales", shape=shape)
    deviation = init_of(whole).step * 2**23 / math.sqrt(3)
    sizes = parameter_array(own, SIZES_LAW) * np.float32(deviation / NUMBERS.std())
    powers = np.frexp(sizes)[1] - 1 + (np.frexp(sizes)[0] > np.float32(0.75))
    return shard_array(parameter, (powers + _BIAS).astype(np.uint8))


class MXFP4Reader:
    """Reader of `X_blocks` and `X_scales`; see `TensorReader`."""

    stored_as = "U8 blocks with scales"

    def companions(self, name: str, files: TensorFiles) -> tuple[str, ...]:
        """Returns the tensors that replace a weight, if it is MXFP4."""
        names = (f"{name}_blocks", f"{name}_scales")
        return names if files.has(names[0]) else ()

    def is_unused(self, name: str, files: TensorFiles) -> bool:
        """Returns False: both tensors are read."""
        return False

    def check_unquantised(self, source: CheckpointTensor, files: TensorFiles) -> None:
        """Accepts all tensors: unquantised weights have names of their own."""

    def check(self, source: CheckpointTensor, files: TensorFiles) -> None:
        """Raises `CheckpointError` for tensors of other shapes or types."""
        blocks, scales = self.companions(source.name, files)
        *stack, inputs = source.shape
        shape = (*stack, inputs // GROUP)
        if inputs % GROUP:
            raise CheckpointError(
                f"tensor {blocks} is not supported: its inputs must be a multiple of {GROUP}, got "
                f"{inputs}"
            )
        check_stored(blocks, files.header(blocks), [(*shape, GROUP // 2)], ("U8",))
        check_stored(scales, files.header(scales), [shape], ("U8",))

    def num_bytes(self, source: CheckpointTensor, files: TensorFiles) -> int:
        """Returns the stored bytes of a slice and its scales."""
        return MXFP4Encoding().num_bytes(source.taken_shape)

    def stored(self, source: CheckpointTensor, files: TensorFiles) -> StoredTensor:
        """Returns an MXFP4 tensor: codes of eight neighbours in an int32, and exponents."""
        return StoredTensor(source, MXFP4Encoding(), lambda plane: _read(source, files, plane))

    def dequantized(
        self, source: CheckpointTensor, files: TensorFiles
    ) -> Float32[np.ndarray, "..."]:
        """Reads the slice in float32."""
        words, exponents = (_read(source, files, plane) for plane in (VALUES, SCALES))
        return dequantize(four_bit.unpack_in_order(words), exponents)


def _read(source: CheckpointTensor, files: TensorFiles, plane: str) -> Array:
    """Reads the slice of codes or exponents, gate outputs before up outputs.

    Raises:
      CheckpointError: A scale is NaN.
    """
    blocks, scales = (f"{source.name}_{each}" for each in ("blocks", "scales"))
    values = files.tensor(blocks if plane == VALUES else scales)
    if plane == SCALES and (values == _NAN).any():
        raise CheckpointError(f"tensor {scales} contains NaN")
    values = slice_tensor(source, in_halves(source, values))
    if plane == SCALES:
        return values
    shape = source.taken_shape
    return np.ascontiguousarray(values).view("<i4").reshape((*shape[:-1], shape[-1] // PARTS))


SPELLING = Spelling(method="mxfp4", served={}, read=lambda stated: MXFP4Encoding())
