"""Convolution, gates and norms around the gated delta net recurrence (Triton).

The same for the nodes of a step and for the tokens of a chunk.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from kernels.triton_gpu.gemm.sum_of_squares import add_up
from kernels.triton_gpu.sampling.gumbel_noise import log1p

LOG2_E = tl.constexpr(1.4426950408889634)
WINDOW = tl.constexpr(3)
_UNIT_EPS = tl.constexpr(1e-6)
_HALVINGS = tl.constexpr(10)  # at most


class GDNSizes(NamedTuple):
    """Sizes of a layer.

    Attributes:
      H, K, V: Value heads, and the numbers of a key and of a value.
      C: Channels of the convolution.
      width: Numbers of a projected row.
    """

    H: int
    K: int
    V: int
    C: int
    key_heads: int
    width: int


def sizes_of(
    recurrent: Float[Tensor, "L states H K V"], window: Float[Tensor, "L states 3 C"]
) -> GDNSizes:
    """Of the layers that have such states."""
    (H, K, V), C = recurrent.shape[2:], window.shape[3]
    return GDNSizes(H=H, K=K, V=V, C=C, key_heads=(C - H * V) // (2 * K), width=C + H * V + 2 * H)


class GDNLayerWeights(NamedTuple):
    """Of a layer."""

    conv: Any
    a_log: Any
    dt_bias: Any
    norm: Any
    eps: Any


class States(NamedTuple):
    """States of all slots, or all snapshots."""

    recurrent: Any
    window: Any


def check_contiguous(*states: Tensor) -> None:
    """Raises ValueError where some state is not contiguous."""
    if not all(x.is_contiguous() for x in states):
        raise ValueError("states must be contiguous")


class Inputs(NamedTuple):
    """Inputs of a request's convolution: its rows and the window before them."""

    rows: Any
    window: Any
    count: Any


@triton.jit
def convolved(inputs, conv_at, places, first, D: tl.constexpr, sizes: tl.constexpr):
    """The inputs of some channels at each node, and what the convolution makes of them."""
    channel = first + tl.arange(0, D)
    for tap in tl.static_range(4):
        place = places[tap]
        # A spare node reads no row.
        is_row = (place >= WINDOW) & (place < WINDOW + inputs.count)
        at = inputs.rows + ((place - WINDOW) * sizes.width)[:, None] + channel[None, :]
        new = tl.load(at, mask=is_row[:, None], other=0.0)
        at = inputs.window + (place * sizes.C)[:, None] + channel[None, :]
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
