"""Convolution, gates and norms around the recurrence of GDN and Mamba2 layers (Triton).

Used for the nodes of a verify step and for the tokens of a prefill chunk.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_gpu.gemm.sum_of_squares import add_up
from kernels.triton_gpu.sampling.gumbel_noise import log1p

LOG2_E = tl.constexpr(1.4426950408889634)
WINDOW = tl.constexpr(3)
_UNIT_EPS = tl.constexpr(1e-6)
_HALVINGS = tl.constexpr(10)  # maximum; enough for 1,024 rows


class GDNLayerWeights(NamedTuple):
    """Weights of a layer, and the epsilon of its norm.

    The bias of the convolution may be None. The norm is None for Mamba2, and `skip` for GDN.
    """

    conv: Any
    conv_bias: Any
    a_log: Any
    dt_bias: Any
    skip: Any
    norm: Any
    eps: Any


class States(NamedTuple):
    """States of all slots, or all snapshots."""

    recurrent: Any
    window: Any


def check_contiguous(*states: Tensor) -> None:
    """Raises ValueError if a state is not contiguous."""
    if not all(x.is_contiguous() for x in states):
        raise ValueError("states must be contiguous")


class Inputs(NamedTuple):
    """Inputs of a request's convolution: its rows and the conv state before them.

    `rows` is the address of the first row's channels.
    """

    rows: Any
    window: Any
    count: Any


@triton.jit
def convolved(inputs, weights, places, first, D: tl.constexpr, sizes: tl.constexpr):
    """Returns the inputs of some channels at each node, and their causal convolution with SiLU."""
    channel = first + tl.arange(0, D)
    for tap in tl.static_range(4):
        place = places[tap]
        # Spare nodes read no row.
        is_row = (place >= WINDOW) & (place < WINDOW + inputs.count)
        at = inputs.rows + ((place - WINDOW) * sizes.width)[:, None] + channel[None, :]
        new = tl.load(at, mask=is_row[:, None], other=0.0)
        at = inputs.window + (place * sizes.C)[:, None] + channel[None, :]
        is_old = (place < WINDOW)[:, None]
        x = tl.where(is_old, tl.load(at, mask=is_old, other=0.0), new)
        term = x.to(tl.float32) * tl.load(weights.conv + channel * 4 + tap).to(tl.float32)[None, :]
        if tap == 0:
            total = term
        else:
            total += term
    if sizes.has_bias:
        total += tl.load(weights.conv_bias + channel).to(tl.float32)[None, :]
    return x, silu(total)


@triton.jit
def rounded(x, rows_at):
    """Rounds to the type of the projected rows."""
    return x.to(rows_at.dtype.element_ty).to(tl.float32)


@triton.jit
def unit(x, digits: tl.constexpr):
    """Normalises rows to unit length."""
    return x * tl.rsqrt(add_up(x * x, digits) + _UNIT_EPS)[:, None]


@triton.jit
def gates(b, a, a_log, dt_bias):
    """Computes the natural log of the decay, and beta, of each row."""
    log_decay = -tl.exp2(a_log * LOG2_E) * _softplus(a.to(tl.float32) + dt_bias)
    return log_decay, 1.0 / (1.0 + tl.exp2(-b.to(tl.float32) * LOG2_E))


@triton.jit
def time_steps(dt, a_log, dt_bias):
    """Computes the time step of each row of a Mamba2 head, and the natural log of the decay."""
    dt = _softplus(dt.to(tl.float32) + dt_bias)
    return dt, -dt * tl.exp2(a_log * LOG2_E)


@triton.jit
def gated_norm(out, z, weight, eps, digits: tl.constexpr):
    """Applies the RMS norm to each row, [rows, V], then the gate silu(z)."""
    scale = tl.rsqrt(add_up(out * out, digits) * (1.0 / out.shape[1]) + eps)
    return out * scale[:, None] * weight * silu(z.to(tl.float32))


@triton.jit
def silu(x):
    """Computes x * sigmoid(x)."""
    return x / (1.0 + tl.exp2(-x * LOG2_E))


@triton.jit
def _softplus(x):
    """Computes log(1 + exp(x)); above 20 it equals x in float32, and exp(x) is not computed."""
    return tl.where(x <= 20.0, log1p(power(tl.minimum(x, 20.0))), x)


@triton.jit
def power(x):
    """Computes exp(x), at least 2^-126: Triton flushes subnormal numbers to 0, XLA does not."""
    exponent = x * LOG2_E
    return tl.exp2(tl.where(exponent < -126.0, -126.0, exponent))


@triton.jit
def sum_by_halves(x):
    """Sums over rows by repeatedly adding one half of them to the other.

    Each addition has two terms, so the result does not depend on the assignment of rows to threads.
    """
    rows: tl.constexpr = x.shape[0]
    columns: tl.constexpr = x.shape[1]
    for halving in tl.static_range(1, 1 + _HALVINGS):
        if rows >> halving > 0:
            x = tl.sum(tl.reshape(x, (2, rows >> halving, columns)), 0)
    return tl.reshape(x, (columns,))
