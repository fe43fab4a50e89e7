"""Gumbel noise and logarithms by sums and products alone, for Pallas.

As `shared.spec.gumbel_noise.gumbel`. A library's logarithm is another one in each language and on
each machine; this one has the same bits everywhere and errs by about one unit in the last place.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int, UInt32

ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
LN2_HIGH, LN2_LOW = (
    0.693359375,
    -2.1219444e-4,
)  # the first has so few digits that products are exact
LOG_TERMS = (
    *(0.33333313, -0.2500001, 0.20002119, -0.16667995, 0.14219546),
    *(-0.124055944, 0.118882045, -0.11675638, 0.06746532),
)
"""Coefficients of (log(1 + f) - f + f^2 / 2) / f^3 for 1 + f from sqrt(1/2) to sqrt(2)."""

MOST_NOISE = 16.7
"""Above all noise: a uniform number is at most 1 - 2^-24, so none lies above 16.64."""

_ROOT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)


def uniforms(
    seeds: UInt32[jax.Array, " R"],
    positions: Int[jax.Array, " R"],
    levels: int,
    stream: int,
    interpret: bool = False,
) -> Float[jax.Array, "R levels"]:
    """As `shared.spec.gumbel_noise.uniforms`, of a stream."""
    return pl.pallas_call(
        functools.partial(_uniforms_kernel, stream=stream),
        grid=(len(seeds),),
        out_shape=jax.ShapeDtypeStruct((len(seeds), levels), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="uniforms",
    )(seeds, positions)


def _uniforms_kernel(seeds_ref, positions_ref, out_ref, *, stream):
    """One program per row."""
    row, levels = pl.program_id(0), out_ref.shape[1]
    level = lax.iota(jnp.int32, pl.next_power_of_2(levels))
    counter, is_level = level.astype(jnp.uint32), level < levels
    key = (seeds_ref[row], positions_ref[row].astype(jnp.uint32))
    words, _ = threefry(*key, counter, jnp.zeros_like(counter) + jnp.uint32(stream))
    # A level that is not written gets a place outside, for the interpreter.
    at = jnp.where(is_level, level, levels)
    pltriton.store(out_ref.at[row, at], uniform_of(words), mask=is_level)


def threefry(key0, key1, x0, x1):
    """Threefry-2x32 with 20 rounds: two words from a key and a counter of two words each."""
    keys = (key0, key1, key0 ^ key1 ^ jnp.uint32(PARITY))
    x0, x1 = x0 + key0, x1 + key1
    for group in range(5):
        for step in range(4):
            x0 = x0 + x1
            x1 = _rotated(x1, ROTATIONS[4 * (group % 2) + step]) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x0, x1


def _rotated(x, by):
    return (x << jnp.uint32(by)) | (x >> jnp.uint32(32 - by))


def log(x):
    """The natural logarithm of normal numbers above 0."""
    mantissa, exponent = _parts(x)
    return _log(mantissa - 1, exponent)


def log1p(x):
    """The natural logarithm of 1 + x for numbers from 0 on."""
    mantissa, exponent = _parts(1 + x)
    # Below sqrt(2) nothing is lost of a small x.
    return _log(jnp.where(exponent == 0, x, mantissa - 1), exponent)


def noise_of_words(words):
    """Gumbel noise from uniform 32-bit words."""
    uniform = uniform_of(words)
    mantissa, exponent = _parts(1 - uniform)
    # Below sqrt(1/2) nothing is lost in 1 - uniform that the logarithm would show.
    fraction = jnp.where(exponent == 0, -uniform, mantissa - 1)
    return -log(-_log(fraction, exponent))


def most_noise(words):
    """Bounds of `noise_of_words`, for much less: it lies below -log(uniform).

    The bits of a float lie below its logarithm, as straight lines from power of 2 to power do.
    """
    bits = lax.bitcast_convert_type(uniform_of(words), jnp.int32)
    return (127.001 - bits.astype(jnp.float32) * 2.0**-23) * 0.6931472


def uniform_of(words):
    """Numbers from 0 to 1, neither of which is one, from uniform 32-bit words."""
    return jnp.minimum(words.astype(jnp.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)


def _parts(x):
    """Mantissas from sqrt(1/2) to sqrt(2), and exponents of 2."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits - _ROOT_HALF) >> 23
    return lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32), exponent


def _log(fraction, exponent):
    """Of 2^exponent * (1 + fraction)."""
    power = exponent.astype(jnp.float32)
    square = fraction * fraction
    series = jnp.full_like(fraction, LOG_TERMS[8])
    for i in range(8):
        series = series * fraction + LOG_TERMS[7 - i]
    rest = series * fraction * square + power * LN2_LOW - square * 0.5
    return (fraction + rest) + power * LN2_HIGH


def words_of(seed, position, stream, pairs):
    """The words of the noise of the ids 2 * pair and 2 * pair + 1, [..., 2], of one counter.

    Args:
      seed, position, stream: As in the specification, words each.
      pairs: Numbers of pairs, [..., 1].
    """
    counter = pairs.astype(jnp.uint32)
    x0, x1 = threefry(seed, position, counter, jnp.zeros_like(counter) + stream)
    is_first = lax.iota(jnp.int32, 2)[None, None, :] == 0
    return jnp.where(is_first, x0, x1)
