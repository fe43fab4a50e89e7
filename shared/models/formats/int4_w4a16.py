"""Packed INT4 (W4A16): codes packed eight to an int32, as kernels read them, with scales.

A scale belongs to an output and a group of 32, 64 or 128 inputs or a whole row. A dequantised
weight is (code - zero point) times scale, rounded once to bfloat16. Kernels compute it in bfloat16:
codes, zero points and their differences are exact there.

Scales that are exact in bfloat16, without zero points, are stored as such. All others are an int32:
the scale's first eight bits as a bfloat16 in the upper half, the rest as a bfloat16 in the lower
one, and the zero point in its lowest four bits, which such a rest does not use. Its product with a
code is exact in bfloat16 too, so that one fused multiply-add rounds the sum of both products once.

The last block of inputs is filled with codes and scales that are zero; see `four_bit`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import Float32, Int32, UInt8

from shared.models.formats import four_bit, fp8
from shared.models.formats.four_bit import PARTS, filled, padded
from shared.models.formats.int4_encoding import (
    HALF,
    ZERO,
    Int4Encoding,
    dequantize,
    scale_shape,
)
from shared.models.formats.weight_format import (
    MATRICES,
    SCALES,
    VALUES,
    ZEROS,
    Array,
    FormatContext,
    Place,
    Plane,
    PlanePiece,
    StoredTensor,
    StoredTensors,
)
from shared.models.parameter import Parameter

_UPPER = np.uint32(0xFFFF0000)
_ZERO_BITS = 15


@dataclass(frozen=True)
class Int4W4A16:
    """Format of packed INT4 weights; see `QuantizedFormat`.

    Attributes:
      group: Inputs with a scale; None for a whole row.
      has_words: True if a scale is an int32, with the zero point; otherwise it is a bfloat16.
      padding: Inputs that fill the last block.
    """

    group: int | None
    has_words: bool
    padding: int = 0
    name = "int4_w4a16"
    label = "INT4"
    item_bytes = 0.5
    quantizes_activations = False
    expands_dense = True

    @classmethod
    def choose(
        cls, parameter: Parameter, stored: StoredTensors, context: FormatContext
    ) -> Self | None:
        """Returns the format of a matrix with INT4 tensors only, on a GPU in bfloat16.

        They have one size of groups, which are neighbouring inputs, and scales of 16 bits.
        """
        if (
            not context.reads_packed
            or not parameter.name.endswith(MATRICES)
            or parameter.shape[-1] % PARTS
        ):
            return None
        found = {tensor and tensor.encoding for tensor in stored(parameter)}
        encoding = found.pop() if len(found) == 1 else None
        if not isinstance(encoding, Int4Encoding):
            return None
        return cls.of(encoding, parameter.shape[-1])

    @classmethod
    def of(cls, encoding: Int4Encoding, inputs: int) -> Self | None:
        """Returns the format of an encoding; None if weights are dequantised when loaded."""
        if encoding.is_permuted or encoding.scale_type not in HALF:
            return None
        has_words = encoding.has_zeros or encoding.scale_type != "BF16"
        return cls(encoding.group, has_words, padded(inputs) - inputs)

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        """Returns packed codes and scales."""
        whole = (*shape[:-1], shape[-1] + self.padding)
        words = Plane((*whole[:-1], whole[-1] // PARTS), "int32")
        kind = "int32" if self.has_words else "bfloat16"
        return {VALUES: words, SCALES: Plane(scale_shape(whole, self.group), kind)}

    def pieces(
        self, tensor: StoredTensor, at: Place, shape: tuple[int, ...], whole: tuple[int, ...]
    ) -> Iterator[PlanePiece]:
        """Reads codes, which the backend packs, and scales; see `QuantizedFormat.pieces`."""
        words, scales = tensor.read(VALUES), tensor.read(SCALES).astype(np.float32)
        columns = {name: plane.shape[-1] for name, plane in self.planes(shape).items()}
        words = words.reshape((*shape[:-1], words.shape[-1]))
        yield PlanePiece(VALUES, at, filled(words, columns[VALUES]))
        if self.has_words:
            encoding = tensor.encoding
            assert isinstance(encoding, Int4Encoding)  # chosen for it
            scales = scale_words(scales, tensor.read(ZEROS) if encoding.has_zeros else None)
        scales = scales.reshape((*shape[:-1], scales.shape[-1]))
        yield PlanePiece(SCALES, at, filled(scales, columns[SCALES]))

    def dequantize(self, planes: Mapping[str, Array]) -> Array:
        """Returns (code - zero point) times scale, rounded to bfloat16."""
        codes, scales, zeros = four_bit.unpack(planes[VALUES]), planes[SCALES], None
        if self.has_words:
            scales, zeros = of_scale_words(scales)
        wide = fp8.rounded(dequantize(codes, scales, zeros))
        return wide[..., : wide.shape[-1] - self.padding]


def scale_words(
    scales: Float32[np.ndarray, "*stack groups"], zeros: UInt8[np.ndarray, "*stack groups"] | None
) -> Int32[np.ndarray, "*stack groups"]:
    """Packs scales of up to eleven bits and zero points.

    Raises:
      ValueError: A scale has more bits.
    """
    upper = (scales.view(np.uint32) & _UPPER).view(np.float32)
    rest = (scales - upper).view(np.uint32)
    if (rest & np.uint32(0x001FFFFF)).any():
        raise ValueError("scales of packed INT4 must be bfloat16 or float16 numbers")
    zero = np.uint32(ZERO) if zeros is None else zeros.astype(np.uint32)
    return (upper.view(np.uint32) | rest >> np.uint32(16) | zero).view(np.int32)


def of_scale_words(
    words: Int32[np.ndarray, "*stack groups"],
) -> tuple[Float32[np.ndarray, "*stack groups"], UInt8[np.ndarray, "*stack groups"]]:
    """Returns the scales and zero points; the inverse of `scale_words`."""
    bits = np.ascontiguousarray(words).view(np.uint32)
    rest = (bits & np.uint32(0xFFF0)) << np.uint32(16)
    scales = (bits & _UPPER).view(np.float32) + rest.view(np.float32)
    return scales, (bits & np.uint32(_ZERO_BITS)).astype(np.uint8)
