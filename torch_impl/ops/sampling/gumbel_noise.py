"""Counter-based Gumbel noise, a function of seed, position, stream and token id.

Same as `shared.spec.gumbel_noise`.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.spec.gumbel_noise import ACCEPT_STREAM, PARITY, ROTATIONS
from torch_impl.ops import Kernels, kernel_or_reference

_PARITY = int(PARITY)  # as int32 bits


def threefry2x32(
    key: tuple[Int[Tensor, "..."], Int[Tensor, "..."]],
    counter: tuple[Int[Tensor, "..."], Int[Tensor, "..."]],
) -> tuple[Int[Tensor, "..."], Int[Tensor, "..."]]:
    """Same as the specification; int32 values hold the bits, and sums wrap around."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ _PARITY)
    x0, x1 = torch.broadcast_tensors(counter[0] + keys[0], counter[1] + keys[1])
    x0, x1 = x0.clone(), x1.clone()
    for group in range(5):
        for rotation in ROTATIONS[4 * (group % 2) : 4 * (group % 2) + 4]:
            x0 += x1
            # The right shift copies the sign bit; the mask clears the copies.
            low = (x1 >> (32 - rotation)).bitwise_and_((1 << rotation) - 1)
            x1 = x1.bitwise_left_shift_(rotation).bitwise_or_(low).bitwise_xor_(x0)
        x0 += keys[(group + 1) % 3]
        x1 += keys[(group + 2) % 3] + (group + 1)
    return x0, x1


def uniform_of_words(words: Int[Tensor, "R words"]) -> Float[Tensor, "R words"]:
    """Same as the specification; int32 values hold the bits of the words."""
    uniform = words.view(torch.uint32).to(torch.float32)
    return uniform.mul_(2**-32).add_(2**-33).clamp_(max=1 - 2**-24)


def noise_of_words(words: Int[Tensor, "R vocab"]) -> Float[Tensor, "R vocab"]:
    """Same as the specification; int32 values hold the bits of the words."""
    return uniform_of_words(words).neg_().log1p_().neg_().log_().neg_()


def plain_uniforms(
    seeds: Int[Tensor, " R"], positions: Int[Tensor, " R"], levels: int
) -> Float[Tensor, "R levels"]:
    counter = torch.arange(levels, dtype=torch.int32, device=seeds.device)[None, :]
    key = (seeds[:, None], positions[:, None])
    words, _ = threefry2x32(key, (counter, torch.full_like(counter, ACCEPT_STREAM)))
    return uniform_of_words(words)


def kernel_uniforms(
    kernels: Kernels, seeds: Int[Tensor, " R"], positions: Int[Tensor, " R"], levels: int
) -> Float[Tensor, "R levels"]:
    return kernels.gumbel_noise.uniforms(seeds, positions, levels, ACCEPT_STREAM)


uniforms = kernel_or_reference(kernel_uniforms, plain_uniforms)


def gumbel(
    seeds: Int[Tensor, " R"], positions: Int[Tensor, " R"], vocab: int, stream: int
) -> Float[Tensor, "R vocab"]:
    counter = torch.arange(-(-vocab // 2), dtype=torch.int32, device=seeds.device)[None, :]
    key = (seeds[:, None], positions[:, None])
    words = threefry2x32(key, (counter, torch.full_like(counter, stream)))
    return noise_of_words(torch.stack(words, dim=-1).flatten(1)[:, :vocab].contiguous())


def gumbel_at(
    seeds: Int[Tensor, " R"],
    positions: Int[Tensor, " R"],
    tokens: Int[Tensor, "R some"],
    stream: int,
) -> Float[Tensor, "R some"]:
    """Same as `gumbel`, for some token ids of each row."""
    counter = tokens >> 1
    key = (seeds[:, None], positions[:, None])
    even, odd = threefry2x32(key, (counter, torch.full_like(counter, stream)))
    return noise_of_words(torch.where(tokens % 2 == 0, even, odd))
