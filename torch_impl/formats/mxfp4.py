"""MXFP4 weights on a device, packed as in `shared.models.formats.mxfp4`."""

import torch
from jaxtyping import Float, Float32, Int, Int32, Shaped
from torch import Tensor

from shared.models.formats.four_bit import filled
from shared.models.formats.mxfp4 import (
    EXPONENT_SHIFT,
    GROUP,
    MXFP4_INIT,
    MXFP4W4A16,
    NUMBERS,
    MXFP4Encoding,
    dummy_exponents,
)
from shared.models.formats.weight_format import SCALES, VALUES, FormatOps, Planes
from shared.models.parameter import Parameter
from torch_impl.dummy_weights import top_bits
from torch_impl.formats import four_bit


def dequantized(planes: Planes) -> Float[Tensor, "*experts outputs columns"]:
    numbers = _numbers_of(four_bit.unpacked(planes[VALUES]))
    return _times_powers(numbers, planes[SCALES].int() - EXPONENT_SHIFT).bfloat16()


def _numbers_of(codes: Shaped[Tensor, "..."]) -> Float32[Tensor, "..."]:
    return torch.from_numpy(NUMBERS).to(codes.device)[codes.int()]


def _times_powers(
    numbers: Float32[Tensor, "*stack K"], exponents: Int32[Tensor, "*stack groups"]
) -> Float32[Tensor, "*stack K"]:
    across = exponents.repeat_interleave(GROUP, -1)[..., : numbers.shape[-1]]
    return torch.ldexp(numbers, across - 127)


def dummy(parameter: Parameter, format: MXFP4W4A16, device: torch.device) -> Planes:
    """Generates packed codes and their scales."""
    columns = format.planes(parameter.shape)[SCALES].shape[-1]
    exponents = filled(dummy_exponents(parameter) + EXPONENT_SHIFT, columns)
    return {
        VALUES: four_bit.dummy(parameter, codes, device),
        SCALES: torch.from_numpy(exponents).to(device),
    }


def codes(key: Int[Tensor, ""], places: Int[Tensor, " places"]) -> Int[Tensor, " places"]:
    """Returns the codes of the numbers that `elements` computes for `MXFP4_INIT`."""
    return top_bits(MXFP4_INIT, key, places)


def scaled(
    numbers: Float[Tensor, "*stack N K"], parameter: Parameter, encoding: MXFP4Encoding
) -> Float[Tensor, "*stack N K"]:
    """Replaces dummy codes by their numbers times scales, layer by layer in place."""
    exponents = torch.from_numpy(dummy_exponents(parameter)).to(numbers.device).int()
    for layer, own in zip(numbers, exponents, strict=True):
        layer.copy_(_times_powers(_numbers_of(layer), own))
    return numbers


W4A16 = FormatOps(dequantized=dequantized, converted=four_bit.packed, dummy=dummy)
