"""FP8 weights as kernels read them: e4m3 codes in words of four, and the scales beside them.

An FP8 weight has one scale for each block of 128 outputs and 128 inputs, `[outputs / 128,
inputs / 128]`, or one for each output, `[outputs, 1]`: their shape says which. A scale of a whole
tensor is repeated for each of its outputs. The number that a code stands for is that of the code
times its scale, rounded once to bfloat16.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32, Shaped, UInt8

from shared.models import fp8
from shared.models.fp8 import Granularity

InWords = Mapping[str, Granularity]
"""Parameters that stay FP8, by name, and whether their scales are of blocks or of channels."""

FP8_BLOCK = fp8.BLOCK
"""Inputs whose codes lie together; outputs and inputs that share a scale of a block."""
SCALE_FACTOR = 2.0**120
"""A kernel moves a code's bits into those of a bfloat16, which makes its number 2^-120 of what it
is. Scales are kept larger by as much; the product is rounded as if both were as they should be."""
SCALES = "_scales"
"""Ends the name of a parameter's scales, behind the name of the parameter."""
DENSE = ("mlp.gate_up",)
EXPERTS = ("experts.gate_up", "experts.down")
KEPT = (*DENSE, *EXPERTS)
"""What the names of parameters end in that stay FP8 on a GPU.

A kernel widens a weight in registers, to the bits that it would read of a widened one: so each
parameter lies as is faster, or as there is room for. All others are widened as they are read: where
outputs are few, a program has long chains and little to hide their widening behind.
"""
_LARGEST_SCALE = 2.0**7
"""From here on a scale times `SCALE_FACTOR` would be infinite."""
_PARTS = 4


class Piece(NamedTuple):
    """A part of a parameter that stays FP8.

    Attributes:
      place: In the parameter.
      codes: Its codes, in the order of the inputs.
      place_of_scales, scales: Its scales as they are stored, and their place.
    """

    place: tuple[int | slice, ...]
    codes: UInt8[np.ndarray, "..."]
    place_of_scales: tuple[int | slice, ...]
    scales: Float32[np.ndarray, "..."]


class Shares(NamedTuple):
    """How many outputs share a scale, and how many scales an output has along its inputs.

    Scales are of blocks, or one is an output's alone.
    """

    outputs: int
    scales_in: int


def shares_of(words: tuple[int, ...], scales: tuple[int, ...]) -> Shares:
    """Of a weight, or of a stack of weights, by the shapes of its words and of its scales."""
    return Shares(words[-2] // scales[-2], scales[-1])


def stays_fp8(name: str) -> bool:
    """Whether kernels read a parameter of this name as FP8, where it is stored so."""
    return name.endswith(KEPT)


def shape_of_words(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of the words that a weight of this shape lies in."""
    return (*shape[:-1], shape[-1] // _PARTS)


def bytes_of_words(shape: tuple[int, ...], granularity: Granularity) -> int:
    """Of a weight of this shape, with its scales."""
    return math.prod(shape) + 2 * math.prod(fp8.scale_shape(shape, granularity))


def kept_granularity(stored: Granularity) -> Granularity:
    """Of the scales that kernels read, for those of a file."""
    return Granularity.CHANNEL if stored is Granularity.TENSOR else stored


def bytes_of_codes(shape: tuple[int, ...], *, by_output: bool) -> int:
    """Of a weight of this shape as codes, with the scales of each output or of blocks of them."""
    return math.prod(shape) + 4 * math.prod(fp8.code_scale_shape(shape, by_output=by_output))


def packed(codes: UInt8[np.ndarray, "*stack N K"]) -> Int32[np.ndarray, "*stack N words"]:
    """Puts four codes of a row into each word, the first in its lowest byte.

    Byte i of word j of a block of 128 inputs is input 32 i + j: the bytes i of all words of a block
    are 32 inputs in their order, so that four products of 32 follow the order of the inputs.

    Raises:
      ValueError: The inputs are not whole blocks, or a code is no number.
    """
    *stack, outputs, inputs = codes.shape
    if inputs % FP8_BLOCK:
        raise ValueError(f"inputs must be a multiple of {FP8_BLOCK}, got {inputs}")
    if fp8.has_nan(codes):
        raise ValueError("a code of an FP8 weight must be a number, got NaN")
    blocks = codes.reshape(*stack, outputs, -1, _PARTS, FP8_BLOCK // _PARTS)
    words = np.ascontiguousarray(blocks.swapaxes(-1, -2)).view("<i4")
    return words.astype(np.int32, copy=False).reshape(*stack, outputs, inputs // _PARTS)


def unpacked(words: Int32[np.ndarray, "*stack N words"]) -> UInt8[np.ndarray, "*stack N K"]:
    """The codes in the order of the inputs, as they were before `packed`."""
    *stack, outputs, count = words.shape
    blocks = words.astype("<i4").view(np.uint8)
    blocks = blocks.reshape(*stack, outputs, -1, FP8_BLOCK // _PARTS, _PARTS)
    return blocks.swapaxes(-1, -2).reshape(*stack, outputs, count * _PARTS)


def widened(
    words: Int32[np.ndarray, "*stack N words"],
    scales: Shaped[np.ndarray, "*stack scales scales_in"],
) -> Float32[np.ndarray, "*stack N K"]:
    """The numbers that words and their scales stand for; each is one of bfloat16."""
    own = scales.astype(np.float32) / np.float32(SCALE_FACTOR)
    return rounded(fp8.widened(unpacked(words), own))


def first_scale(first: int, outputs: int, scales: int) -> int:
    """The scale that begins at an output.

    Args:
      outputs, scales: Of the whole weight; the scales of one of its inputs.

    Raises:
      ValueError: None does, and the scales of a weight that begins there would not be its own.
    """
    share = outputs // scales
    if first % share:
        raise ValueError(
            f"the first output of an FP8 weight must be a multiple of {share}, got {first}"
        )
    return first // share


def packed_scales(scales: Shaped[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Scales as kernels read them, which take them in bfloat16.

    Raises:
      ValueError: A scale is no number of bfloat16.
    """
    if not are_in_bfloat16(scales):
        raise ValueError("scales must be numbers of bfloat16")
    return scales.astype(np.float32) * np.float32(SCALE_FACTOR)


def are_in_bfloat16(scales: Shaped[np.ndarray, "..."]) -> bool:
    """Whether bfloat16 holds all scales, and as much larger as kernels read them."""
    wide = scales.astype(np.float32)
    is_inside = np.abs(wide) < _LARGEST_SCALE
    return bool((is_inside & (rounded(wide) == wide)).all())


def rounded(x: Float32[np.ndarray, "..."]) -> Float32[np.ndarray, "..."]:
    """Finite numbers rounded to the nearest of bfloat16, of two to the even one."""
    bits = x.view(np.uint32)
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return ((bits + half) & np.uint32(0xFFFF0000)).view(np.float32)
