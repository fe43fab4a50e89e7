"""Noise that is a function: of a request's seed, a position, a stream and a token id, and no more.

No generator has a state, so a step may choose at any positions in any order, and a drafter can see
the noise that its target will see.

Sources: Random123, Salmon et al. 2011 (Threefry); Gumbel coupling, Daliri, Musco, Suresh 2024.
"""

import numpy as np
from jaxtyping import Float32 as F32
from jaxtyping import Int, UInt32

TARGET_STREAM = 0
"""The stream of the target's choice, keyed by the position of the token that is chosen.

Under the match rule the drafter's level shares it. The other streams are the rejection rule's,
keyed by the position of the step's newest token: a step that rejects a draft has looked at the
noise of the drafts behind it, so the next step must not draw from it again.
"""


ACCEPT_STREAM, RESIDUAL_STREAM, DRAFT_STREAM = 1, 2, 3
"""Whether a draft is accepted; what stands for a rejected one; level l drafts from stream 3 + l."""


ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


PARITY = np.uint32(0x1BD11BDA)


def threefry2x32(
    key: tuple[UInt32[np.ndarray, "..."], UInt32[np.ndarray, "..."]],
    counter: tuple[UInt32[np.ndarray, "..."], UInt32[np.ndarray, "..."]],
) -> tuple[UInt32[np.ndarray, "..."], UInt32[np.ndarray, "..."]]:
    """Threefry-2x32, 20 rounds: two words from a key of two words and a counter of two words."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ PARITY)
    x0, x1 = np.broadcast_arrays(counter[0] + keys[0], counter[1] + keys[1])
    for group in range(5):
        for rotation in ROTATIONS[4 * (group % 2) : 4 * (group % 2) + 4]:
            x0 = x0 + x1
            x1 = (x1 << np.uint32(rotation)) | (x1 >> np.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + (keys[(group + 2) % 3] + np.uint32(group + 1))
    return x0, x1


def derive_seed(seed: int, choice: int) -> int:
    """The 32-bit seed of one choice of a prompt; `seed` is taken modulo 2^64."""
    low, high = (np.array([seed >> shift & 0xFFFFFFFF], np.uint32) for shift in (0, 32))
    counter = (np.array([choice], np.uint32), np.zeros(1, np.uint32))
    return int(threefry2x32((low, high), counter)[0][0])


def uniform_of_words(words: UInt32[np.ndarray, "R words"]) -> F32[np.ndarray, "R words"]:
    """Numbers above 0 and below 1 from uniform 32-bit words.

    The clamp matters: a word near 2^32 rounds to 1, and one token in 2^24 would have noise without
    bound, or one draft in 2^24 would be rejected though its probability is the target's.
    """
    uniform = words.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    return np.minimum(uniform, np.float32(1 - 2**-24))


def noise_of_words(words: UInt32[np.ndarray, "R vocab"]) -> F32[np.ndarray, "R vocab"]:
    """Gumbel noise from uniform 32-bit words; finite for all of them."""
    return -np.log(-np.log1p(-uniform_of_words(words)))


def uniforms(
    seeds: UInt32[np.ndarray, " R"], positions: Int[np.ndarray, " R"], levels: int
) -> F32[np.ndarray, "R levels"]:
    """The number that decides on the draft of each level, by `ACCEPT_STREAM`.

    Args:
      seeds: The rows' seeds.
      positions: The position of the step's newest token.
      levels: S, drafts of a row.
    """
    counter = np.arange(levels, dtype=np.uint32)[None, :]
    key = (seeds[:, None], positions.astype(np.uint32)[:, None])
    words, _ = threefry2x32(key, (counter, np.full_like(counter, ACCEPT_STREAM)))
    return uniform_of_words(words)


def gumbel(
    seeds: UInt32[np.ndarray, " R"], positions: Int[np.ndarray, " R"], vocab: int, stream: int
) -> F32[np.ndarray, "R vocab"]:
    """The noise of every token id at one position of each row.

    Args:
      seeds: The rows' seeds.
      positions: The position of the token that is chosen, or that the stream is keyed by.
      vocab: Size of the target's vocabulary, in whose ids the noise is numbered.
      stream: `TARGET_STREAM`, or another for another use.
    """
    counter = np.arange(-(-vocab // 2), dtype=np.uint32)[None, :]
    key = (seeds[:, None], positions.astype(np.uint32)[:, None])
    words = np.stack(threefry2x32(key, (counter, np.full_like(counter, stream))), axis=-1)
    return noise_of_words(words.reshape(len(seeds), -1)[:, :vocab])
