"""FP8 weights for W8A8: values in input order, block scales, activations quantised to FP8.

The scales are per block of 128 outputs and 128 inputs, which GPU kernels read, or per output and
block of 128 inputs. `shared.spec.fp8_activations` defines the product.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from shared.models.formats import fp8
from shared.models.formats.fp8 import BLOCK, Granularity
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
    UnsupportedFormatError,
)
from shared.models.parameter import EXPERTS, Parameter

HOPPERS = {"H20", "H100", "H200", "H800", "GH200"}
"""Words in the names of GPUs with tensor cores for the FP8 x FP8 products of the kernels."""


@dataclass(frozen=True)
class FP8W8A8:
    """Format of FP8 weights for quantised activations; see `QuantizedFormat`.

    Attributes:
      by_output: True for scales per output; on a GPU they are per block.
    """

    by_output: bool
    name = "fp8_w8a8"
    label = "FP8"
    item_bytes = 1
    padding = 0
    quantizes_activations = True
    expands_dense = False

    @classmethod
    def choose(
        cls, parameter: Parameter, stored: StoredTensors, context: FormatContext
    ) -> Self | None:
        """Returns the format of a parameter that is entirely FP8 with block scales, if the flag is
        set.

        Raises:
          UnsupportedFormatError: The device does not support it.
        """
        if not context.fp8_activations or not is_w8a8(tensors := stored(parameter)):
            return None
        fault = _kernel_fault(parameter, tensors, context.device_name) if context.on_gpu else None
        if fault is None and context.dtype != "bfloat16":
            fault = "--fp8-activations requires bfloat16; add --dtype bfloat16"
        if fault is not None:
            raise UnsupportedFormatError(fault)
        return cls(by_output=not context.on_gpu)

    def planes(self, shape: tuple[int, ...]) -> dict[str, Plane]:
        """Returns values and float32 scales."""
        scales = fp8.scale_shape(shape, Granularity.BLOCK)
        if self.by_output:
            scales = (*shape[:-1], scales[-1])
        return {VALUES: Plane(shape, "float8_e4m3fn"), SCALES: Plane(scales, "float32")}

    def pieces(
        self, tensor: StoredTensor, at: Place, shape: tuple[int, ...], whole: tuple[int, ...]
    ) -> Iterator[PlanePiece]:
        """Reads FP8 values and scales; see `QuantizedFormat.pieces`. Scales per output allow slices
        inside a block.
        """
        yield PlanePiece(VALUES, at, tensor.read(VALUES).reshape(shape))
        source, scales = tensor.source, tensor.read(SCALES)
        if self.by_output:
            taken = fp8.taken_scales_of_outputs(source, scales, shape)
            yield PlanePiece(SCALES, at, taken)
            return
        taken = fp8.taken_scales(source, scales, Granularity.BLOCK, shape)
        yield PlanePiece(SCALES, fp8.place_of_scales(at, whole, Granularity.BLOCK), taken)

    def dequantize(self, planes: Mapping[str, Array]) -> Array:
        """Returns values times scales in float32."""
        values, scales = fp8.VALUES[planes[VALUES]], planes[SCALES]
        rows = np.repeat(scales, values.shape[-2] // scales.shape[-2], axis=-2)
        return values * np.repeat(rows, BLOCK, axis=-1)[..., : values.shape[-1]]


def is_w8a8(tensors: Sequence[StoredTensor | None]) -> bool:
    """Returns True if the tensors of a parameter are all FP8 with block scales."""
    return {granularity_of(tensor) for tensor in tensors} == {Granularity.BLOCK}


def w8a8_fault(wanted: Sequence[Parameter], stored: StoredTensors) -> str | None:
    """Returns the reason why the tensors of a model exclude `--fp8-activations`, on any device."""
    quantised = [p for p in wanted if any(map(granularity_of, stored(p)))]
    if not quantised:
        return (
            "--fp8-activations requires a checkpoint with FP8 weights, and this one has "
            "none; remove the flag"
        )
    if mixed := min((p.name for p in quantised if not is_w8a8(stored(p))), default=None):
        return (
            "--fp8-activations requires FP8 with block scales in all tensors of a fused "
            f"weight, and {mixed} has others; remove the flag"
        )
    return None


def _kernel_fault(
    parameter: Parameter, tensors: Sequence[StoredTensor | None], device_name: str
) -> str | None:
    """Returns the reason why the GPU kernels do not support a W8A8 parameter."""
    if not HOPPERS & {*device_name.replace("-", " ").split()}:
        return (
            f"--fp8-activations requires a Hopper GPU (H100, H200); found {device_name}. "
            "Remove the flag"
        )
    if parameter.name.endswith(EXPERTS):
        return "--fp8-activations does not support FP8 experts on a GPU; remove the flag"
    sources = [tensor.source for tensor in tensors if tensor is not None]
    if any(fp8.cuts_blocks(source) or source.shape[-1] % BLOCK for source in sources):
        return (
            f"--fp8-activations requires whole blocks of {BLOCK} x {BLOCK} on a GPU, "
            f"and {parameter.name} has others; remove the flag"
        )
    return None
