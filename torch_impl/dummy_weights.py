"""Same as `shared.models.dummy_elements`, for tensors generated on the device in chunks."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float, Int, Int32
from torch import Tensor

from shared.models.dummy_elements import LAST_SHIFT, ROUNDS, InitSpec, keys_of
from shared.models.parameter import Parameter

PIECE = 1 << 24
"""Elements generated at a time, so that temporary memory is small next to the parameter."""


def mixed(words: Int[Tensor, " places"]) -> Int[Tensor, " places"]:
    """Same as the specification, with the bits of uint32 in int32, which wraps on overflow."""
    for shift, factor in ROUNDS:
        words = (words ^ _shifted(words, shift)).mul_(_signed(factor))
    return words ^ _shifted(words, LAST_SHIFT)


def elements(
    law: InitSpec, key: Int[Tensor, ""], places: Int[Tensor, " places"]
) -> Float[Tensor, " places"]:
    tops = top_bits(law, key, places)
    whole = tops.mul_(2).add_(1 - 2**law.bits)
    return whole.float().mul_(law.step).add_(law.centre)


def word_array(
    parameter: Parameter,
    codes: Callable[[Int[Tensor, ""], Int[Tensor, " places"]], Int[Tensor, " places"]],
    parts: int,
    block: int,
    device: torch.device,
) -> Int32[Tensor, "..."]:
    """Generates a packed parameter or a rank's shard, in chunks as in `parameter_array`."""
    shape = (*parameter.shape[:-1], parameter.shape[-1] // parts)
    made = torch.zeros(shape, dtype=torch.int32, device=device)
    count = block // parts
    for start, stop, shift in _pieces(parameter, parts, device):
        number = torch.arange(stop - start, device=device)
        first = (number // count * block + number % count).int() + shift
        for key, layer in _layers(parameter, made):
            for part in range(parts):
                words = codes(key, first + count * part) << (32 // parts * part)
                layer[start:stop].bitwise_or_(words)
    return made


def parameter_array(
    parameter: Parameter, law: InitSpec, dtype: torch.dtype, device: torch.device
) -> Float[Tensor, "..."]:
    """Generates a parameter or a rank's shard; temporary memory is a few chunks of `PIECE`."""
    new = torch.empty if parameter.is_filled else torch.zeros
    made = new(parameter.shape, dtype=dtype, device=device)
    for start, stop, shift in _pieces(parameter, 1, device):
        places = torch.arange(stop - start, dtype=torch.int32, device=device) + shift
        for key, layer in _layers(parameter, made):
            layer[start:stop].copy_(elements(law, key, places))
    return made


def _layers(parameter: Parameter, made: Tensor) -> Iterator[tuple[Int[Tensor, ""], Tensor]]:
    """Yields the key of each layer, and a flat view of its elements."""
    keys = torch.from_numpy(keys_of(parameter).view("int32")).to(made.device)
    yield from zip(keys, made.view(len(keys), -1), strict=True)


def _pieces(
    parameter: Parameter, unit: int, device: torch.device
) -> Iterator[tuple[int, int, int | Int32[Tensor, " units"]]]:
    """Splits a layer into chunks, in units of `unit` elements.

    A shard of experts has many short spans; a chunk joins consecutive ones.

    Yields:
      The first unit and the end of a chunk, and the offset from an index within the chunk to the
      element's index in the whole parameter.
    """
    spans: list[tuple[int, int]] = []  # length and offset of each span of a chunk
    start = stop = 0
    for at, first, numbers in parameter.spans():
        for begin in range(at // unit, (at + numbers) // unit, PIECE):
            end = min(begin + PIECE, (at + numbers) // unit)
            if spans and (begin != stop or end - start > PIECE):
                yield start, stop, _shifts(spans, device)
                spans = []
            start, stop = start if spans else begin, end
            spans.append((end - begin, _signed(first - at + unit * start)))
    if spans:
        yield start, stop, _shifts(spans, device)


def _shifts(spans: list[tuple[int, int]], device: torch.device) -> int | Int32[Tensor, " units"]:
    if len(spans) == 1:
        return spans[0][1]
    counts, shifts = zip(*spans, strict=True)
    far = torch.tensor(shifts, dtype=torch.int32)
    return far.repeat_interleave(torch.tensor(counts)).to(device)


def top_bits(
    law: InitSpec, key: Int[Tensor, ""], places: Int[Tensor, " places"]
) -> Int[Tensor, " places"]:
    """Returns the highest `law.bits` bits of the hash."""
    return _shifted(mixed(mixed(places) ^ key), 32 - law.bits)


def _shifted(words: Int[Tensor, " places"], by: int) -> Int[Tensor, " places"]:
    """Computes a logical right shift; the mask removes the copies of the sign bit."""
    return (words >> by).bitwise_and_((1 << (32 - by)) - 1)


def _signed(word: int) -> int:
    """Returns the int32 with the bits of a uint32."""
    return (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)
