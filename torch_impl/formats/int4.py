"""INT4 weights on a device, packed as in `shared.models.formats.int4_w4a16`."""

import torch
from jaxtyping import Float, Float32, Int, Int32
from torch import Tensor

from shared.models.formats.four_bit import filled
from shared.models.formats.int4_encoding import INT4_INIT, ZERO, Int4Encoding, dummy_scales
from shared.models.formats.int4_w4a16 import Int4W4A16, scale_words
from shared.models.formats.weight_format import SCALES, VALUES, FormatOps, Planes
from shared.models.parameter import Parameter
from torch_impl.dummy_weights import top_bits
from torch_impl.formats import four_bit


def dequantized(planes: Planes) -> Float[Tensor, "*experts outputs inputs"]:
    codes, scales = four_bit.unpacked(planes[VALUES]).float(), planes[SCALES]
    if scales.dtype != torch.int32:
        return ((codes - ZERO) * _spread(scales.float(), codes)).bfloat16()
    numbers = codes - _spread((scales & 15).float(), codes)
    return (numbers * _spread(_scales_of(scales), codes)).bfloat16()


def _scales_of(words: Int32[Tensor, "..."]) -> Float32[Tensor, "..."]:
    upper, rest = words & -0x10000, (words & 0xFFF0) << 16
    return upper.view(torch.float32) + rest.view(torch.float32)


def _spread(x: Float32[Tensor, "*stack groups"], codes: Tensor) -> Float32[Tensor, "*stack K"]:
    return x.repeat_interleave(codes.shape[-1] // x.shape[-1], -1)


def dummy(parameter: Parameter, format: Int4W4A16, device: torch.device) -> Planes:
    """Generates packed codes and their scales."""
    scales = dummy_scales(parameter, format.group)
    scales = scale_words(scales, None) if format.has_words else scales
    plane = format.planes(parameter.shape)[SCALES]
    stored = torch.from_numpy(filled(scales, plane.shape[-1]))
    return {
        VALUES: four_bit.dummy(parameter, codes, device),
        SCALES: stored.to(device, getattr(torch, plane.dtype)),
    }


def codes(key: Int[Tensor, ""], places: Int[Tensor, " places"]) -> Int[Tensor, " places"]:
    """Returns the codes of the numbers that `elements` computes for `INT4_INIT`."""
    return top_bits(INT4_INIT, key, places)


def scaled(
    numbers: Float[Tensor, "*stack N K"], parameter: Parameter, encoding: Int4Encoding
) -> Float[Tensor, "*stack N K"]:
    """Multiplies dummy codes minus `ZERO` by their scales, in place."""
    scales = torch.from_numpy(dummy_scales(parameter, encoding.group))
    scales = scales.to(numbers.device, numbers.dtype)
    width = -(-numbers.shape[-1] // scales.shape[-1])
    for number in range(scales.shape[-1]):
        columns = slice(number * width, (number + 1) * width)
        numbers[..., columns].mul_(scales[..., number : number + 1])
    return numbers


W4A16 = FormatOps(dequantized=dequantized, converted=four_bit.packed, dummy=dummy)
