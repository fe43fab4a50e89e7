"""Activations of MLPs, and soft caps (Pallas, Triton backend)."""

import jax.numpy as jnp

from shared.models.activation import GELU_TANH, SCALED_SILU, SWIGLU_OAI

_LOG2_E = 1.4426950408889634


def act_and_mul(gate, up, activation):
    """Applies an activation, see `shared.models.activation.Activation`; NaN stays NaN."""
    inner, limit = gate, activation.limit
    if activation.kind == GELU_TANH:  # x times the sigmoid of twice the argument of tanh
        inner = (gate + gate * gate * gate * 0.044715) * 1.5957691216057308
    if activation.kind == SWIGLU_OAI:
        gate = jnp.where(gate > limit, limit, gate)
        up = jnp.where(up > limit, limit, up)
        up = jnp.where(up < -limit, -limit, up) + 1.0
        inner = gate * activation.alpha
    if activation.kind == SCALED_SILU:
        inner = gate = gate * activation.alpha
    out = gate / (1.0 + jnp.exp2(-inner * _LOG2_E)) * up
    return out * activation.factor if activation.kind == SCALED_SILU else out


def relu_squared(x):
    """Computes relu(x) squared, the activation of MLPs without a gate; NaN stays NaN."""
    positive = jnp.where(x < 0.0, 0.0, x)
    return positive * positive


def soft_capped(x, cap):
    """Applies a soft cap: cap * tanh(x / cap), where tanh(y) is 1 - 2 / (1 + exp(2 y))."""
    growth = jnp.exp2(x * (2.0 * _LOG2_E / cap))
    return cap - 2.0 * cap / (1.0 + growth)
