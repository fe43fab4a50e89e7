"""FP8 activations (W8A8): dynamic quantisation of rows; same as `shared.spec.fp8_activations`."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Float8e4m3fn, Float32
from torch import Tensor
from torch.nn import functional

from shared.models.formats.fp8 import BLOCK, OF_LARGEST
from torch_impl.ops.gemm import layers


class Quantised(NamedTuple):
    """Rows quantised to e4m3."""

    codes: Float8e4m3fn[Tensor, "R inputs"]
    scales: Float32[Tensor, "R blocks"]


def quantised(x: Float[Tensor, "R inputs"]) -> Quantised:
    blocks = _in_blocks(x.float())
    scales = blocks.abs().amax(2) * OF_LARGEST
    scales = torch.where(scales == 0, 1.0, scales)
    codes = (blocks / scales[:, :, None]).to(torch.float8_e4m3fn)
    return Quantised(codes.flatten(1)[:, : x.shape[1]], scales)


def product(
    x: Quantised,
    codes: Float8e4m3fn[Tensor, "outputs inputs"],
    scales: Float32[Tensor, "outputs blocks"],
) -> Float32[Tensor, "R outputs"]:
    """Same as the specification, but scales multiply quantised values before the sums."""
    return layers.linear(numbers(*x), numbers(codes, scales))


def numbers(
    codes: Float8e4m3fn[Tensor, "R inputs"], scales: Float32[Tensor, "R blocks"]
) -> Float32[Tensor, "R inputs"]:
    """Dequantises values with their scales."""
    across = scales.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return codes.float() * across


def _in_blocks(x: Float32[Tensor, "R inputs"]) -> Float32[Tensor, "R blocks block"]:
    padded = functional.pad(x, (0, -x.shape[1] % BLOCK))
    return padded.unflatten(1, (-1, BLOCK))
