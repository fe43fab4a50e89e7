"""Weights in FP8, as releases store them, and how they are widened.

A weight is a code of eight bits, e4m3: a sign, four bits of exponent and three of mantissa, without
infinities. Weights share scales: those of a block of 128 x 128, as in DeepSeek's and Qwen's
releases, where the last block of a row or a column may be smaller; those of an output, or all of a
tensor, as vLLM's tools, AutoFP8 and Mistral store them. The scales of a tensor `X.weight` are the
tensor `X.weight_scale_inv` or `X.weight_scale` beside it, those of stacked experts `X` are
`X_scale_inv` or `X_scale`. Which tensors are FP8 is told by their scales alone, and which weights
share a scale by the shape of the scales.

A weight is its code times its scale; the product is float32, and is rounded once, to the type that
the model runs in. Rows are quantised where a start asks for it alone, see
`shared.spec.fp8_activations`; scales of activations that files may have are not needed.
"""

from enum import Enum

import numpy as np
from jaxtyping import Float32, Shaped, UInt8

BLOCK = 128
SCALES = ("_scale_inv", "_scale")
"""End the names of a tensor's scales, behind the name of the tensor."""

OF_ACTIVATIONS = ("input_scale", "activation_scale")
"""Tensors beside a weight that nothing here needs: scales of what it is multiplied with."""

LARGEST = 448.0
"""The largest number that a code stands for."""
OF_LARGEST = float(np.float32(1 / LARGEST))
"""What the largest number of a block of rows is multiplied by for its scale. A division by
`LARGEST` would be rounded otherwise, and some compilers make this product of it."""
STORED = "F8_E4M3"
"""What a safetensors file calls the type of the codes."""

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


class Granularity(Enum):
    """Which weights share a scale, as compressed-tensors calls it."""

    BLOCK = "block"
    CHANNEL = "channel"
    TENSOR = "tensor"


def is_quantised(name: str) -> bool:
    """Whether releases in FP8 have a tensor of this name so.

    They have the projections of mixers, MLPs and experts, and not those that are few rows, which
    give gates and decays; nor embeddings, heads and routers.
    """
    return name.removesuffix(".weight").endswith(QUANTISED)


def scale_shape(shape: tuple[int, ...], granularity: Granularity) -> tuple[int, ...]:
    """Of the scales of a weight, or of a stack of weights."""
    *stack, rows, columns = shape
    if granularity is Granularity.BLOCK:
        return (*stack, -(-rows // BLOCK), -(-columns // BLOCK))
    return (*stack, rows if granularity is Granularity.CHANNEL else 1, 1)


def stored_shapes(shape: tuple[int, ...]) -> dict[tuple[int, ...], Granularity]:
    """The shapes that a weight's scales may have in a file, and what each of them means.

    Where two are equal, what they mean is equal too. The one scale of a tensor may have any number
    of axes of 1.
    """
    found = {scale_shape(shape, each): each for each in reversed(Granularity)}
    stack = shape[:-2]
    return found | {(*stack, 1): Granularity.TENSOR, stack: Granularity.TENSOR}


def are_whole_blocks(shape: tuple[int, ...]) -> bool:
    """Whether no block of a weight is smaller than the others."""
    return shape[-2] % BLOCK == 0 and shape[-1] % BLOCK == 0


def code_scale_shape(shape: tuple[int, ...], *, by_output: bool) -> tuple[int, ...]:
    """Of the scales beside codes, of blocks, or repeated for each output of a block."""
    *stack, blocks, blocks_in = scale_shape(shape, Granularity.BLOCK)
    return (*stack, shape[-2] if by_output else blocks, blocks_in)


def scales_of_outputs(
    scales: Shaped[np.ndarray, "*stack blocks blocks_in"], outputs: int
) -> Shaped[np.ndarray, "*stack outputs blocks_in"]:
    """The scales of each output of a weight, or of a stack of weights."""
    return np.repeat(scales, BLOCK, axis=-2)[..., :outputs, :]


def place_of_scales(
    place: tuple[int | slice, ...], shape: tuple[int, ...], granularity: Granularity
) -> tuple[int | slice, ...]:
    """Where the scales of a part of a parameter stand among those of the whole.

    Args:
      place: Of the part, which has whole blocks.
      shape: Of the parameter.
      granularity: Of blocks or of channels.
    """
    *outer, last = place
    are_alike = granularity is Granularity.CHANNEL or len(place) < len(shape) - 1
    if are_alike or isinstance(last, int):
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


def spread(
    scales: Shaped[np.ndarray, "..."], shape: tuple[int, ...], granularity: Granularity
) -> Shaped[np.ndarray, "*stack scales scales_in"]:
    """Scales of a file for a weight of a shape, in a granularity that is theirs or finer."""
    stored = scale_shape(shape, stored_shapes(shape)[scales.shape])
    return np.broadcast_to(scales.reshape(stored), scale_shape(shape, granularity))


def has_nan(codes: UInt8[np.ndarray, "..."]) -> bool:
    """Whether a code is no number: all bits below the sign are set."""
    return bool(((codes & _NAN) == _NAN).any())


def widened(
    codes: UInt8[np.ndarray, "*stack rows columns"],
    scales: Shaped[np.ndarray, "..."],
) -> Float32[np.ndarray, "*stack rows columns"]:
    """Each code times its scale; see `scaled`."""
    return scaled(VALUES[codes], scales)


def scaled(
    wide: Float32[np.ndarray, "*stack rows columns"], scales: Shaped[np.ndarray, "..."]
) -> Float32[np.ndarray, "*stack rows columns"]:
    """The numbers of codes, each times its scale; in their own memory.

    Args:
      scales: Of one of `stored_shapes`.
    """
    granularity, scales = stored_shapes(wide.shape)[scales.shape], scales.astype(np.float32)
    if granularity is not Granularity.BLOCK:
        wide *= scales.reshape(scale_shape(wide.shape, granularity))
        return wide
    across = np.repeat(scales, BLOCK, axis=-1)[..., : wide.shape[-1]]
    for block in range(scales.shape[-2]):
        wide[..., block * BLOCK : (block + 1) * BLOCK, :] *= across[..., block : block + 1, :]
    return wide
