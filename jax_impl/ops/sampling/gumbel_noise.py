"""Counter-based Gumbel noise, a function of seed, position, stream and token id.

Same as `shared.spec.gumbel_noise`.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int, UInt32

from jax_impl.ops import Kernels, kernel_or_reference
from shared.spec.gumbel_noise import ACCEPT_STREAM, PARITY, ROTATIONS

Stream = int | Int[jax.Array, ""]


def threefry2x32(
    key: tuple[UInt32[jax.Array, "..."], UInt32[jax.Array, "..."]],
    counter: tuple[UInt32[jax.Array, "..."], UInt32[jax.Array, "..."]],
) -> tuple[UInt32[jax.Array, "..."], UInt32[jax.Array, "..."]]:
    """Computes Threefry-2x32 with 20 rounds; key, counter and result are two 32-bit words each."""
    keys = (key[0], key[1], key[0] ^ key[1] ^ jnp.uint32(PARITY))
    x0, x1 = jnp.broadcast_arrays(counter[0] + keys[0], counter[1] + keys[1])
    for group in range(5):
        for rotation in ROTATIONS[4 * (group % 2) : 4 * (group % 2) + 4]:
            x0 = x0 + x1
            x1 = (x1 << jnp.uint32(rotation)) | (x1 >> jnp.uint32(32 - rotation))
            x1 = x1 ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + (keys[(group + 2) % 3] + jnp.uint32(group + 1))
    return x0, x1


def uniform_of_words(words: UInt32[jax.Array, "..."]) -> Float[jax.Array, "..."]:
    """Maps uniform 32-bit words to numbers in (0, 1)."""
    uniform = words.astype(jnp.float32) * jnp.float32(2**-32) + jnp.float32(2**-33)
    return jnp.minimum(uniform, jnp.float32(1 - 2**-24))


def noise_of_words(words: UInt32[jax.Array, "..."]) -> Float[jax.Array, "..."]:
    """Maps uniform 32-bit words to Gumbel noise, finite for all words."""
    return -jnp.log(-jnp.log1p(-uniform_of_words(words)))


def plain_uniforms(
    seeds: UInt32[jax.Array, " R"], positions: Int[jax.Array, " R"], levels: int
) -> Float[jax.Array, "R levels"]:
    """Returns the uniform number that decides on each level's draft, by the newest position."""
    counter = jnp.arange(levels, dtype=jnp.uint32)[None, :]
    key = (seeds[:, None], positions.astype(jnp.uint32)[:, None])
    words, _ = threefry2x32(key, (counter, jnp.full_like(counter, ACCEPT_STREAM)))
    return uniform_of_words(words)


def kernel_uniforms(
    kernels: Kernels, seeds: UInt32[jax.Array, " R"], positions: Int[jax.Array, " R"], levels: int
) -> Float[jax.Array, "R levels"]:
    return kernels.gumbel_noise.uniforms(seeds, positions, levels, ACCEPT_STREAM)


uniforms = kernel_or_reference(kernel_uniforms, plain_uniforms)


def gumbel(
    seeds: UInt32[jax.Array, " R"], positions: Int[jax.Array, " R"], vocab: int, stream: Stream
) -> Float[jax.Array, "R vocab"]:
    """Returns the Gumbel noise of all token ids at one position of each row."""
    counter = jnp.arange(-(-vocab // 2), dtype=jnp.uint32)[None, :]
    key = (seeds[:, None], positions.astype(jnp.uint32)[:, None])
    words = threefry2x32(key, (counter, jnp.asarray(stream).astype(jnp.uint32)))
    return noise_of_words(jnp.stack(words, axis=-1).reshape(len(seeds), -1)[:, :vocab])


def gumbel_at(
    seeds: UInt32[jax.Array, " R"],
    positions: Int[jax.Array, " R"],
    tokens: Int[jax.Array, "R some"],
    stream: Stream,
) -> Float[jax.Array, "R some"]:
    """Returns the Gumbel noise of some token ids at one position of each row."""
    counter = (tokens >> 1).astype(jnp.uint32)
    key = (seeds[:, None], positions.astype(jnp.uint32)[:, None])
    even, odd = threefry2x32(key, (counter, jnp.asarray(stream).astype(jnp.uint32)))
    return noise_of_words(jnp.where(tokens % 2 == 0, even, odd))
