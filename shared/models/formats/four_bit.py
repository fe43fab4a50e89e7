"""Weights of four bits in memory: eight codes in an int32, in the order in which kernels read them.

The inputs are filled with zeros to a multiple of 128, and packed in blocks of 256, or of 128 if
256 does not divide the multiple. Bits 4 i to 4 i + 3 of element j of a block are input
`block / 8` i + j. The bits 4 i of all elements of a block are therefore neighbouring inputs, and
eight products follow the order of the inputs.
"""

import numpy as np
from jaxtyping import Int32, Shaped, UInt8

PARTS = 8
"""Codes of an int32, and parts of a block."""
BLOCKS = (256, 128)
"""Inputs of a block: the first that divides the inputs of a weight in whole blocks."""


def block_of(inputs: int) -> int:
    """Returns the inputs of a block of a weight."""
    return next(block for block in BLOCKS if padded(inputs) % block == 0)


def padded(inputs: int) -> int:
    """Returns the inputs of a weight in whole blocks."""
    return -(-inputs // BLOCKS[-1]) * BLOCKS[-1]


def filled(
    values: Shaped[np.ndarray, "*stack columns"], columns: int
) -> Shaped[np.ndarray, "*stack all_columns"]:
    """Fills rows with zeros."""
    spare = columns - values.shape[-1]
    return np.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, spare)]) if spare else values


def pack(codes: UInt8[np.ndarray, "*stack N K"]) -> Int32[np.ndarray, "*stack N words"]:
    """Packs codes below 16 in blocks of inputs."""
    *stack, inputs = codes.shape
    width = block_of(inputs) // PARTS
    blocks = filled(codes, padded(inputs)).reshape((*stack, -1, PARTS, width))
    pairs = blocks[..., ::2, :] | blocks[..., 1::2, :] << 4
    words = np.ascontiguousarray(pairs.swapaxes(-1, -2)).view("<i4")
    return words.astype(np.int32, copy=False).reshape((*stack, -1))


def unpack(words: Int32[np.ndarray, "*stack N words"]) -> UInt8[np.ndarray, "*stack N K"]:
    """Returns the codes of whole blocks in the order of the inputs; the inverse of `pack`."""
    *stack, count = words.shape
    width = block_of(PARTS * count) // PARTS
    pairs = words.astype("<i4").view(np.uint8).reshape((*stack, -1, width, PARTS // 2))
    pairs = pairs.swapaxes(-1, -2)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-2)  # [.., pair, code of the pair, width]
    return codes.reshape((*stack, PARTS * count))


def unpack_in_order(words: Int32[np.ndarray, "*stack words"]) -> UInt8[np.ndarray, "*stack codes"]:
    """Returns the codes of elements that contain eight neighbours each, the first in the lowest
    bits, as most checkpoints store them.
    """
    pairs = np.ascontiguousarray(words).astype("<i4").view(np.uint8)
    codes = np.stack([pairs & 15, pairs >> 4], axis=-1)
    return codes.reshape((*words.shape[:-1], -1))
