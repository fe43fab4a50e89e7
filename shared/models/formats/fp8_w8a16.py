"""Packed FP8 (W8A16): e4m3 weights packed four to an int32, as kernels read them, with scales.

The scales are per block of 128 outputs and 128 inputs, shape `[outputs / 128, inputs / 128]`, or
per output, shape `[outputs, 1]`. Block scales are repeated for each output, shape
`[outputs, inputs / 128]`, if the outputs are not whole blocks. The shape determines which. The last
block of inputs is filled with zeros, and its scales belong to fewer inputs. A per-tensor scale is
repeated for each output. A dequantised weight is its value times its scale, rounded once to
bfloat16.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Float32, Int32, Shaped, UInt8

from shared.models.formats import fp8
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_encoding import granularity_of
from shared.models.formats.weight_format import (
    MATRICES,
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
from shared.models.parameter import EXPERTS, Parameter

FP8_BLOCK = fp8.BLOCK
"""Inputs whose values are packed together; outputs and inputs that share a block scale."""
SCALE_FACTOR = 2.0**120
"""Factor of stored scales. A kernel moves the bits of an FP8 value into a bfloat16, which makes the
value 2^-120 of what it is; the larger scales compensate. The product is rounded as if both had
their true size."""
_MANY_OUTPUTS = ("mlp.gate_up", "mamba2.inputs")
_STEP = 256
"""Inputs per step of the kernel of few rows. A dense weight with partial steps is dequantised when
loaded, because the other kernel is slower than one for bfloat16; those with the most outputs are
not."""
_LARGEST_SCALE = 2.0**7
"""From this value on, a scale times `SCALE_FACTOR` would overflow."""
_PARTS = 4


@dataclass(frozen=True)
class FP8W8A16:
    """Format of packed FP8 weights; activations are bfloat16; see `QuantizedFormat`.

    Attributes:
      granularity: Granularity of the scales, block or channel.
      by_output: True for block scales that are repeated for each output.
      scale_dtype: Dtype of the scales, bfloat16 or float32.
      padding: Inputs that fill the last block.
    """

    granularity: Granularity
    by_output: bool = False
    scale_dtype: str = "bfloat16"
    padding: int = 0
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

        All its tensors are FP8, with scales of one granularity. Dense weights have whole blocks of
        inputs, or whole steps, and scales that are exact in bfloat16. Reads the scales.
        """
        is_served = context.reads_packed and not context.fp8_activations
        if not is_served or not parameter.name.endswith(MATRICES):
            return None
        every = stored(parameter)
        tensors = [tensor for tensor in every if tensor is not None]
        found = {_kept_granularity(tensor) for tensor in every}
        granularity = found.pop() if len(found) == 1 else None
        dtype, padding = _scale_dtype(tensors), -parameter.shape[-1] % FP8_BLOCK
        if granularity is None or dtype is None:
            return None
        # Kernels of experts also read partial blocks and float32 scales. Either takes a further
        # instruction per weight with a speed that was not measured, so dense weights have neither.
        is_plain = dtype == "bfloat16" and not padding
        is_fast = parameter.shape[-1] % _STEP == 0 or parameter.name.endswith(_MANY_OUTPUTS)
        if not (is_plain and is_fast or parameter.name.endswith(EXPERTS)):
            return None
        are_cut = any(fp8.cuts_blocks(tensor.source) for tensor in tensors)
        return cls(granularity, granularity is Granularity.BLOCK and are_cut, dtype, padding)

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        """Returns packed values and scales."""
        filled = (*shape[:-1], shape[-1] + self.padding)
        scales = fp8.scale_shape(shape, self.granularity)
        if self.by_output:
            scales = (*shape[:-1], scales[-1])
        return {
            VALUES: Plane(shape_of_words(filled), "int32"),
            SCALES: Plane(scales, self.scale_dtype),
        }

    def pieces(
        self, tensor: StoredTensor, at: Place, shape: tuple[int, ...], whole: tuple[int, ...]
    ) -> Iterator[PlanePiece]:
        """Reads FP8 values, which the backend packs, and scales; see `QuantizedFormat.pieces`."""
        values = tensor.read(VALUES).reshape(shape)
        yield PlanePiece(VALUES, at, filled(values, self.padding))
        source, scales, place = tensor.source, tensor.read(SCALES), at
        if self.by_output:
            taken = fp8.taken_scales_of_outputs(source, scales, shape)
        else:
            taken = fp8.taken_scales(source, scales, self.granularity, shape)
            place = fp8.place_of_scales(at, whole, self.granularity)
        yield PlanePiece(SCALES, place, packed_scales(taken, self.scale_dtype))

    def dequantize(self, planes: Mapping[str, Array]) -> Array:
        """Returns values times scales, rounded to bfloat16."""
        wide = widened(planes[VALUES], planes[SCALES])
        return wide[..., : wide.shape[-1] - self.padding]


def _kept_granularity(tensor: StoredTensor | None) -> Granularity | None:
    """Returns the granularity in memory of a tensor's scales; None if it is not FP8."""
    stored = granularity_of(tensor)
    return None if stored is None else fp8.kept_granularity(stored)


def _scale_dtype(tensors: Sequence[StoredTensor]) -> str | None:
    """Returns the smallest dtype that represents all scales of FP8 tensors; None if one is too
    large.
    """
    if any(granularity_of(tensor) is None for tensor in tensors):
        return None
    scales = [tensor.read(SCALES).astype(np.float32) for tensor in tensors]
    if any((np.abs(x) >= _LARGEST_SCALE).any() for x in scales):
        return None
    return "bfloat16" if all((fp8.rounded(x) == x).all() for x in scales) else "float32"


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


def filled(codes: UInt8[np.ndarray, "*stack K"], padding: int) -> UInt8[np.ndarray, "*stack whole"]:
    """Returns values with zeros after the last input."""
    return np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, padding)]) if padding else codes


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
    layout = shares_of(words.shape, scales.shape)
    own = np.repeat(own, layout.outputs, axis=-2)
    if layout.scales_in > 1:
        own = np.repeat(own, FP8_BLOCK, axis=-1)
    return fp8.rounded(fp8.VALUES[unpack(words)] * own)


def packed_scales(
    scales: Shaped[np.ndarray, "..."], dtype: str = "bfloat16"
) -> Float32[np.ndarray, "..."]:
    """Returns scales as kernels read them, multiplied by `SCALE_FACTOR`.

    Args:
      scales: Stored scales.
      dtype: Dtype in which kernels read them, bfloat16 or float32.

    Raises:
      ValueError: A scale is 128 or more, or not exact in the dtype.
    """
    wide = scales.astype(np.float32)
    is_inside = np.abs(wide) < _LARGEST_SCALE
    if not (is_inside & ((fp8.rounded(wide) == wide) | (dtype == "float32"))).all():
        raise ValueError(f"scales must be exact in {dtype} and below 128")
    return wide * np.float32(SCALE_FACTOR)
