"""Operations of all weight formats, and reading of quantised parameters to the device."""

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from shared.models.checkpoint import Checkpoint
from shared.models.dummy_weights import DummyCheckpoint, Stored
from shared.models.formats.fp8_encoding import FP8Encoding
from shared.models.formats.fp8_w8a8 import FP8W8A8
from shared.models.formats.fp8_w8a16 import FP8W8A16
from shared.models.formats.int4_encoding import Int4Encoding
from shared.models.formats.int4_w4a16 import Int4W4A16
from shared.models.formats.mxfp4 import MXFP4W4A16, MXFP4Encoding
from shared.models.formats.weight_format import (
    VALUES,
    FormatOps,
    Planes,
    QuantizedFormat,
    WeightFormat,
)
from shared.models.parameter import Parameter
from torch_impl.formats import fp8, int4, mxfp4

FORMATS: Mapping[type, FormatOps] = {
    FP8W8A16: fp8.W8A16,
    FP8W8A8: fp8.W8A8,
    Int4W4A16: int4.W4A16,
    MXFP4W4A16: mxfp4.W4A16,
}
"""Operations of each quantised format."""

SCALED: Mapping[type, Callable[[Any, Parameter, Any], Tensor]] = {
    FP8Encoding: fp8.scaled,
    Int4Encoding: int4.scaled,
    MXFP4Encoding: mxfp4.scaled,
}
"""Functions that multiply elements of a dummy parameter or shard by their scales, in place."""


def dequantized(format: WeightFormat, planes: Planes) -> Shaped[Tensor, "*experts outputs inputs"]:
    ops = FORMATS.get(type(format))
    found = planes[VALUES] if ops is None else ops.dequantized(planes)
    return found[..., : -format.padding] if format.padding else found


def read(
    checkpoint: Stored,
    parameter: Parameter,
    format: QuantizedFormat,
    device: torch.device,
    progress: Callable[[int], None],
) -> Planes:
    """Reads the planes of a quantised parameter; see `Checkpoint.planes`."""
    if isinstance(checkpoint, DummyCheckpoint):
        planes = FORMATS[type(format)].dummy(parameter, format, device)
        progress(checkpoint.num_bytes([parameter]))
        return planes
    return _from_files(checkpoint, parameter, format, device, progress)


def host_tensor(array: Shaped[np.ndarray, "..."]) -> Tensor:
    """Returns a tensor that shares the array's memory."""
    if array.dtype == ml_dtypes.bfloat16:  # torch does not support the NumPy dtype
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _from_files(
    checkpoint: Checkpoint,
    parameter: Parameter,
    format: QuantizedFormat,
    device: torch.device,
    progress: Callable[[int], None],
) -> Planes:
    """Writes elements to the device tensor by tensor, and all other planes when complete."""
    planes = {}
    for name, plane in format.planes(parameter.shape).items():
        where = device if name == VALUES else "cpu"
        planes[name] = torch.empty(plane.shape, dtype=getattr(torch, plane.dtype), device=where)
    converted = FORMATS[type(format)].converted
    for piece in checkpoint.planes(parameter, format, progress):
        values = host_tensor(piece.part)
        if piece.plane == VALUES:
            values = converted(values.to(device))
        planes[piece.plane][piece.place].copy_(values)
    return {name: plane.to(device) for name, plane in planes.items()}
