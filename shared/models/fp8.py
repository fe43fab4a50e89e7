"""Weights in FP8, as DeepSeek's and Qwen's releases store them, and how they are widened.

A weight is a code of eight bits, e4m3: a sign, four bits of exponent and three of mantissa, without
infinities. A block of 128 x 128 weights shares one scale, and the last block of a row or a column
may be smaller. The scales of a tensor `X.weight` are the tensor `X.weight_scale_inv` beside it,
those of stacked experts `X` are `X_scale_inv`: which tensors are stored so is told by their scales
alone. A weight is its code times its scale; the product is float32, and is rounded once, to the
type that the model runs in. Rows are quantised where a start asks for it alone, see
`shared.spec.fp8_activations`.
"""

from collections.abc import Mapping

import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from shared.models.fields import Json

BLOCK = 128
SCALE = "_scale_inv"
"""Ends the name of a tensor's scales, behind the name of the tensor."""

LARGEST = 448.0
"""The largest number that a code stands for."""
OF_LARGEST = float(np.float32(1 / LARGEST))
"""What the largest number of a block of rows is multiplied by for its scale. A division by
`LARGEST` would be rounded otherwise, and some compilers make this product of it."""
STORED = "F8_E4M3"
"""What a safetensors file calls the type of the codes."""

SERVED: Mapping[str, object] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "weight_block_size": [BLOCK, BLOCK],
    "activation_scheme": "dynamic",
}
REQUIRED = ("quant_method", "weight_block_size")
HINTS = ("modules_to_not_convert", "ignored_layers")
"""Lists of modules without scales, which releases spell in many ways; the tensors say it too."""


QUANTISED = ("_proj", "in_proj_qkv", "in_proj_z")
"""Ends of the names of modules that releases in FP8 quantise."""


_NAN = 0x7F
"""The code without its sign that is no number."""


def _values() -> Float32[np.ndarray, " codes"]:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    size = np.ldexp(mantissa + 8.0 * (exponent > 0), np.maximum(exponent, 1) - 10)
    size[codes & _NAN == _NAN] = np.nan
    return np.where(codes < 128, size, -size).astype(np.float32)


VALUES = _values()
"""What each code means."""


def refuse_other_quantisation(quantisation: Json) -> None:
    """Refuses a `quantization_config` that asks for another form of weights.

    Raises:
      ValueError: It does; one sentence that names the field.
    """
    for field in REQUIRED:
        if field not in quantisation:
            raise ValueError(
                f"quantization_config without {field} is not supported; "
                "use an unquantised checkpoint, or FP8 in blocks"
            )
    for field, value in quantisation.items():
        served = SERVED.get(field)
        if field in HINTS or value == served or (field not in SERVED and not value):
            continue
        expected = f"; it must be {served}" if field in SERVED else ""
        raise ValueError(
            f"quantization_config with {field}: {value!r} is not supported{expected}; "
            "use an unquantised checkpoint, or FP8 in blocks"
        )


def is_quantised(name: str) -> bool:
    """Whether releases in FP8 have a tensor of this name so.

    They have the projections of mixers, MLPs and experts, and not those that are few rows, which
    give gates and decays; nor embeddings, heads and routers.
    """
    return name.removesuffix(".weight").endswith(QUANTISED)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the scales of a weight, or of a stack of weights."""
    *stack, rows, columns = shape
    return (*stack, -(-rows // BLOCK), -(-columns // BLOCK))


def are_whole_blocks(shape: tuple[int, ...]) -> bool:
    """Whether no block of a weight is smaller than the others."""
    return shape[-2] % BLOCK == 0 and shape[-1] % BLOCK == 0


def scales_of_outputs(
    scales: Shaped[np.ndarray, "*stack blocks blocks_in"], outputs: int
) -> Shaped[np.ndarray, "*stack outputs blocks_in"]:
    """The scales of each output of a weight, or of a stack of weights."""
    return np.repeat(scales, BLOCK, axis=-2)[..., :outputs, :]


def place_of_scales(
    place: tuple[int | slice, ...], shape: tuple[int, ...]
) -> tuple[int | slice, ...]:
    """Where the scales of a part of a parameter stand among those of the whole.

    Args:
      place: Of the part, which has whole blocks.
      shape: Of the parameter.
    """
    *outer, last = place
    if len(place) < len(shape) - 1 or isinstance(last, int):
        return place
    return (*outer, slice(last.start // BLOCK, last.stop // BLOCK))


def encoded(x: Float32[np.ndarray, "..."]) -> UInt8[np.ndarray, "..."]:
    """The code of the nearest number, of two the even one; the largest where a number is larger."""
    positive = VALUES[:_NAN]
    between = (positive[:-1] + positive[1:]) / 2
    size = np.abs(x)
    codes = np.searchsorted(between, size)
    is_halfway = np.append(between, np.inf)[codes] == size
    codes = np.where(np.isnan(x), _NAN, codes + (is_halfway & (codes % 2 == 1)))
    return (codes + 0x80 * np.signbit(x)).astype(np.uint8)


def has_nan(codes: UInt8[np.ndarray, "..."]) -> bool:
    """Whether a code is no number: all bits below the sign are set."""
    return bool(((codes & _NAN) == _NAN).any())


def widened(
    codes: UInt8[np.ndarray, "*stack rows columns"],
    scales: Shaped[np.ndarray, "*stack row_blocks column_blocks"],
) -> Float32[np.ndarray, "*stack rows columns"]:
    """Each code times the scale of its block."""
    return scaled(VALUES[codes], scales)


def scaled(
    wide: Float32[np.ndarray, "*stack rows columns"],
    scales: Shaped[np.ndarray, "*stack row_blocks column_blocks"],
) -> Float32[np.ndarray, "*stack rows columns"]:
    """The numbers of codes, each times the scale of its block; in their own memory."""
    across = np.repeat(scales.astype(np.float32), BLOCK, axis=-1)[..., : wide.shape[-1]]
    for block in range(scales.shape[-2]):
        wide[..., block * BLOCK : (block + 1) * BLOCK, :] *= across[..., block : block + 1, :]
    return wide
