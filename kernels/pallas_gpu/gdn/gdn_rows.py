"""Convolution, gates and norms around the gated delta net recurrence (Pallas, Triton backend).

The same for the nodes of a step and for the tokens of a chunk.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.gemm.sum_of_squares import add_up
from kernels.pallas_gpu.sampling.gumbel_noise import log1p

LOG2_E = 1.4426950408889634
WINDOW = 3
_UNIT_EPS = 1e-6


class GDNLayerWeights(NamedTuple):
    """Weights of a layer, or of all layers."""

    conv: Any
    a_log: Any
    dt_bias: Any
    norm: Any


class States(NamedTuple):
    """States of all slots, or all snapshots."""

    recurrent: Any
    window: Any


class Inputs(NamedTuple):
    """Inputs of a request's convolution: its rows and the window before them."""

    projected: Any
    window: Any
    layer: Any
    slot: Any
    start: Any
    count: Any


def of_layer(ref, rank, layer, *at):
    """Of a layer's parameter, or of a stack of all layers' ones."""
    lead = (layer,) if len(ref.shape) > rank else ()
    return pltriton.load(ref.at[(*lead, *at)])


def convolved(inputs, conv_ref, places, channel):
    """The inputs of some channels at each node, and what the convolution makes of them."""
    total = None
    for tap, place in enumerate(places):
        is_old, place = (place < WINDOW)[:, None], place[:, None]
        # A spare node reads no row.
        is_row = (place >= WINDOW) & (place < WINDOW + inputs.count)
        at = inputs.projected.at[inputs.start + place - WINDOW, channel]
        new = pltriton.load(at, mask=is_row, other=0.0)
        at = inputs.window.at[inputs.layer, inputs.slot, place, channel]
        x = jnp.where(is_old, pltriton.load(at, mask=is_old, other=0.0), new)
        tap_of = of_layer(conv_ref, 2, inputs.layer, channel[0], tap).astype(jnp.float32)
        term = x.astype(jnp.float32) * tap_of[None, :]
        total = term if total is None else total + term
    return x, silu(total)


def unit(x, digits):
    """Rows of length 1."""
    return x * lax.rsqrt(add_up(x * x, digits) + _UNIT_EPS)[:, None]


def gates(b, a, a_log, dt_bias):
    """The natural log of each row's decay, and beta."""
    log_decay = -jnp.exp2(a_log * LOG2_E) * _softplus(a.astype(jnp.float32) + dt_bias)
    return log_decay, 1.0 / (1.0 + jnp.exp2(-b.astype(jnp.float32) * LOG2_E))


def gated_norm(out, z, weight, eps, digits):
    """The norm of each row, [rows, V], then its gate."""
    scale = lax.rsqrt(add_up(out * out, digits) * (1.0 / out.shape[1]) + eps)
    return out * scale[:, None] * weight * silu(z.astype(jnp.float32))


def silu(x):
    """The gate of the convolution and of the norm."""
    return x / (1.0 + jnp.exp2(-x * LOG2_E))


def _softplus(x):
    """log(1 + exp(x)); where that is x to the last digit, no power is so large as to be none."""
    return jnp.where(x <= 20.0, log1p(power(jnp.minimum(x, 20.0))), x)


def power(x):
    """exp(x), but no less than 2^-126: Triton counts what is less as 0, XLA does not."""
    exponent = x * LOG2_E
    return jnp.exp2(jnp.where(exponent < -126.0, -126.0, exponent))


def sum_by_halves(x):
    """Sums columns: one half of the rows is added to the other, until one row is left.

    A sum of two has one order, whichever threads have the terms.
    """
    rows, columns = x.shape
    while rows > 1:
        rows //= 2
        x = jnp.sum(x.reshape(2, rows, columns), axis=0)
    return x.reshape(columns)
