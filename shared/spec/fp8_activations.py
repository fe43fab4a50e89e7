"""Rows quantised to FP8, and their products with FP8 weights.

A file of FP8 weights that names dynamic activations asks for products of codes: each row is
quantised, its blocks of inputs apart, and the products of the codes of a block are added before
both scales multiply them. It is another model than that of the widened weights: quantised rows err
by a few hundredths of a result, widened weights by a few thousandths.

Source: DeepSeek-V3, arXiv:2412.19437, section 3.3.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, UInt8

from shared.models.fp8 import BLOCK, OF_LARGEST, VALUES, encoded


class Quantised(NamedTuple):
    """Rows as codes of e4m3.

    Attributes:
      scales: Of each block of 128 inputs; the last block may be smaller.
    """

    codes: UInt8[np.ndarray, "R inputs"]
    scales: Float32[np.ndarray, "R blocks"]


def quantised(x: Float[np.ndarray, "R inputs"]) -> Quantised:
    """The codes of each row, rounded to the nearest, of two to the even one.

    A scale is the largest of its block times `OF_LARGEST`, or 1 where that is 0. A row that is not
    finite has codes that are no numbers.
    """
    blocks = _in_blocks(x.astype(np.float32))
    with np.errstate(invalid="ignore"):
        scales = np.abs(blocks).max(axis=2) * np.float32(OF_LARGEST)
        scales = np.where(scales == 0, np.float32(1), scales)
        codes = encoded(blocks / scales[:, :, None])
    return Quantised(codes.reshape(len(x), -1)[:, : x.shape[1]], scales)


def product(
    x: Quantised,
    codes: UInt8[np.ndarray, "outputs inputs"],
    scales: Float32[np.ndarray, "outputs blocks"],
) -> Float32[np.ndarray, "R outputs"]:
    """The products of the codes of each block, times both scales, added in the order of blocks.

    Args:
      scales: Of each output and block of its inputs.
    """
    rows, weight = (_in_blocks(VALUES[each]) for each in (x.codes, codes))
    out = np.zeros((len(rows), len(weight)), np.float32)
    for block in range(rows.shape[1]):
        both = np.outer(x.scales[:, block], scales[:, block])
        out += rows[:, block] @ weight[:, block].T * both
    return out


def _in_blocks(x: Float32[np.ndarray, "R inputs"]) -> Float32[np.ndarray, "R blocks block"]:
    """With zeros behind a last block that is smaller."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
    return padded.reshape(len(x), -1, BLOCK)
