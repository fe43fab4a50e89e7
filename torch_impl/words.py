"""Parameters that stay FP8, as `shared.models.fp8_words`, on a device.

They are read tensor by tensor and put in words there; no number is widened on the way.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int32, Shaped, UInt8
from torch import Tensor

from shared.models import fp8
from shared.models.checkpoint import Checkpoint
from shared.models.dummy import DummyCheckpoint, Stored, code_scales
from shared.models.fp8_words import FP8_BLOCK, packed_scales, shape_of_words
from shared.models.parameters import Parameter
from torch_impl import dummy


def packed(codes: UInt8[Tensor, "*stack N K"]) -> Int32[Tensor, "*stack N words"]:
    """As `shared.models.fp8_words.packed`, of codes that are numbers."""
    blocks = codes.unflatten(-1, (-1, 4, FP8_BLOCK // 4)).transpose(-1, -2).contiguous()
    return blocks.view(torch.int32).flatten(-3)


def read(
    checkpoint: Stored,
    parameter: Parameter,
    device: torch.device,
    progress: Callable[[int], None],
) -> tuple[Int32[Tensor, "*stack N words"], Float[Tensor, "*stack blocks blocks_in"]]:
    """The words of a parameter and its scales; see `shared.models.checkpoint.Checkpoint.codes`."""
    if isinstance(checkpoint, DummyCheckpoint):
        scales = packed_scales(code_scales(parameter))
        words = dummy.word_array(parameter, device)
        progress(checkpoint.num_bytes([parameter]))
        return words, _placed(scales, device)
    return _from_files(checkpoint, parameter, device, progress)


def _from_files(
    checkpoint: Checkpoint,
    parameter: Parameter,
    device: torch.device,
    progress: Callable[[int], None],
) -> tuple[Int32[Tensor, "*stack N words"], Float[Tensor, "*stack blocks blocks_in"]]:
    words = torch.empty(shape_of_words(parameter.shape), dtype=torch.int32, device=device)
    scales = np.empty(fp8.scale_shape(parameter.shape), np.float32)
    for piece in checkpoint.codes(parameter, progress):
        words[piece.place].copy_(packed(torch.from_numpy(piece.codes).to(device)))
        scales[piece.place_of_scales] = piece.scales
    return words, _placed(scales, device)


def _placed(scales: Shaped[np.ndarray, "..."], device: torch.device) -> Float[Tensor, "..."]:
    return torch.from_numpy(scales).to(torch.bfloat16).to(device)


def scaled(
    numbers: Float[Tensor, "*stack N K"], parameter: Parameter
) -> Float[Tensor, "*stack N K"]:
    """The numbers of a dummy's codes times their scales, in their own memory."""
    scales = torch.from_numpy(code_scales(parameter)).to(numbers.device, numbers.dtype)
    across = scales.repeat_interleave(FP8_BLOCK, -1)[..., : numbers.shape[-1]]
    for block in range(scales.shape[-2]):
        rows = slice(block * FP8_BLOCK, (block + 1) * FP8_BLOCK)
        numbers[..., rows, :].mul_(across[..., block : block + 1, :])
    return numbers
