"""Counter-based RNG (Threefry), Gumbel noise and reproducible logarithms (Triton).

Implements `shared.spec.gumbel_noise.gumbel`. Library logarithms differ between languages and
machines. This logarithm, of sums and products, has the same bits everywhere and an error of about
one unit in the last place.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

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

MOST_NOISE = tl.constexpr(16.7)
"""Upper bound of the noise: a uniform number is at most 1 - 2^-24, so noise is at most 16.64."""

_ROTATIONS = tl.constexpr(ROTATIONS)
_PARITY = tl.constexpr(PARITY)
_LOG_TERMS = tl.constexpr(LOG_TERMS)
_LN2_HIGH, _LN2_LOW = tl.constexpr(LN2_HIGH), tl.constexpr(LN2_LOW)
_ROOT_HALF = tl.constexpr(0x3F3504F3)  # bits of sqrt(1/2)


def uniforms(
    seeds: Int[Tensor, " R"], positions: Int[Tensor, " R"], levels: int, stream: int
) -> Float[Tensor, "R levels"]:
    """Implements `shared.spec.gumbel_noise.uniforms` for one RNG stream."""
    out = torch.empty((len(seeds), levels), dtype=torch.float32, device=seeds.device)
    lanes = triton.next_power_of_2(levels)
    _uniforms_kernel[(len(seeds),)](
        *(seeds.contiguous(), positions.contiguous(), out),
        levels=levels,
        lanes=lanes,
        word=stream,  # `stream` is a launch argument of Triton
        num_warps=1,
        enable_fp_fusion=False,
    )
    return out


@triton.jit
def _uniforms_kernel(
    seeds_at,
    positions_at,
    out_at,
    levels: tl.constexpr,
    lanes: tl.constexpr,
    word: tl.constexpr,
):
    """One program per row."""
    row, level = tl.program_id(0), tl.arange(0, lanes)
    seed, position = tl.load(seeds_at + row).to(tl.uint32), tl.load(positions_at + row)
    counter = level.to(tl.uint32)
    words, _ = threefry(seed, position.to(tl.uint32), counter, counter * 0 + word)
    tl.store(out_at + row * levels + level, uniform_of(words), mask=level < levels)


@triton.jit
def threefry(key0, key1, x0, x1):
    """Computes Threefry-2x32 with 20 rounds: two words from a two-word key and counter."""
    key2 = key0 ^ key1 ^ _PARITY
    keys = (key0, key1, key2)
    x0, x1 = x0 + key0, x1 + key1
    for group in tl.static_range(5):
        for step in tl.static_range(4):
            x0 = x0 + x1
            x1 = _rotated(x1, _ROTATIONS[4 * (group % 2) + step]) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + (group + 1)
    return x0, x1


@triton.jit
def _rotated(x, by: tl.constexpr):
    return (x << by) | (x >> (32 - by))


@triton.jit
def log(x):
    """Computes the natural logarithm of normal numbers above 0."""
    mantissa, exponent = _parts(x)
    return _log(mantissa - 1, exponent)


@triton.jit
def log1p(x):
    """Computes the natural logarithm of 1 + x for x >= 0."""
    mantissa, exponent = _parts(1 + x)
    # Below sqrt(2), x is used as it is, so a small x keeps all its bits.
    return _log(tl.where(exponent == 0, x, mantissa - 1), exponent)


@triton.jit
def noise_of_words(words):
    """Converts uniform 32-bit words to Gumbel noise."""
    uniform = uniform_of(words)
    mantissa, exponent = _parts(1 - uniform)
    # Below sqrt(1/2), the rounding of 1 - uniform does not show in the logarithm.
    fraction = tl.where(exponent == 0, -uniform, mantissa - 1)
    return -log(-_log(fraction, exponent))


@triton.jit
def max_noise(words):
    """Computes a cheap upper bound of `noise_of_words`, which is below -log(uniform).

    The bits of a float, read as an integer, are piecewise linear between powers of two and never
    exceed its logarithm.
    """
    bits = uniform_of(words).to(tl.int32, bitcast=True)
    return (127.001 - bits.to(tl.float32) * 2.0**-23) * 0.6931472


@triton.jit
def uniform_of(words):
    """Converts uniform 32-bit words to floats in (0, 1), both ends excluded."""
    return tl.minimum(words.to(tl.float32) * 2.0**-32 + 2.0**-33, 1 - 2.0**-24)


@triton.jit
def _parts(x):
    """Splits numbers into mantissas from sqrt(1/2) to sqrt(2) and exponents of 2."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _ROOT_HALF) >> 23
    return (bits - (exponent << 23)).to(tl.float32, bitcast=True), exponent


@triton.jit
def _log(fraction, exponent):
    """Computes the logarithm of 2^exponent * (1 + fraction)."""
    power = exponent.to(tl.float32)
    square = fraction * fraction
    series = fraction * 0 + _LOG_TERMS[8]
    for i in tl.static_range(8):
        series = series * fraction + _LOG_TERMS[7 - i]
    rest = series * fraction * square + power * _LN2_LOW - square * 0.5
    return (fraction + rest) + power * _LN2_HIGH


@triton.jit
def words_of(seed, position, stream, pairs):
    """Computes the RNG words of ids 2 * pair and 2 * pair + 1, [..., 2]; they share one counter.

    Args:
      seed, position, stream: Same as in the specification, one word each.
      pairs: Pair numbers, [..., 1].
    """
    counter = pairs.to(tl.uint32)
    x0, x1 = threefry(seed, position, counter, counter * 0 + stream)
    is_first = tl.arange(0, 2)[None, None, :] == 0
    return tl.where(is_first, x0, x1)
