"""Operations of all weight formats, and reading of quantised parameters to the device."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Int, Shaped

from jax_impl.formats import fp8, int4, mxfp4
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

FORMATS: Mapping[type, FormatOps] = {
    FP8W8A16: fp8.W8A16,
    FP8W8A8: fp8.W8A8,
    Int4W4A16: int4.W4A16,
    MXFP4W4A16: mxfp4.W4A16,
}
"""Operations of each quantised format."""

SCALED: Mapping[type, Callable[[Any, Parameter, Any], jax.Array]] = {
    FP8Encoding: fp8.scaled,
    Int4Encoding: int4.scaled,
    MXFP4Encoding: mxfp4.scaled,
}
"""Functions that multiply elements of a dummy parameter or shard by their scales, in place."""


def dequantized(
    format: WeightFormat, planes: Planes
) -> Shaped[jax.Array, "*layers outputs inputs"]:
    """Returns the numbers of a weight."""
    ops = FORMATS.get(type(format))
    found = planes[VALUES] if ops is None else ops.dequantized(planes)
    return found[..., : -format.padding] if format.padding else found


def read(
    checkpoint: Stored,
    parameter: Parameter,
    format: QuantizedFormat,
    device: jax.Device,
    progress: Callable[[int], None],
) -> Planes:
    """Reads the planes of a quantised parameter; see `Checkpoint.planes`."""
    if isinstance(checkpoint, DummyCheckpoint):
        planes = FORMATS[type(format)].dummy(parameter, format, device)
        progress(checkpoint.num_bytes([parameter]))
        return planes
    return _from_files(checkpoint, parameter, format, device, progress)


def _from_files(
    checkpoint: Checkpoint,
    parameter: Parameter,
    format: QuantizedFormat,
    device: jax.Device,
    progress: Callable[[int], None],
) -> Planes:
    """Writes elements to the device tensor by tensor, and all other planes when complete."""
    planes = format.planes(parameter.shape)
    values = jnp.zeros(*planes.pop(VALUES), device=device)
    others = {name: np.empty(x.shape, jnp.dtype(x.dtype)) for name, x in planes.items()}
    converted = FORMATS[type(format)].converted
    for piece in checkpoint.planes(parameter, format, progress):
        if piece.plane != VALUES:
            others[piece.plane][piece.place] = piece.part
            continue
        first = [each.start if isinstance(each, slice) else each for each in piece.place]
        part = piece.part.reshape((1,) * (values.ndim - piece.part.ndim) + piece.part.shape)
        values = _written(values, part, jnp.asarray(first, np.int32), converted)
    return {VALUES: values, **{name: jax.device_put(x, device) for name, x in others.items()}}


@partial(jax.jit, donate_argnums=0, static_argnums=3)
def _written(
    plane: Shaped[jax.Array, "..."],
    part: Shaped[jax.Array, "..."],
    first: Int[jax.Array, " axes"],
    converted: Callable[[jax.Array], jax.Array],
) -> Shaped[jax.Array, "..."]:
    """Writes a converted piece into a plane, in place (donated).

    `first` has the indices of its first element on the outer axes; the piece spans the others.
    """
    start = [*first, *[0] * (plane.ndim - len(first))]
    return lax.dynamic_update_slice(plane, converted(part), start)
