"""Packed FP8 (W8A16): e4m3 weights packed four to an int32, as kernels read them, with scales.

The scales are per block of 128 outputs and 128 inputs, shape `[outputs / 128, inputs / 128]`, or
per output, shape `[outputs, 1]`; the shape determines which. The last block may have fewer outputs.
A per-tensor scale is repeated for each output. A dequantised weight is its value times its scale,
rounded once to bfloat16.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Float32, Int32, Shaped, UInt8

from shared.models.formats import fp8
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_encoding import granularity_of
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
)
from shared.models.parameter import Parameter

FP8_BLOCK = fp8.BLOCK
"""Inputs whose values are packed together; outputs and inputs that share a block scale."""
SCALE_FACTOR = 2.0**120
"""Factor of stored scales. A kernel moves the bits of an FP8 value into a bfloat16, which makes the
value 2^-120 of what it is; the larger scales compensate. The product is rounded as if both had
their true size."""
KEPT = ("mlp.gate_up", "experts.gate_up", "experts.down", "mamba2.inputs")
"""Suffixes of the names of parameters that are stored as packed FP8 on a GPU.

A kernel dequantises a weight in registers to the same bits as a dequantised weight in memory, so
the choice per parameter affects speed and memory only. All other parameters are dequantised when
loaded: with few outputs, a GPU program has long dependency chains and little work to hide
dequantisation behind. The input projection of a Mamba2 layer has the most outputs outside the MLPs
(10,304 in Nemotron 3 Nano); its speed in FP8 has not been measured.
"""
_LARGEST_SCALE = 2.0**7
"""From this value on, a scale times `SCALE_FACTOR` would overflow."""
_PARTS = 4


@dataclass(frozen=True)
class FP8W8A16:
    """Format of packed FP8 weights with scales of a granularity, block or channel.

    Activations are bfloat16; see `QuantizedFormat`.
    """

    granularity: Granularity
    name = "fp8_w8a16"
    label = "FP8"
    item_bytes = 1
    quantizes_activations = False
    expands_dense = True

    @classmethod
    def choose(
        cls, parameter: Parameter, stored: StoredTensors, context: FormatContext
    ) -> Self | None:
        """Returns the format of a parameter that kernels read as packed FP8, on a GPU in bfloat16.

        All its tensors are FP8 in whole blocks; their scales are exact in bfloat16 and have one
        granularity, block or channel. If a layer has one tensor, its last block may be smaller.
        Reads the scales.
        """
        is_served = context.reads_packed and not context.fp8_activations
        if not is_served or not parameter.name.endswith(KEPT):
            return None
        tensors = stored(parameter)
        is_single = len(tensors) == len(parameter.pieces)
        found = {_granularity(tensor, is_single) for tensor in tensors}
        granularity = found.pop() if len(found) == 1 else None
        return None if granularity is None else cls(granularity)

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        """Returns packed values and scales."""
        scales = fp8.scale_shape(shape, self.granularity)
        return {VALUES: Plane(shape_of_words(shape), "int32"), SCALES: Plane(scales, "bfloat16")}

    def pieces(
        self, tensor: StoredTensor, at: Place, shape: tuple[int, ...], whole: tuple[int, ...]
    ) -> Iterator[PlanePiece]:
        """Reads FP8 values, which the backend packs, and scales; see `QuantizedFormat.pieces`."""
        yield PlanePiece(VALUES, at, tensor.read(VALUES).reshape(shape))
        place = fp8.place_of_scales(at, whole, self.granularity)
        scales = fp8.taken_scales(tensor.source, tensor.read(SCALES), self.granularity, shape)
        yield PlanePiece(SCALES, place, packed_scales(scales))

    def dequantize(self, planes: Mapping[str, Array]) -> Array:
        """Returns values times scales, rounded to bfloat16."""
        return widened(planes[VALUES], planes[SCALES])


def _granularity(tensor: StoredTensor | None, is_single: bool) -> Granularity | None:
    """Returns the granularity in memory of a tensor; None if it cannot stay FP8.

    The last block of a weight's only tensor may be smaller.
    """
    stored = granularity_of(tensor)
    if tensor is None or stored is None:
        return None
    has_blocks = fp8.has_blocks if is_single else fp8.has_whole_blocks
    if not has_blocks(tensor.source, stored):
        return None
    return fp8.kept_granularity(stored) if are_in_bfloat16(tensor.read(SCALES)) else None


class ScaleLayout(NamedTuple):
    """Number of outputs that share a scale, and number of scales per output along its inputs.

    Scales are per block, or per output.
    """

    outputs: int
    scales_in: int


def shares_of(words: tuple[int, ...], scales: tuple[int, ...]) -> ScaleLayout:
    """Returns the layout of the scales of a weight or a stack, from the shapes of packed values and
    scales.
    """
    return ScaleLayout(1 if scales[-2] == words[-2] else FP8_BLOCK, scales[-1])


def shape_of_words(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the packed shape of a weight."""
    return (*shape[:-1], shape[-1] // _PARTS)


def pack(codes: UInt8[np.ndarray, "*stack N K"]) -> Int32[np.ndarray, "*stack N words"]:
    """Packs four FP8 values of a row into each int32, the first in the lowest byte.

    Byte i of element j in a block of 128 inputs is input 32 i + j. The bytes i of all elements of a
    block are therefore 32 inputs in order, and four products of 32 follow the order of the inputs.

    Raises:
      ValueError: The number of inputs is not a multiple of 128, or a value is NaN.
    """
    *stack, outputs, inputs = codes.shape
    if inputs % FP8_BLOCK:
        raise ValueError(f"inputs must be a multiple of {FP8_BLOCK}, got {inputs}")
    if fp8.has_nan(codes):
        raise ValueError("FP8 weights must not contain NaN")
    blocks = codes.reshape((*stack, outputs, -1, _PARTS, FP8_BLOCK // _PARTS))
    words = np.ascontiguousarray(blocks.swapaxes(-1, -2)).view("<i4")
    return words.astype(np.int32, copy=False).reshape((*stack, outputs, inputs // _PARTS))


def unpack(words: Int32[np.ndarray, "*stack N words"]) -> UInt8[np.ndarray, "*stack N K"]:
    """Returns the FP8 values in the order of the inputs; the inverse of `pack`."""
    *stack, outputs, count = words.shape
    blocks = words.astype("<i4").view(np.uint8)
    blocks = blocks.reshape((*stack, outputs, -1, FP8_BLOCK // _PARTS, _PARTS))
    return blocks.swapaxes(-1, -2).reshape((*stack, outputs, count * _PARTS))


def widened(
    words: Int32[np.ndarray, "*stack N words"],
    scales: Shaped[np.ndarray, "*stack scales scales_in"],
) -> Float32[np.ndarray, "*stack N K"]:
    """Dequantises packed values; each result is exact in bfloat16."""
    own = scales.astype(np.float32) / np.float32(SCALE_FACTOR)
    return fp8.rounded(fp8.dequantize(unpack(words), own))


def packed_scales(scales: Shaped[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Returns scales as kernels read them, in bfloat16 precision and multiplied by `SCALE_FACTOR`.

    Raises:
      ValueError: A scale is not exact in bfloat16.
    """
    if not are_in_bfloat16(scales):
        raise ValueError("scales must be exact in bfloat16")
    return scales.astype(np.float32) * np.float32(SCALE_FACTOR)


def are_in_bfloat16(scales: Shaped[np.ndarray, "..."]) -> bool:
    """Returns True if all scales are exact in bfloat16, also after multiplication by
    `SCALE_FACTOR`.
    """
    wide = scales.astype(np.float32)
    is_inside = np.abs(wide) < _LARGEST_SCALE
    return bool((is_inside & (fp8.rounded(wide) == wide)).all())
