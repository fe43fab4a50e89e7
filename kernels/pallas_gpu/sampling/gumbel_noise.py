"""Counter-based RNG (Threefry), Gumbel noise and reproducible logarithms (Pallas, Triton backend).

Implements `shared.spec.gumbel_noise.gumbel`. Library logarithms differ between languages and
machines. This logarithm, of sums and products, has the same bits everywhere and an error of about
one unit in the last place.
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
)  # the first has few digits, so its products are exact
LOG_TERMS = (
    *(0.33333313, -0.2500001, 0.20002119, -0.16667995, 0.14219546),
    *(-0.124055944, 0.118882045, -0.11675638, 0.06746532),
)
"""Coefficients of (log(1 + f) - f + f^2 / 2) / f^3 for 1 + f from sqrt(1/2) to sqrt(2)."""

MOST_NOISE = 16.7
"""Upper bound of the noise: a uniform number is at most 1 - 2^-24, so noise is at most 16.64."""

_ROOT_HALF = 0x3F3504F3  # bits of sqrt(1/2)


def uniforms(
    seeds: UInt32[jax.Array, " R"],
    positions: Int[jax.Array, " R"],
    levels: int,
    stream: int,
    interpret: bool = False,
) -> Float[jax.Array, "R levels"]:
    """Implements `shared.spec.gumbel_noise.uniforms` for one RNG stream."""
    return pl.pallas_call(
        functools.partial(_uniforms_kernel, stream=stream),
        grid=(len(seeds),),
        out_shape=jax.ShapeDtypeStruct((len(seeds), levels), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="gumbel_noise",
    )(seeds, positions)


def _uniforms_kernel(seeds_ref, positions_ref, out_ref, *, stream):
    """One program per row."""
    row, levels = pl.program_id(0), out_ref.shape[1]
    level = lax.iota(jnp.int32, pl.next_power_of_2(levels))
    counter, is_level = level.astype(jnp.uint32), level < levels
    key = (seeds_ref[row], positions_ref[row].astype(jnp.uint32))
    words, _ = threefry(*key, counter, jnp.zeros_like(counter) + jnp.uint32(stream))
    # Levels that are not stored get an index outside the array, which the interpreter requires.
    at = jnp.where(is_level, level, levels)
    pltriton.store(out_ref.at[row, at], uniform_of(words), mask=is_level)


def threefry(key0, key1, x0, x1):
    """Computes Threefry-2x32 with 20 rounds: two words from a two-word key and counter."""
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
    """Computes the natural logarithm of normal numbers above 0."""
    mantissa, exponent = _parts(x)
    return _log(mantissa - 1, exponent)


def log1p(x):
    """Computes the natural logarithm of 1 + x for x >= 0."""
    mantissa, exponent = _parts(1 + x)
    # Below sqrt(2), x is used as it is, so a small x keeps all its bits.
    return _log(jnp.where(exponent == 0, x, mantissa - 1), exponent)


def noise_of_words(words):
    """Converts uniform 32-bit words to Gumbel noise."""
    uniform = uniform_of(words)
    mantissa, exponent = _parts(1 - uniform)
    # Below sqrt(1/2), the rounding of 1 - uniform does not show in the logarithm.
    fraction = jnp.where(exponent == 0, -uniform, mantissa - 1)
    return -log(-_log(fraction, exponent))


def max_noise(words):
    """Computes a cheap upper bound of `noise_of_words`, which is below -log(uniform).

    The bits of a float, read as an integer, are piecewise linear between powers of two and never
    exceed its logarithm.
    """
    bits = lax.bitcast_convert_type(uniform_of(words), jnp.int32)
    return (127.001 - bits.astype(jnp.float32) * 2.0**-23) * 0.6931472


def uniform_of(words):
    """Converts uniform 32-bit words to floats in (0, 1), both ends excluded."""
    return jnp.minimum(words.astype(jnp.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)


def _parts(x):
    """Splits numbers into mantissas from sqrt(1/2) to sqrt(2) and exponents of 2."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    exponent = (bits - _ROOT_HALF) >> 23
    return lax.bitcast_convert_type(bits - (exponent << 23), jnp.float32), exponent


def _log(fraction, exponent):
    """Computes the logarithm of 2^exponent * (1 + fraction)."""
    power = exponent.astype(jnp.float32)
    square = fraction * fraction
    series = jnp.full_like(fraction, LOG_TERMS[8])
    for i in range(8):
        series = series * fraction + LOG_TERMS[7 - i]
    rest = series * fraction * square + power * LN2_LOW - square * 0.5
    return (fraction + rest) + power * LN2_HIGH


def words_of(seed, position, stream, pairs):
    """Computes the RNG words of ids 2 * pair and 2 * pair + 1, [..., 2]; they share one counter.

    Args:
      seed, position, stream: Same as in the specification, one word each.
      pairs: Pair numbers, [..., 1].
    """
    counter = pairs.astype(jnp.uint32)
    x0, x1 = threefry(seed, position, counter, jnp.zeros_like(counter) + stream)
    is_first = lax.iota(jnp.int32, 2)[None, None, :] == 0
    return jnp.where(is_first, x0, x1)
