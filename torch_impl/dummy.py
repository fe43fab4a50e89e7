"""As `shared.models.dummy`, on the device: a parameter is made there piece by piece."""

import math

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor
from torch.nn import functional

from shared.models.dummy import CODES, CODES_LAW, LAST_SHIFT, ROUNDS, Law, keys_of
from shared.models.fp8_words import FP8_BLOCK, shape_of_words
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
    tops = _tops(law, key, places)
    whole = tops.mul_(2).add_(1 - 2**law.bits)
    return whole.float().mul_(law.step).add_(law.centre)


def codes(key: Int[Tensor, ""], places: Int[Tensor, " places"]) -> Int[Tensor, " places"]:
    """The FP8 codes of the numbers that `elements` gives by `CODES_LAW`."""
    tops, half = _tops(CODES_LAW, key, places), 2 ** (CODES_LAW.bits - 1)
    is_negative = tops < half
    place = torch.where(is_negative, half - 1 - tops, tops - half)  # among 1, 3, 5 and so on
    fours = torch.where(place < 4, CODES[0], CODES[1]).int()
    code = (fours >> (place & 3).mul_(8)).bitwise_and_(0xFF)
    return code.bitwise_or_(is_negative.int().mul_(0x80))


def word_array(parameter: Parameter, device: torch.device) -> Int32[Tensor, "..."]:
    """A whole parameter in FP8, in words of four, made in pieces as `parameter_array`."""
    made = torch.empty(shape_of_words(parameter.shape), dtype=torch.int32, device=device)
    keys = torch.from_numpy(keys_of(parameter).view("int32")).to(device)
    layers, count = made.view(len(keys), made.numel() // len(keys)), FP8_BLOCK // 4
    number = torch.arange(min(PIECE, layers.shape[1]), device=device)
    first = (number // count * FP8_BLOCK + number % count).int()  # PIECE has whole blocks
    for key, layer in zip(keys, layers, strict=True):
        for start in range(0, len(layer), PIECE):
            piece = layer[start : start + PIECE].zero_()
            for byte in range(4):
                places = first[: len(piece)] + _signed(4 * start + count * byte)
                piece.bitwise_or_(codes(key, places) << (8 * byte))
    return made


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


def share(parameter: Parameter, made: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """What a rank's share has of the whole parameter, or of the scales of each of its outputs."""
    if parameter.whole is None:
        return made
    axis = made.ndim + parameter.axis
    taken = made.index_select(axis, torch.from_numpy(parameter.outputs).to(made.device))
    spare = [0] * (2 * -parameter.axis - 1)
    return functional.pad(taken, (*spare, parameter.shape[parameter.axis] - taken.shape[axis]))


def _tops(law: Law, key: Int[Tensor, ""], places: Int[Tensor, " places"]) -> Int[Tensor, " places"]:
    """The highest bits of the hash, as many as a law looks at."""
    return _shifted(mixed(mixed(places) ^ key), 32 - law.bits)


def _shifted(words: Int[Tensor, " places"], by: int) -> Int[Tensor, " places"]:
    """Shifted to the right; the mask takes the copies of the sign off again."""
    return (words >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(word: int) -> int:
    """A word of 32 bits as the int32 of the same bits."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)
