"""What a gated-delta layer makes of its rows before its recurrence and after it, in Triton.

The same for the nodes of a step and for the tokens of a chunk.
"""

import triton
import triton.language as tl

from kernels.triton_gpu.noise import log1p
from kernels.triton_gpu.squares import add_up

LOG2_E = tl.constexpr(1.4426950408889634)
WINDOW = tl.constexpr(3)
_UNIT_EPS = tl.constexpr(1e-6)
_HALVINGS = tl.constexpr(10)  # at most


@triton.jit
def convolved(sources, places, first, D: tl.constexpr, C: tl.constexpr, width: tl.constexpr):
    """The inputs of some channels at each node, and what the convolution makes of them."""
    rows_at, window_at, conv_at, count = sources
    channel = first + tl.arange(0, D)
    for tap in tl.static_range(4):
        place = places[tap]
        # A spare node reads no row.
        is_row = (place >= WINDOW) & (place < WINDOW + count)
        at = rows_at + ((place - WINDOW) * width)[:, None] + channel[None, :]
        new = tl.load(at, mask=is_row[:, None], other=0.0)
        at = window_at + (place * C)[:, None] + channel[None, :]
        is_old = (place < WINDOW)[:, None]
        x = tl.where(is_old, tl.load(at, mask=is_old, other=0.0), new)
        term = x.to(tl.float32) * tl.load(conv_at + channel * 4 + tap).to(tl.float32)[None, :]
        if tap == 0:
            total = term
        else:
            total += term
    return x, silu(total)


@triton.jit
def unit(x, digits: tl.constexpr):
    """Rows of length 1."""
    return x * tl.rsqrt(add_up(x * x, digits) + _UNIT_EPS)[:, None]


@triton.jit
def gates(b, a, a_log, dt_bias):
    """The natural log of each row's decay, and beta."""
    log_decay = -tl.exp2(a_log * LOG2_E) * _softplus(a.to(tl.float32) + dt_bias)
    return log_decay, 1.0 / (1.0 + tl.exp2(-b.to(tl.float32) * LOG2_E))


@triton.jit
def gated_norm(out, z, weight, eps, digits: tl.constexpr):
    """The norm of each row, [rows, V], then its gate."""
    scale = tl.rsqrt(add_up(out * out, digits) * (1.0 / out.shape[1]) + eps)
    return out * scale[:, None] * weight * silu(z.to(tl.float32))


@triton.jit
def silu(x):
    """The gate of the convolution and of the norm."""
    return x / (1.0 + tl.exp2(-x * LOG2_E))


@triton.jit
def _softplus(x):
    """log(1 + exp(x)); where that is x to the last digit, no power is so large as to be none."""
    return tl.where(x <= 20.0, log1p(power(tl.minimum(x, 20.0))), x)


@triton.jit
def power(x):
    """exp(x), but no less than 2^-126: Triton counts what is less as 0, XLA does not."""
    exponent = x * LOG2_E
    return tl.exp2(tl.where(exponent < -126.0, -126.0, exponent))


@triton.jit
def sum_by_halves(x):
    """Sums columns: one half of the rows is added to the other, until one row is left.

    A sum of two has one order, whichever threads have the terms.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    for halving in tl.static_range(1, 1 + _HALVINGS):
        if rows >> halving > 0:
            x = tl.sum(tl.reshape(x, (2, rows >> halving, columns)), 0)
    return tl.reshape(x, (columns,))
