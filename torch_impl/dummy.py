"""As `shared.models.dummy`, on the device: a parameter is made there piece by piece."""

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

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
    """A parameter in FP8 or a rank's share, in words of four; pieces as in `parameter_array`."""
    made = torch.zeros(shape_of_words(parameter.shape), dtype=torch.int32, device=device)
    count = FP8_BLOCK // 4
    for key, layer in _layers(parameter, made):
        number = torch.arange(min(PIECE, len(layer)), device=device)
        first_of = (number // count * FP8_BLOCK + number % count).int()  # PIECE has whole blocks
        for at, first, numbers in parameter.spans():
            span = layer[at // 4 : (at + numbers) // 4]
            for start in range(0, len(span), PIECE):
                piece = span[start : start + PIECE]
                for byte in range(4):
                    places = first_of[: len(piece)] + _signed(first + 4 * start + count * byte)
                    piece.bitwise_or_(codes(key, places) << (8 * byte))
    return made


def parameter_array(
    parameter: Parameter, law: Law, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "..."]:
    """A parameter or a rank's share; beside it stand a few pieces of `PIECE` elements."""
    new = torch.empty if parameter.is_filled else torch.zeros
    made = new(parameter.shape, dtype=dtype, device=device)
    for key, layer in _layers(parameter, made):
        number = torch.arange(min(PIECE, len(layer)), dtype=torch.int32, device=device)
        for at, first, count in parameter.spans():
            span = layer[at : at + count]
            for start in range(0, count, PIECE):
                piece = span[start : start + PIECE]
                piece.copy_(elements(law, key, number[: len(piece)] + _signed(first + start)))
    return made


def _layers(parameter: Parameter, made: Tensor) -> Iterator[tuple[Int[Tensor, ""], Tensor]]:
    """The key of each layer, and its numbers one behind the other."""
    keys = torch.from_numpy(keys_of(parameter).view("int32")).to(made.device)
    yield from zip(keys, made.view(len(keys), -1), strict=True)


def _tops(law: Law, key: Int[Tensor, ""], places: Int[Tensor, " places"]) -> Int[Tensor, " places"]:
    """The highest bits of the hash, as many as a law looks at."""
    return _shifted(mixed(mixed(places) ^ key), 32 - law.bits)


def _shifted(words: Int[Tensor, " places"], by: int) -> Int[Tensor, " places"]:
    """Shifted to the right; the mask takes the copies of the sign off again."""
    return (words >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(word: int) -> int:
    """A word of 32 bits as the int32 of the same bits."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)
