"""Mamba2: the inputs of its recurrence, and its output norm.

Head h of group g = h // (heads / groups) has a state `[N, P]`. A token with channels x `[P]`, B and
C `[N]`, and time step dt first decays it, then adds an outer product; the output reads it after:

    state = exp(-dt exp(a_log)) state + B (dt x)^T
    out = state^T C + skip x

This is the recurrence of `shared.spec.gated_delta` without the delta rule: B is the key, C the
query and dt x the value. `gated_delta.step`, `verify` and `chunked` compute it if beta is None.

Source: Transformers are SSMs, Dao and Gu 2024, arXiv:2405.21060.
"""

import numpy as np
from jaxtyping import Float

from shared.models.mixers.mamba2 import Mamba2Config, OutputNorm
from shared.spec import layers
from shared.spec.gated_delta import RecurrenceInputs


def scaled_inputs(
    inputs: Float[np.ndarray, "R outputs"], sizes: Mamba2Config
) -> Float[np.ndarray, "R outputs"]:
    """Multiplies the parts of the input projection by their factors."""
    if {*sizes.input_factors} == {1.0}:
        return inputs
    factors = np.repeat(np.array(sizes.input_factors, np.float32), sizes.input_sections)
    return (inputs * factors).astype(inputs.dtype)


def recurrence_inputs(
    channels: Float[np.ndarray, "R C"],
    dt: Float[np.ndarray, "R H"],
    a_log: Float[np.ndarray, " H"],
    dt_bias: Float[np.ndarray, " H"],
    skip: Float[np.ndarray, " H"],
    sizes: Mamba2Config,
) -> RecurrenceInputs:
    """Computes the inputs of the recurrence from the convolution's output and the time steps.

    Args:
      channels: x of all heads, then B of all groups, then C of all groups.
      dt: Time steps before the bias and softplus.
      a_log, dt_bias, skip: Parameters of each head.
      sizes: Config of the layer.
    """
    (H, N, P), G, R = sizes.state_shape, sizes.num_groups, len(channels)
    x, b, c = np.split(channels, [H * P, H * P + G * N], axis=-1)
    x = x.reshape(R, H, P)
    k, q = (np.repeat(each.reshape(R, G, N), H // G, axis=1) for each in (b, c))
    dt = layers.softplus(dt + dt_bias)
    return RecurrenceInputs(
        q=q,
        k=k,
        v=dt[..., None] * x,
        log_decay=-dt * np.exp(a_log),
        beta=None,
        skipped=skip[:, None] * x,
    )


def output_norm(
    out: Float[np.ndarray, "R values"],
    z: Float[np.ndarray, "R values"],
    weight: Float[np.ndarray, " values"] | None,
    eps: float,
    sizes: Mamba2Config,
) -> Float[np.ndarray, "R values"]:
    """Applies the gate silu(z), and before or after it an RMS norm in groups of columns."""
    gate, factor = layers.silu(z), np.float32(sizes.out_factor)
    if weight is None:
        return out * gate * factor
    normed = out * gate if sizes.norm is OutputNorm.AFTER_GATE else out
    groups = normed.reshape(len(out), -1, sizes.norm_size)
    normed = weight * layers.rms_norm(groups, None, eps).reshape(out.shape)
    return (normed if sizes.norm is OutputNorm.AFTER_GATE else normed * gate) * factor
