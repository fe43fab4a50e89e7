"""FP8 parameters on a device, packed as in `shared.models.formats.fp8_w8a16`.

They are read tensor by tensor and packed on the device, without dequantisation.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Float8e4m3fn, Float32, Int32, Shaped, UInt8
from torch import Tensor

from shared.models.checkpoint import Checkpoint
from shared.models.dummy_weights import DummyCheckpoint, Stored, code_scales, scales_of_outputs
from shared.models.formats import fp8
from shared.models.formats.fp8 import Granularity
from shared.models.formats.fp8_w8a16 import FP8_BLOCK, packed_scales, shape_of_words
from shared.models.parameters import Parameter
from torch_impl import dummy_weights


def packed(codes: UInt8[Tensor, "*stack N K"]) -> Int32[Tensor, "*stack N words"]:
    """Same as `shared.models.formats.fp8_w8a16.packed`, for FP8 values without NaN."""
    blocks = codes.unflatten(-1, (-1, 4, FP8_BLOCK // 4)).transpose(-1, -2).contiguous()
    return blocks.view(torch.int32).flatten(-3)


def read(
    checkpoint: Stored,
    parameter: Parameter,
    granularity: Granularity,
    device: torch.device,
    progress: Callable[[int], None],
) -> tuple[Int32[Tensor, "*stack N words"], Float[Tensor, "*stack scales scales_in"]]:
    """Reads a packed parameter and its scales; see `shared.models.checkpoint.Checkpoint.codes`."""
    if isinstance(checkpoint, DummyCheckpoint):
        scales = packed_scales(code_scales(parameter, granularity))
        words = dummy_weights.word_array(parameter, device)
        progress(checkpoint.num_bytes([parameter]))
        return words, _placed(scales, device)
    return _from_files(checkpoint, parameter, granularity, device, progress)


def _from_files(
    checkpoint: Checkpoint,
    parameter: Parameter,
    granularity: Granularity,
    device: torch.device,
    progress: Callable[[int], None],
) -> tuple[Int32[Tensor, "*stack N words"], Float[Tensor, "*stack scales scales_in"]]:
    words = torch.empty(shape_of_words(parameter.shape), dtype=torch.int32, device=device)
    scales = np.empty(fp8.scale_shape(parameter.shape, granularity), np.float32)
    for piece in checkpoint.codes(parameter, granularity, progress):
        words[piece.place].copy_(packed(torch.from_numpy(piece.codes).to(device)))
        scales[piece.place_of_scales] = packed_scales(piece.scales)
    return words, _placed(scales, device)


def read_codes(
    checkpoint: Stored,
    parameter: Parameter,
    device: torch.device,
    progress: Callable[[int], None],
) -> tuple[Float8e4m3fn[Tensor, "*stack N K"], Float32[Tensor, "*stack outputs blocks_in"]]:
    """Reads the FP8 values and scales of a W8A8 parameter.

    The scales are per block on a GPU, and per output and block elsewhere; see `Matrix`.
    """
    by_output = device.type != "cuda"
    if isinstance(checkpoint, DummyCheckpoint):
        words = dummy_weights.word_array(parameter, device)
        for layer in words.view(-1, *words.shape[-2:]):  # without a copy of the stack
            layer.copy_(unpacked(layer).view(torch.int32))
        codes = words.view(torch.float8_e4m3fn)
        scales = (scales_of_outputs if by_output else code_scales)(parameter, Granularity.BLOCK)
        progress(checkpoint.num_bytes([parameter]))
    else:
        codes = torch.empty(parameter.shape, dtype=torch.uint8, device=device)
        shape = fp8.code_scale_shape(parameter.shape, by_output=by_output)
        scales = np.empty(shape, np.float32)
        for piece in checkpoint.codes(parameter, Granularity.BLOCK, progress, by_output=by_output):
            codes[piece.place].copy_(torch.from_numpy(piece.codes))
            scales[piece.place_of_scales] = piece.scales
        codes = codes.view(torch.float8_e4m3fn)
    return codes, torch.from_numpy(scales).to(device)


def unpacked(words: Int32[Tensor, "*stack N words"]) -> Float8e4m3fn[Tensor, "*stack N K"]:
    """Same as `shared.models.formats.fp8_w8a16.unpacked`."""
    blocks = words.view(torch.uint8).unflatten(-1, (-1, FP8_BLOCK // 4, 4))
    return blocks.transpose(-1, -2).flatten(-3).view(torch.float8_e4m3fn)


def _placed(scales: Shaped[np.ndarray, "..."], device: torch.device) -> Float[Tensor, "..."]:
    return torch.from_numpy(scales).to(torch.bfloat16).to(device)


def scaled(
    numbers: Float[Tensor, "*stack N K"], parameter: Parameter, granularity: Granularity
) -> Float[Tensor, "*stack N K"]:
    """Multiplies dummy FP8 values by their scales, in place."""
    scales = torch.from_numpy(scales_of_outputs(parameter, granularity))
    scales = scales.to(numbers.device, numbers.dtype)
    if granularity is Granularity.CHANNEL:
        return numbers.mul_(scales)
    for block in range(scales.shape[-1]):
        columns = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        numbers[..., columns].mul_(scales[..., block : block + 1])
    return numbers
