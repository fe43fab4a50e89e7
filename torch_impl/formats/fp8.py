"""FP8 weights on a device, packed as in `shared.models.formats.fp8_w8a16`, or in input order."""

import torch
from jaxtyping import Float, Float8e4m3fn, Float32, Int, Int32, UInt8
from torch import Tensor
from torch.nn import functional

from shared.models.formats.fp8 import BLOCK, Granularity
from shared.models.formats.fp8_encoding import (
    CODES,
    FP8_INIT,
    FP8Encoding,
    code_scales,
    scales_of_outputs,
)
from shared.models.formats.fp8_w8a8 import FP8W8A8
from shared.models.formats.fp8_w8a16 import (
    FP8_BLOCK,
    FP8W8A16,
    SCALE_FACTOR,
    packed_scales,
    shares_of,
)
from shared.models.formats.weight_format import SCALES, VALUES, FormatOps, Planes
from shared.models.parameter import Parameter
from torch_impl.dummy_weights import top_bits, word_array


def packed(codes: UInt8[Tensor, "*stack N K"]) -> Int32[Tensor, "*stack N words"]:
    """Same as `shared.models.formats.fp8_w8a16.packed`, for FP8 values without NaN."""
    blocks = codes.unflatten(-1, (-1, 4, FP8_BLOCK // 4)).transpose(-1, -2).contiguous()
    return blocks.view(torch.int32).flatten(-3)


def unpacked(words: Int32[Tensor, "*stack N words"]) -> Float8e4m3fn[Tensor, "*stack N K"]:
    """Same as `shared.models.formats.fp8_w8a16.unpacked`."""
    blocks = words.view(torch.uint8).unflatten(-1, (-1, FP8_BLOCK // 4, 4))
    return blocks.transpose(-1, -2).flatten(-3).view(torch.float8_e4m3fn)


def in_order(codes: UInt8[Tensor, "*stack N K"]) -> Float8e4m3fn[Tensor, "*stack N K"]:
    return codes.view(torch.float8_e4m3fn)


def dequantized_words(planes: Planes) -> Float[Tensor, "*experts outputs inputs"]:
    words, scales = planes[VALUES], planes[SCALES].float() / SCALE_FACTOR
    layout = shares_of(words.shape, scales.shape)
    scales = scales.repeat_interleave(layout.outputs, -2)
    if layout.scales_in > 1:
        scales = scales.repeat_interleave(FP8_BLOCK, -1)
    blocks = words.contiguous().view(torch.uint8).unflatten(-1, (-1, FP8_BLOCK // 4, 4))
    codes = blocks.transpose(-1, -2).flatten(-3)
    return (codes.view(torch.float8_e4m3fn).float() * scales).bfloat16()


def dequantized_values(planes: Planes) -> Float32[Tensor, "*experts outputs inputs"]:
    values, scales = planes[VALUES], planes[SCALES]
    rows = scales.repeat_interleave(values.shape[-2] // scales.shape[-2], -2)
    across = rows.repeat_interleave(BLOCK, -1)[..., : values.shape[-1]]
    return values.float() * across


def dummy_words(parameter: Parameter, format: FP8W8A16, device: torch.device) -> Planes:
    """Generates packed values and their scales; fills the last block layer by layer."""
    scales_of = scales_of_outputs if format.by_output else code_scales
    scales = torch.from_numpy(packed_scales(scales_of(parameter, format.granularity)))
    found = {SCALES: scales.to(device, getattr(torch, format.scale_dtype))}
    if not format.padding:
        return found | {VALUES: word_array(parameter, codes, 4, FP8_BLOCK, device)}
    plane = format.planes(parameter.shape)[VALUES]
    found[VALUES] = torch.empty(plane.shape, dtype=torch.int32, device=device)
    words = word_array(parameter, codes, 4, 4, device)
    for layer, own in zip(found[VALUES], words, strict=True):
        layer.copy_(packed(functional.pad(own.view(torch.uint8), (0, format.padding))))
    return found


def dummy_values(parameter: Parameter, format: FP8W8A8, device: torch.device) -> Planes:
    words = word_array(parameter, codes, 4, FP8_BLOCK, device)
    for layer in words.view(-1, *words.shape[-2:]):  # without a copy of the stack
        layer.copy_(unpacked(layer).view(torch.int32))
    scales = (scales_of_outputs if format.by_output else code_scales)(parameter, Granularity.BLOCK)
    return {VALUES: words.view(torch.float8_e4m3fn), SCALES: torch.from_numpy(scales).to(device)}


def codes(key: Int[Tensor, ""], places: Int[Tensor, " places"]) -> Int[Tensor, " places"]:
    """Returns the FP8 values of the numbers that `elements` computes for `FP8_INIT`."""
    tops, half = top_bits(FP8_INIT, key, places), 2 ** (FP8_INIT.bits - 1)
    is_negative = tops < half
    place = torch.where(is_negative, half - 1 - tops, tops - half)  # among 1, 3, 5 and so on
    fours = torch.where(place < 4, CODES[0], CODES[1]).int()
    code = (fours >> (place & 3).mul_(8)).bitwise_and_(0xFF)
    return code.bitwise_or_(is_negative.int().mul_(0x80))


def scaled(
    numbers: Float[Tensor, "*stack N K"], parameter: Parameter, encoding: FP8Encoding
) -> Float[Tensor, "*stack N K"]:
    """Multiplies dummy FP8 values by their scales, in place."""
    scales = torch.from_numpy(scales_of_outputs(parameter, encoding.granularity))
    scales = scales.to(numbers.device, numbers.dtype)
    if encoding.granularity is Granularity.CHANNEL:
        return numbers.mul_(scales)
    for block in range(scales.shape[-1]):
        columns = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        numbers[..., columns].mul_(scales[..., block : block + 1])
    return numbers


W8A16 = FormatOps(dequantized=dequantized_words, converted=packed, dummy=dummy_words)
W8A8 = FormatOps(dequantized=dequantized_values, converted=in_order, dummy=dummy_values)
