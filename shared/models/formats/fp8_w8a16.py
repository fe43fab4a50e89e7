"""Packed FP8 (W8A16): e4m3 weights packed four to an int32, as kernels read them, with scales.

The scales are per block of 128 outputs and 128 inputs, shape `[outputs / 128, inputs / 128]`, or
per output, shape `[outputs, 1]`; the shape determines which. A per-tensor scale is repeated for
each output. A dequantised weight is its value times its scale, rounded once to bfloat16.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Shaped, UInt8

from shared.models.formats import fp8
from shared.models.formats.fp8 import Granularity
from shared.models.parameter import CheckpointTensor

InWords = Mapping[str, Granularity]
"""Parameters stored as packed FP8, by name, with the granularity of their scales (block or
channel)."""

FP8_BLOCK = fp8.BLOCK
"""Inputs whose values are packed together; outputs and inputs that share a block scale."""
SCALE_FACTOR = 2.0**120
"""Factor of stored scales. A kernel moves the bits of an FP8 value into a bfloat16, which makes the
value 2^-120 of what it is; the larger scales compensate. The product is rounded as if both had
their true size."""
SCALES = "_scales"
"""Suffix of the name of a parameter's scales."""
DENSE = ("mlp.gate_up",)
EXPERTS = ("experts.gate_up", "experts.down")
KEPT = (*DENSE, *EXPERTS)
"""Suffixes of the names of parameters that are stored as packed FP8 on a GPU.

A kernel dequantises a weight in registers to the same bits as a dequantised weight in memory, so
the choice per parameter affects speed and memory only. All other parameters are dequantised when
loaded: with few outputs, a GPU program has long dependency chains and little work to hide
dequantisation behind.
"""
_LARGEST_SCALE = 2.0**7
"""From this value on, a scale times `SCALE_FACTOR` would overflow."""
_PARTS = 4


class FP8Shard(NamedTuple):
    """A slice of a parameter that is stored as FP8.

    Attributes:
      place: Index of the slice in the parameter.
      codes: FP8 values in the order of the inputs.
      place_of_scales, scales: Index of the scales, and the scales as stored.
    """

    place: tuple[int | slice, ...]
    codes: UInt8[np.ndarray, "..."]
    place_of_scales: tuple[int | slice, ...]
    scales: Float32[np.ndarray, "..."]


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
    return ScaleLayout(words[-2] // scales[-2], scales[-1])


def is_kept_fp8(name: str) -> bool:
    """Returns True if kernels read a parameter of this name as packed FP8."""
    return name.endswith(KEPT)


def shape_of_words(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the packed shape of a weight."""
    return (*shape[:-1], shape[-1] // _PARTS)


def bytes_of_words(shape: tuple[int, ...], granularity: Granularity) -> int:
    """Returns the bytes of a packed weight of this shape with its scales."""
    return math.prod(shape) + 2 * math.prod(fp8.scale_shape(shape, granularity))


def has_whole_blocks(source: CheckpointTensor, granularity: Granularity) -> bool:
    """Returns whether the shard that a rank takes of a tensor consists of whole blocks."""
    is_cut = granularity is Granularity.BLOCK and not source.takes_whole(fp8.BLOCK)
    return fp8.are_whole_blocks(source.shape) and not is_cut


def kept_granularity(stored: Granularity) -> Granularity:
    """Returns the granularity that kernels read, for the granularity in a file."""
    return Granularity.CHANNEL if stored is Granularity.TENSOR else stored


def bytes_of_codes(shape: tuple[int, ...], *, by_output: bool) -> int:
    """Returns the bytes of an FP8 weight of this shape with scales per output or per block of
    outputs.
    """
    return math.prod(shape) + 4 * math.prod(fp8.code_scale_shape(shape, by_output=by_output))


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
    return rounded(fp8.dequantize(unpack(words), own))


def first_scale(first: int, outputs: int, scales: int) -> int:
    """Returns the index of the scale that starts at an output.

    Args:
      first: The output.
      outputs, scales: Size of the whole weight; number of its scales along the outputs.

    Raises:
      ValueError: No scale starts there, so that a weight sliced there would share one with another
        slice.
    """
    share = outputs // scales
    if first % share:
        raise ValueError(
            f"the first output of an FP8 weight must be a multiple of {share}, got {first}"
        )
    return first // share


def packed_scales(scales: Shaped[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Returns scales as kernels read them, in bfloat16 precision and multiplied by `SCALE_FACTOR`.

    Raises:
      ValueError: A scale is not exact in bfloat16.
    """
    if not are_in_bfloat16(scales):
        raise ValueError("scales must be exact in bfloat16")
    return scales.astype(np.float32) * np.float32(SCALE_FACTOR)


def are_in_bfloat16(scales: Shaped[np.ndarray, "..."]) -> bool:
    """Returns True if all scales are exact in bfloat16, also after multiplication by
    `SCALE_FACTOR`.
    """
    wide = scales.astype(np.float32)
    is_inside = np.abs(wide) < _LARGEST_SCALE
    return bool((is_inside & (rounded(wide) == wide)).all())


def rounded(x: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Rounds finite values to the nearest bfloat16, ties to even."""
    bits = x.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) & np.uint32(0xFFFF0000)).view(np.float32)
