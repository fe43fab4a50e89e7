"""As `shared.models.dummy`, on the device: a parameter is made there piece by piece."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.models.dummy import LAST_SHIFT, ROUNDS, Law, keys_of
from shared.models.parameters import Parameter

PIECE = 1 << 24
"""Elements that are made at a time, so that little memory is needed beside the parameter's own."""


def mixed(words: Int[Tensor, " places"]) -> Int[Tensor, " places"]:
    """As the specification; a word is the bits of an int32, whose products wrap."""
    for shift, factor in ROUNDS:
        words = (words ^ _shifted(words, shift)).mul_(_signed(factor))
    return words ^ _shifted(words, LAST_SHIFT)


def elements(
    law: Law, key: Int[Tensor, ""], places: Int[Tensor, " places"]
) -> Float[Tensor, " places"]:
    tops = _shifted(mixed(mixed(places) ^ key), 32 - law.bits)
    whole = tops.mul_(2).add_(1 - 2**law.bits)
    return whole.float().mul_(law.step).add_(law.centre)


def parameter_array(
    parameter: Parameter, law: Law, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "..."]:
    """A whole parameter; beside it stand a few pieces of `PIECE` elements."""
    made = torch.empty(parameter.shape, dtype=dtype, device=device)
    keys = torch.from_numpy(keys_of(parameter).view("int32")).to(device)
    layers = made.view(len(keys), math.prod(parameter.shape) // len(keys))
    first = torch.arange(min(PIECE, layers.shape[1]), dtype=torch.int32, device=device)
    for key, layer in zip(keys, layers, strict=True):
        for start in range(0, len(layer), PIECE):
            piece = layer[start : start + PIECE]
            piece.copy_(elements(law, key, first[: len(piece)] + _signed(start)))
    return made


def _shifted(words: Int[Tensor, " places"], by: int) -> Int[Tensor, " places"]:
    """Shifted to the right; the mask takes the copies of the sign off again."""
    return (words >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(word: int) -> int:
    """A word of 32 bits as the int32 of the same bits."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)
