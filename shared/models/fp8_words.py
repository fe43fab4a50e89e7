"""FP8 weights as kernels read them: e4m3 codes in words of four, and the scales beside them.

An FP8 weight has one scale for each block of 128 outputs and 128 inputs. The number that a code
stands for is that of the code times its scale, rounded once to bfloat16.
"""

import ml_dtypes
import numpy as np
from jaxtyping import Int32, UInt8

FP8_BLOCK = 128
"""Outputs and inputs that share a scale."""
SCALE_FACTOR = 2.0**120
"""A kernel moves a code's bits into those of a bfloat16, which makes its number 2^-120 of what it
is. Scales are kept larger by as much; the product is rounded as if both were as they should be."""
_PARTS = 4


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
    if ((codes & 0x7F) == 0x7F).any():
        raise ValueError("a code of an FP8 weight must be a number, got NaN")
    blocks = codes.reshape(*stack, outputs, -1, _PARTS, FP8_BLOCK // _PARTS)
    words = np.ascontiguousarray(blocks.swapaxes(-1, -2)).view("<i4")
    return words.astype(np.int32, copy=False).reshape(*stack, outputs, inputs // _PARTS)


def packed_scales(scales: np.ndarray) -> np.ndarray:
    """Scales as kernels read them, in bfloat16.

    Raises:
      ValueError: A scale is no number of bfloat16.
    """
    kept = scales.astype(ml_dtypes.bfloat16)
    if (kept.astype(np.float32) != scales.astype(np.float32)).any():
        raise ValueError("scales must be numbers of bfloat16")
    return (kept.astype(np.float32) * np.float32(SCALE_FACTOR)).astype(ml_dtypes.bfloat16)
