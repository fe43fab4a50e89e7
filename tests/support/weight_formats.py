"""Formats of parameters as a server with a GPU or with W8A8 chooses them, and their planes."""

from __future__ import annotations

from collections.abc import Sequence

import ml_dtypes
import numpy as np

from shared.models.checkpoint import Checkpoint
from shared.models.dummy_weights import Stored
from shared.models.formats import four_bit, fp8
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_w8a8 import FP8W8A8
from shared.models.formats.fp8_w8a16 import FP8W8A16, filled, pack, packed_scales
from shared.models.formats.int4_encoding import Int4Encoding
from shared.models.formats.int4_w4a16 import Int4W4A16, scale_words
from shared.models.formats.mxfp4 import EXPONENT_SHIFT, GROUP, MXFP4W4A16
from shared.models.formats.registry import choose_formats
from shared.models.formats.weight_format import SCALES, VALUES, FormatContext, QuantizedFormat
from shared.models.parameter import Parameter
from shared.spec.linear import Matrix

ON_GPU = FormatContext(
    on_gpu=True, device_name="NVIDIA H100", dtype="bfloat16", fp8_activations=False
)
W8A8_ON_CPU = FormatContext(on_gpu=False, device_name="CPU", dtype="bfloat16", fp8_activations=True)


def w8a16_of(checkpoint: Stored, wanted: Sequence[Parameter]) -> dict[str, QuantizedFormat]:
    """Formats of the parameters that stay FP8 on a GPU."""
    return choose_formats(wanted, checkpoint.stored, ON_GPU)


def w8a8_of(checkpoint: Stored, wanted: Sequence[Parameter]) -> dict[str, QuantizedFormat]:
    """Formats of the parameters whose activations are quantised too, on a CPU."""
    return choose_formats(wanted, checkpoint.stored, W8A8_ON_CPU)


def read_planes(
    checkpoint: Checkpoint, parameter: Parameter, format: QuantizedFormat
) -> dict[str, np.ndarray]:
    """Planes of a parameter in main memory; elements in the order of the checkpoint, as uint8."""
    planes = {}
    for name, plane in format.planes(parameter.shape).items():
        is_elements = name == VALUES
        kind = np.uint8 if is_elements else np.dtype(getattr(ml_dtypes, plane.dtype, plane.dtype))
        planes[name] = np.empty(parameter.shape if is_elements else plane.shape, kind)
    for piece in checkpoint.planes(parameter, format, lambda num_bytes: None):
        planes[piece.plane][piece.place] = piece.part
    return planes


def w8a16_matrix(
    codes: np.ndarray,
    scales: np.ndarray,
    granularity: Granularity,
    bias: np.ndarray | None = None,
) -> Matrix:
    """A packed FP8 weight; float32 scales stay so, and partial blocks have scales per output."""
    outputs, inputs = codes.shape[-2:]
    by_output = granularity is Granularity.BLOCK and outputs % fp8.BLOCK > 0
    kind = "float32" if scales.dtype == np.float32 else "bfloat16"
    format = FP8W8A16(granularity, by_output, kind, padding=-inputs % fp8.BLOCK)
    kept = fp8.scales_of_outputs(scales, outputs) if by_output else scales
    planes = {VALUES: pack(filled(codes, format.padding)), SCALES: packed_scales(kept, kind)}
    return Matrix(format, planes, bias)


def int4_matrix(
    codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray | None, encoding: Int4Encoding
) -> Matrix:
    """A packed INT4 weight."""
    format = Int4W4A16.of(encoding, codes.shape[-1])
    assert format is not None
    stored = scale_words(scales, zeros) if format.has_words else scales
    stored = four_bit.filled(stored, format.planes(codes.shape)[SCALES].shape[-1])
    return Matrix(format, {VALUES: four_bit.pack(codes), SCALES: stored})


def mxfp4_matrix(codes: np.ndarray, exponents: np.ndarray) -> Matrix:
    """A packed MXFP4 weight."""
    inputs = codes.shape[-1]
    scales = four_bit.filled(exponents + EXPONENT_SHIFT, four_bit.padded(inputs) // GROUP)
    planes = {VALUES: four_bit.pack(codes), SCALES: scales.astype(np.uint8)}
    return Matrix(MXFP4W4A16(inputs), planes)


def w8a8_matrix(codes: np.ndarray, scales: np.ndarray, bias: np.ndarray | None = None) -> Matrix:
    """An FP8 weight in input order, with scales per block, or per output."""
    by_output = scales.shape[-2] == codes.shape[-2]
    return Matrix(FP8W8A8(by_output), {VALUES: codes, SCALES: scales}, bias)
