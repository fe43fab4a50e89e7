"""Counter-based random numbers (Threefry) and Gumbel noise: functions of seed, position, stream and
token id.

There is no generator state. A step can therefore sample at any positions in any order, and a
drafter can use the noise of its target (Gumbel coupling).

Sources: Random123, Salmon et al. 2011 (Threefry); Gumbel coupling, Daliri, Musco, Suresh 2024.
"""

import numpy as np
from jaxtyping import Float32 as F32
from jaxtyping import Int, UInt32

TARGET_STREAM = 0
"""RNG stream of the target's samples, keyed by the position of the sampled token.

With exact-match acceptance the drafter shares it. The other streams are for rejection sampling and
are keyed by the position of the step's newest token: a step that rejects a draft token has already
used the noise of later positions, so the next step must not sample from it again.
"""


ACCEPT_STREAM, RESIDUAL_STREAM, DRAFT_STREAM = 1, 2, 3
"""RNG streams of acceptance, of residual samples, and of draft tokens (level l uses 3 + l)."""


ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)


PARITY = np.uint32(0x1BD11BDA)


def threefry2x32(
    key: tuple[UInt32[np.ndarray, "..."], UInt32[np.ndarray, "..."]],
    counter: tuple[UInt32[np.ndarray, "..."], UInt32[np.ndarray, "..."]],
) -> tuple[UInt32[np.ndarray, "..."], UInt32[np.ndarray, "..."]]:
    """Computes Threefry-2x32 with 20 rounds: two 32-bit words from a key and a counter of two words
    each.
    """
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
    """Returns the 32-bit seed of one choice (`n`) of a prompt; `seed` is taken modulo 2^64."""
    low, high = (np.array([seed >> shift & 0xFFFFFFFF], np.uint32) for shift in (0, 32))
    counter = (np.array([choice], np.uint32), np.zeros(1, np.uint32))
    return int(threefry2x32((low, high), counter)[0][0])


def uniform_of_words(words: UInt32[np.ndarray, "R words"]) -> F32[np.ndarray, "R words"]:
    """Converts uniform 32-bit integers to floats in the open interval (0, 1).

    The clamp is required: an integer near 2^32 rounds to 1. One token in 2^24 would then have
    infinite noise, or one draft token in 2^24 would be rejected although its probability equals the
    target's.
    """
    uniform = words.astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    return np.minimum(uniform, np.float32(1 - 2**-24))


def noise_of_words(words: UInt32[np.ndarray, "R vocab"]) -> F32[np.ndarray, "R vocab"]:
    """Converts uniform 32-bit integers to Gumbel noise; always finite."""
    return -np.log(-np.log1p(-uniform_of_words(words)))


def uniforms(
    seeds: UInt32[np.ndarray, " R"], positions: Int[np.ndarray, " R"], levels: int
) -> F32[np.ndarray, "R levels"]:
    """Returns the uniform numbers that decide on the draft token of each level, from
    `ACCEPT_STREAM`.

    Args:
      seeds: Seeds of the rows.
      positions: Position of the step's newest token.
      levels: S, draft tokens of a row.
    """
    counter = np.arange(levels, dtype=np.uint32)[None, :]
    key = (seeds[:, None], positions.astype(np.uint32)[:, None])
    words, _ = threefry2x32(key, (counter, np.full_like(counter, ACCEPT_STREAM)))
    return uniform_of_words(words)


def gumbel(
    seeds: UInt32[np.ndarray, " R"], positions: Int[np.ndarray, " R"], vocab: int, stream: int
) -> F32[np.ndarray, "R vocab"]:
    """Returns the Gumbel noise of all token ids at one position of each row.

    Args:
      seeds: Seeds of the rows.
      positions: Position of the sampled token, or the key of the stream.
      vocab: Vocabulary size of the target, whose ids index the noise.
      stream: `TARGET_STREAM` or another stream.
    """
    counter = np.arange(-(-vocab // 2), dtype=np.uint32)[None, :]
    key = (seeds[:, None], positions.astype(np.uint32)[:, None])
    words = np.stack(threefry2x32(key, (counter, np.full_like(counter, stream))), axis=-1)
    return noise_of_words(words.reshape(len(seeds), -1)[:, :vocab])


def gumbel_at(
    seeds: UInt32[np.ndarray, " R"],
    positions: Int[np.ndarray, " R"],
    tokens: Int[np.ndarray, "R some"],
    stream: int,
) -> F32[np.ndarray, "R some"]:
    """Returns the Gumbel noise of some token ids at one position of each row; see `gumbel`."""
    counter = (tokens >> 1).astype(np.uint32)
    key = (seeds[:, None], positions.astype(np.uint32)[:, None])
    even, odd = threefry2x32(key, (counter, np.full_like(counter, stream)))
    return noise_of_words(np.where(tokens % 2 == 0, even, odd))
