"""Activations of MLPs, and soft caps (Triton)."""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def act_and_mul(gate, up, activation: tl.constexpr):
    """Applies an activation, see `shared.models.activation.Activation`; NaN stays NaN."""
    kind: tl.constexpr = activation.kind
    alpha: tl.constexpr = activation.alpha
    limit: tl.constexpr = activation.limit
    inner = gate
    if kind == "gelu_tanh":  # x times the sigmoid of twice the argument of tanh
        inner = (gate + gate * gate * gate * 0.044715) * 1.5957691216057308
    if kind == "swiglu_oai":
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, up)
        up = tl.where(up < -limit, -limit, up) + 1.0
        inner = gate * alpha
    if kind == "scaled_silu":
        gate = gate * alpha
        inner = gate
    out = gate / (1.0 + tl.exp2(-inner * _LOG2_E)) * up
    if kind == "scaled_silu":
        out = out * activation.factor
    return out


@triton.jit
def relu_squared(x):
    """Computes relu(x) squared, the activation of MLPs without a gate; NaN stays NaN."""
    positive = tl.where(x < 0.0, 0.0, x)
    return positive * positive


@triton.jit
def soft_capped(x, cap: tl.constexpr):
    """Applies a soft cap: cap * tanh(x / cap), where tanh(y) is 1 - 2 / (1 + exp(2 y))."""
    growth = tl.exp2(x * (2.0 * _LOG2_E / cap))
    return cap - 2.0 * cap / (1.0 + growth)
