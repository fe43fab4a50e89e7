"""Convolution, gates and norms around the recurrence of GDN and Mamba2 layers (Pallas, Triton
backend).

Used for the nodes of a verify step and for the tokens of a prefill chunk.
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
    """Weights of a layer, or of all layers.

    The bias of the convolution may be None. The norm is None for Mamba2, and `skip` for GDN.
    """

    conv: Any
    conv_bias: Any
    a_log: Any
    dt_bias: Any
    skip: Any
    norm: Any


class States(NamedTuple):
    """States of all slots, or all snapshots."""

    recurrent: Any
    window: Any


class Inputs(NamedTuple):
    """Inputs of a request's convolution: its rows and the conv state before them.

    `first` is the first column of the channels in the rows.
    """

    projected: Any
    first: Any
    window: Any
    layer: Any
    slot: Any
    start: Any
    count: Any


def of_layer(ref, rank, layer, *at):
    """Loads elements of a layer's parameter, or of the stack over all layers."""
    lead = (layer,) if len(ref.shape) > rank else ()
    return pltriton.load(ref.at[(*lead, *at)])


def convolved(inputs, weights, places, channel):
    """Returns the inputs of some channels at each node, and their causal convolution with SiLU."""
    total: Any = None
    for tap, place in enumerate(places):
        is_old, place = (place < WINDOW)[:, None], place[:, None]
        # Spare nodes read no row.
        is_row = (place >= WINDOW) & (place < WINDOW + inputs.count)
        at = inputs.projected.at[inputs.start + place - WINDOW, inputs.first + channel]
        new = pltriton.load(at, mask=is_row, other=0.0)
        at = inputs.window.at[inputs.layer, inputs.slot, place, channel]
        x = jnp.where(is_old, pltriton.load(at, mask=is_old, other=0.0), new)
        tap_of = of_layer(weights.conv, 2, inputs.layer, channel[0], tap).astype(jnp.float32)
        term = x.astype(jnp.float32) * tap_of[None, :]
        total = term if total is None else total + term
    if weights.conv_bias is not None:
        bias = of_layer(weights.conv_bias, 1, inputs.layer, channel[0])
        total = total + bias.astype(jnp.float32)[None, :]
    return x, silu(total)


def rounded(x, rows_ref):
    """Rounds to the type of the projected rows."""
    return x.astype(rows_ref.dtype).astype(jnp.float32)


def unit(x, digits):
    """Normalises rows to unit length."""
    return x * lax.rsqrt(add_up(x * x, digits) + _UNIT_EPS)[:, None]


def gates(b, a, a_log, dt_bias):
    """Computes the natural log of the decay, and beta, of each row."""
    log_decay = -jnp.exp2(a_log * LOG2_E) * _softplus(a.astype(jnp.float32) + dt_bias)
    return log_decay, 1.0 / (1.0 + jnp.exp2(-b.astype(jnp.float32) * LOG2_E))


def time_steps(dt, a_log, dt_bias):
    """Computes the time step of each row of a Mamba2 head, and the natural log of the decay."""
    dt = _softplus(dt.astype(jnp.float32) + dt_bias)
    return dt, -dt * jnp.exp2(a_log * LOG2_E)


def gated_norm(out, z, weight, eps, digits):
    """Applies the RMS norm to each row, [rows, V], then the gate silu(z)."""
    scale = lax.rsqrt(add_up(out * out, digits) * (1.0 / out.shape[1]) + eps)
    return out * scale[:, None] * weight * silu(z.astype(jnp.float32))


def silu(x):
    """Computes x * sigmoid(x)."""
    return x / (1.0 + jnp.exp2(-x * LOG2_E))


def _softplus(x):
    """Computes log(1 + exp(x)); above 20 it equals x in float32, and exp(x) is not computed."""
    return jnp.where(x <= 20.0, log1p(power(jnp.minimum(x, 20.0))), x)


def power(x):
    """Computes exp(x), at least 2^-126: Triton flushes subnormal numbers to 0, XLA does not."""
    exponent = x * LOG2_E
    return jnp.exp2(jnp.where(exponent < -126.0, -126.0, exponent))


def sum_by_halves(x):
    """Sums over rows by repeatedly adding one half of them to the other.

    Each addition has two terms, so the result does not depend on the assignment of rows to threads.
    """
    rows, columns = x.shape
    while rows > 1:
        rows //= 2
        x = jnp.sum(x.reshape(2, rows, columns), axis=0)
    return x.reshape(columns)
