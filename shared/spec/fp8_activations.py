"""W8A8 FP8 matrix product: dynamic per-block activation quantisation with block-scaled weights.

Checkpoints with FP8 weights and dynamic activations are meant for products of FP8 values. Each row
is quantised in blocks of inputs. The product of each block is accumulated before both scales
multiply it. The results differ from those of dequantised weights (W8A16): quantised activations
have errors of a few hundredths of a result, dequantised weights of a few thousandths.

Source: DeepSeek-V3, arXiv:2412.19437, section 3.3.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Float32, UInt8

from shared.models.formats.fp8 import BLOCK, OF_LARGEST, VALUES, quantize


class Quantised(NamedTuple):
    """Rows quantised to e4m3.

    Attributes:
      codes: FP8 values.
      scales: Scale of each block of 128 inputs; the last block may be smaller.
    """

    codes: UInt8[np.ndarray, "R inputs"]
    scales: Float32[np.ndarray, "R blocks"]


def quantised(x: Float[np.ndarray, "R inputs"]) -> Quantised:
    """Quantises each row to FP8, rounding to nearest, ties to even.

    A scale is the absolute maximum of its block times `OF_LARGEST`, or 1 if that is 0. A non-finite
    row has NaN values.
    """
    blocks = _in_blocks(x.astype(np.float32))
    with np.errstate(invalid="ignore"):
        scales = np.abs(blocks).max(axis=2) * np.float32(OF_LARGEST)
        scales = np.where(scales == 0, np.float32(1), scales)
        codes = quantize(blocks / scales[:, :, None])
    return Quantised(codes.reshape(len(x), -1)[:, : x.shape[1]], scales)


def product(
    x: Quantised,
    codes: UInt8[np.ndarray, "outputs inputs"],
    scales: Float32[np.ndarray, "outputs blocks"],
) -> Float32[np.ndarray, "R outputs"]:
    """Multiplies FP8 rows and weights: block products times both scales, added in the order of
    blocks.

    Args:
      x: Quantised rows.
      codes: FP8 weight.
      scales: Scale of each output and block of its inputs.
    """
    rows, weight = (_in_blocks(VALUES[each]) for each in (x.codes, codes))
    out = np.zeros((len(rows), len(weight)), np.float32)
    for block in range(rows.shape[1]):
        both = np.outer(x.scales[:, block], scales[:, block])
        out += rows[:, block] @ weight[:, block].T * both
    return out


def _in_blocks(x: Float32[np.ndarray, "R inputs"]) -> Float32[np.ndarray, "R blocks block"]:
    """Splits rows into blocks, with zero padding in the last block."""
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
    return padded.reshape(len(x), -1, BLOCK)
