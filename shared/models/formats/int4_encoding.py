"""INT4 weights of checkpoints: integers of four bits with a scale per output and group of inputs.

A weight is (code - zero point) times scale, with codes and zero points from 0 to 15; without stored
zero points they are 8. Scales have 16 bits. A dequantised weight is that product in float32, which
is exact, rounded once to the dtype of the model.
"""

import math
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
from jaxtyping import Float32, Int32, Shaped, UInt8

from shared.models.dummy_elements import InitSpec, init_of, parameter_array
from shared.models.formats import fp8
from shared.models.formats.fp8_encoding import SIZES_LAW
from shared.models.formats.names import INT4
from shared.models.parameter import Parameter
from shared.models.parameter_arrays import shard_array

ZERO = 8
"""Zero point of symmetric weights."""
GROUPS = (32, 64, 128)
"""Supported sizes of groups; a group may also be a whole row."""
HALF = ("BF16", "F16")
"""Types of scales in files of which kernels read packed weights."""
INT4_INIT = InitSpec(4, 0.5, -0.5)
"""Distribution of codes minus `ZERO`."""
SCALE_STEP = 2**23 / math.sqrt(3 * (21.5) * 13 / 12)
"""Scale of relative size 1, as a multiple of the step of the target distribution. 21.5 is the mean
square of codes minus `ZERO`, 13 / 12 the mean square of the relative sizes."""


class Int4Tensor(NamedTuple):
    """Tensor of a checkpoint, or some outputs of it.

    Attributes:
      words: Codes, eight neighbouring inputs in an element, the first in the lowest bits.
      scales: Scale of each output and group.
      zeros: Zero points in the same places; None: all are `ZERO`.
      group_of: Group of each input; None: groups are neighbouring inputs.
    """

    words: Int32[np.ndarray, "outputs words"]
    scales: Shaped[np.ndarray, "outputs groups"]
    zeros: UInt8[np.ndarray, "outputs groups"] | None
    group_of: Int32[np.ndarray, " inputs"] | None


@dataclass(frozen=True)
class Int4Encoding:
    """Encoding of INT4 tensors; see `TensorEncoding`.

    Attributes:
      group: Neighbouring inputs with a scale; None for a whole row.
      scale_type: Type of the scales in a file.
      has_zeros: True if zero points are stored.
      is_permuted: True if the inputs of a group are no neighbours (activation order).
    """

    group: int | None
    scale_type: str
    has_zeros: bool
    is_permuted: bool = False
    name = INT4
    init = INT4_INIT

    @property
    def of_dummies(self) -> Self:
        """Encoding of dummy weights: groups are neighbouring inputs."""
        return replace(self, is_permuted=False)

    def is_usual(self, name: str) -> bool:
        """Returns True if INT4 releases quantise a tensor of this name."""
        return fp8.is_quantised(name)

    def num_bytes(self, shape: tuple[int, ...]) -> int:
        """Returns the bytes of a weight of a shape."""
        scales = math.prod(scale_shape(shape, self.group))
        return math.prod(shape) // 2 + 2 * scales + self.has_zeros * scales // 2

    def scaled_dummy(
        self, parameter: Parameter, elements: Float32[np.ndarray, "..."]
    ) -> Float32[np.ndarray, "..."]:
        """Multiplies the elements of a dummy parameter by their scales."""
        scales = dummy_scales(parameter, self.group)
        return elements * spread(scales, elements.shape[-1])


def scale_shape(shape: tuple[int, ...], group: int | None) -> tuple[int, ...]:
    """Returns the shape of the scales of a weight or of a stack of weights."""
    return (*shape[:-1], 1 if group is None else -(-shape[-1] // group))


def spread(
    scales: Shaped[np.ndarray, "*stack groups"], inputs: int
) -> Shaped[np.ndarray, "*stack columns"]:
    """Repeats scales for the inputs of their groups; those of whole rows remain one column."""
    groups = scales.shape[-1]
    return scales if groups == 1 else np.repeat(scales, -(-inputs // groups), axis=-1)[..., :inputs]


def dequantize(
    codes: UInt8[np.ndarray, "*stack K"],
    scales: Shaped[np.ndarray, "*stack groups"],
    zeros: UInt8[np.ndarray, "*stack groups"] | None,
) -> Float32[np.ndarray, "*stack K"]:
    """Computes (code - zero point) times scale."""
    inputs, middle = codes.shape[-1], ZERO if zeros is None else spread(zeros, codes.shape[-1])
    numbers = codes.astype(np.float32) - np.asarray(middle, np.float32)
    return numbers * spread(scales.astype(np.float32), inputs)


def dummy_scales(parameter: Parameter, group: int | None) -> Float32[np.ndarray, "..."]:
    """Returns the scales of an INT4 parameter according to `init_of`, exact in bfloat16."""
    whole = parameter.whole or parameter
    shape = scale_shape(whole.shape, group)
    own = replace(whole, name=f"{whole.name}_scales", shape=shape)
    step = np.float32(init_of(whole).step * SCALE_STEP)
    return shard_array(parameter, fp8.rounded(parameter_array(own, SIZES_LAW) * step))
