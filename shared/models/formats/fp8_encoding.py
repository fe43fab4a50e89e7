"""FP8 tensors of checkpoints: granularity of their scales, and their dummy weights.

The quantised values of dummy weights are odd integers below 16, which FP8 represents exactly.
"""

import math
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from jaxtyping import Float32

from shared.models.dummy_elements import InitSpec, init_of, parameter_array
from shared.models.formats import fp8
from shared.models.formats.fp8 import Granularity
from shared.models.formats.names import FP8
from shared.models.formats.weight_format import StoredTensor
from shared.models.parameter import Parameter
from shared.models.parameter_arrays import shard_array, shard_outputs

FP8_INIT = InitSpec(4, 1.0, 0.0)
"""Distribution of FP8 values."""
SIZES_LAW = InitSpec.around(1.0, 0.5)
"""Distribution of the relative sizes of scales; neighbouring scales differ, as in a trained
model."""
SCALE_STEP = 2**23 / math.sqrt(3 * 85 * 13 / 12)
"""Scale of relative size 1, as a multiple of the step of the target distribution. 85 is the mean
square of the FP8 values, 13 / 12 the mean square of the relative sizes."""
CODES = (0x4E4A4438, 0x57555351)
"""FP8 encodings of 1, 3, 5, 7 and of 9, 11, 13, 15, the first of each four in the lowest byte."""


def code_scales(parameter: Parameter, granularity: Granularity) -> Float32[np.ndarray, "..."]:
    """Returns the scales of an FP8 parameter according to `init_of`, exact in bfloat16.

    With block scales, a TP shard must consist of whole blocks.
    """
    whole = parameter.whole or parameter
    shape = fp8.scale_shape(whole.shape, granularity)
    own = replace(whole, name=f"{whole.name}_scales", shape=shape)
    step = np.float32(init_of(whole).step * SCALE_STEP)
    scales = fp8.rounded(parameter_array(own, SIZES_LAW) * step)
    if parameter.whole is None or granularity is Granularity.CHANNEL:
        return shard_array(parameter, scales)
    return np.take(scales, shard_outputs(parameter)[:: fp8.BLOCK] // fp8.BLOCK, parameter.axis)


def scales_of_outputs(
    parameter: Parameter, granularity: Granularity
) -> Float32[np.ndarray, "*stack outputs scales_in"]:
    """Returns the scales of `code_scales` repeated for each output, so that a TP shard may cut
    blocks.
    """
    whole = parameter.whole or parameter
    scales = code_scales(whole, granularity)
    if granularity is Granularity.BLOCK:
        scales = fp8.scales_of_outputs(scales, whole.shape[-2])
    return shard_array(parameter, scales)


@dataclass(frozen=True)
class FP8Encoding:
    """Encoding of FP8 tensors with scales of a granularity; see `TensorEncoding`."""

    granularity: Granularity
    name = FP8
    init = FP8_INIT

    @property
    def of_dummies(self) -> Self:
        """Encoding of dummy weights: per-tensor scales are generated per channel."""
        return replace(self, granularity=fp8.kept_granularity(self.granularity))

    def is_usual(self, name: str) -> bool:
        """Returns True if FP8 releases quantise a tensor of this name."""
        return fp8.is_quantised(name)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of a weight of a shape, with bfloat16 scales."""
        return math.prod(shape) + 2 * math.prod(fp8.scale_shape(shape, self.granularity))

    def scaled_dummy(
        self, parameter: Parameter, elements: Float32[np.ndarray, "..."]
    ) -> Float32[np.ndarray, "..."]:
        """Multiplies the elements of a dummy parameter by their scales, in place."""
        return fp8.apply_scales(elements, code_scales(parameter, self.granularity))


def granularity_of(tensor: StoredTensor | None) -> Granularity | None:
    """Returns the granularity of a tensor's scales; None if it is not FP8."""
    encoding = tensor and tensor.encoding
    return encoding.granularity if isinstance(encoding, FP8Encoding) else None
