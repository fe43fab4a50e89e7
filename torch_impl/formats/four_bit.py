"""Codes of four bits on a device, packed as in `shared.models.formats.four_bit`."""

from collections.abc import Callable

import torch
from jaxtyping import Int, Int32, UInt8
from torch import Tensor

from shared.models.formats.four_bit import PARTS, block_of, padded
from shared.models.parameter import Parameter
from torch_impl.dummy_weights import word_array


def packed(words: Int32[Tensor, "*stack N words"]) -> Int32[Tensor, "*stack N words"]:
    """Reorders codes from eight neighbours in an int32 to blocks of inputs."""
    width = block_of(PARTS * words.shape[-1]) // PARTS
    pairs = words.contiguous().view(torch.uint8)
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
    blocks = codes.unflatten(-1, (-1, PARTS, width))
    joined = blocks[..., ::2, :] | blocks[..., 1::2, :] << 4
    return joined.transpose(-1, -2).contiguous().view(torch.int32).flatten(-3)


def unpacked(words: Int32[Tensor, "*stack N words"]) -> UInt8[Tensor, "*stack N K"]:
    """Same as `shared.models.formats.four_bit.unpack`."""
    width = block_of(PARTS * words.shape[-1]) // PARTS
    pairs = words.contiguous().view(torch.uint8).unflatten(-1, (-1, width, PARTS // 2))
    pairs = pairs.transpose(-1, -2)
    return torch.stack([pairs & 15, pairs >> 4], dim=-2).flatten(-4)


def dummy(
    parameter: Parameter,
    codes: Callable[[Int[Tensor, ""], Int[Tensor, " places"]], Int[Tensor, " places"]],
    device: torch.device,
) -> Int32[Tensor, "*stack N words"]:
    """Generates packed codes; a partial last block is filled and packed layer by layer.

    Args:
      parameter, codes, device: See `word_array`.
    """
    *stack, inputs = parameter.shape
    if padded(inputs) == inputs:
        return word_array(parameter, codes, PARTS, block_of(inputs), device)
    shape = (*stack, padded(inputs) // PARTS)
    found = torch.zeros(shape, dtype=torch.int32, device=device)
    words = word_array(parameter, codes, PARTS, PARTS, device)
    for layer, own in zip(found, words, strict=True):
        layer[..., : own.shape[-1]] = own
        layer.copy_(packed(layer))
    return found
