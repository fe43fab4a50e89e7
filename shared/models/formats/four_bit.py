"""Weights of four bits in memory: eight codes in an int32, in the order in which kernels read them.

Inputs are packed in blocks of 256, or of 128 if their number is no multiple of 256. Bits 4 i to
4 i + 3 of element j of a block are input `block / 8` i + j. The bits 4 i of all elements of a block
are therefore neighbouring inputs, and eight products follow the order of the inputs. The last block
is filled with zeros.
"""

import numpy as np
from jaxtyping import Int32, UInt8

PARTS = 8
"""Codes of an int32, and parts of a block."""
BLOCKS = (256, 128)
"""Inputs of a block: the first that divides the number of inputs, or the last."""


def block_of(inputs: int) -> int:
    """Returns the inputs of a block of a weight."""
    return next((block for block in BLOCKS if inputs % block == 0), BLOCKS[-1])


def padded(inputs: int) -> int:
    """Returns the inputs of a weight in whole blocks."""
    block = block_of(inputs)
    return -(-inputs // block) * block


def pack(codes: UInt8[np.ndarray, "*stack N K"]) -> Int32[np.ndarray, "*stack N words"]:
    """Packs codes below 16 in blocks of inputs."""
    *stack, inputs = codes.shape
    spare = [(0, 0)] * len(stack) + [(0, padded(inputs) - inputs)]
    width = block_of(inputs) // PARTS
    blocks = np.pad(codes, spare).reshape((*stack, -1, PARTS, width))
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
