"""Mamba2: the inputs of its recurrence, and its output norm; same as `shared.spec.mamba2`."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from jax_impl.ops import Kernels, Norm, alone, is_bfloat16, kernel_or_reference, operand, stacked
from jax_impl.ops.collectives import all_gather
from jax_impl.ops.gemm import layers
from jax_impl.ops.recurrent.gated_delta import RecurrenceInputs
from shared.boundary.tp_group import TPGroup
from shared.models.mixers.mamba2 import Mamba2Config, OutputNorm
from shared.spec.reduction_order import SQUARES


def scaled_inputs(
    inputs: Float[jax.Array, "R outputs"], sizes: Mamba2Config
) -> Float[jax.Array, "R outputs"]:
    """Same as the specification."""
    if {*sizes.input_factors} == {1.0}:
        return inputs
    factors = np.repeat(np.array(sizes.input_factors, np.float32), sizes.input_sections)
    return (inputs.astype(jnp.float32) * factors).astype(inputs.dtype)


def recurrence_inputs(
    channels: Float[jax.Array, "R C"],
    dt: Float[jax.Array, "R H"],
    a_log: Float[jax.Array, " H"],
    dt_bias: Float[jax.Array, " H"],
    skip: Float[jax.Array, " H"],
    sizes: Mamba2Config,
) -> RecurrenceInputs:
    """Same as the specification; channels are rounded to the dtype of `dt`."""
    (H, N, P), G, R = sizes.state_shape, sizes.num_groups, len(channels)
    rounded = channels.astype(dt.dtype).astype(jnp.float32)
    x, b, c = jnp.split(rounded, [H * P, H * P + G * N], axis=1)
    x = x.reshape(R, H, P)
    k, q = (jnp.repeat(each.reshape(R, G, N), H // G, axis=1) for each in (b, c))
    dt = layers.softplus(dt.astype(jnp.float32) + dt_bias)
    return RecurrenceInputs(
        q=q,
        k=k,
        v=dt[..., None] * x,
        log_decay=-dt * jnp.exp(a_log),
        beta=None,
        skipped=skip[:, None] * x,
    )


def output_norm(
    out: Float[jax.Array, "R values"],
    z: Float[jax.Array, "R values"],
    weight: Float[jax.Array, " values"] | None,
    eps: float,
    sizes: Mamba2Config,
    group: TPGroup,
) -> Float[jax.Array, "R values"]:
    """Same as the specification, in float32; the result has the dtype of `z`.

    Ranks of the tensor-parallel group gather the columns of a group of the norm that they share.
    """
    gate, out = layers.silu(z.astype(jnp.float32)), out.astype(jnp.float32)
    if weight is None:
        return (out * gate * sizes.out_factor).astype(z.dtype)
    is_gated = sizes.norm is OutputNorm.AFTER_GATE
    normed = weight * _normed(out * gate if is_gated else out, eps, sizes, group)
    return ((normed if is_gated else normed * gate) * sizes.out_factor).astype(z.dtype)


def plain_gated_output(
    out: Float[jax.Array, "R values"],
    inputs: Float[jax.Array, "R outputs"],
    weight: Norm | None,
    eps: float,
    sizes: Mamba2Config,
    group: TPGroup,
) -> Float[jax.Array, "R values"]:
    """Applies `output_norm` with the gate, which begins the input projection."""
    return output_norm(out, inputs[:, : sizes.values], alone(weight), eps, sizes, group)


def kernel_gated_output(
    kernels: Kernels,
    out: Float[jax.Array, "R values"],
    inputs: Float[jax.Array, "R outputs"],
    weight: Norm | None,
    eps: float,
    sizes: Mamba2Config,
    group: TPGroup,
) -> Float[jax.Array, "R values"]:
    if sizes.has_cut_norm and not sizes.has_whole_chunks(SQUARES.chunk):
        return plain_gated_output(out, inputs, weight, eps, sizes, group)
    (stack, layer), gates_first = stacked(weight), sizes.norm is not OutputNorm.BEFORE_GATE
    sums, first, norm = None, 0, kernels.mamba2_output
    if sizes.has_cut_norm:
        own = norm.squares_of_chunks(out, inputs, gates_first=gates_first, order=SQUARES)
        sums = all_gather.all_gather(group, own)
        first = all_gather.number(group) * (sizes.values // SQUARES.chunk)
    return norm.gated_output(
        out,
        inputs,
        stack,
        sums,
        operand(first),
        operand(layer),
        eps=eps,
        norm_size=sizes.values if weight is None else sizes.norm_size,
        gates_first=gates_first,
        factor=sizes.out_factor,
        order=SQUARES,
    )


gated_output = kernel_or_reference(kernel_gated_output, plain_gated_output, takes=is_bfloat16)


def _normed(
    x: Float[jax.Array, "R values"], eps: float, sizes: Mamba2Config, group: TPGroup
) -> Float[jax.Array, "R values"]:
    """Divides the columns of each group by their root mean square."""
    is_cut = sizes.has_cut_norm
    whole = all_gather.all_gather(group, x) if is_cut else x
    groups = whole.reshape(len(x), -1, sizes.norm_size)
    normed = layers.rms_norm(groups, None, eps).reshape(len(x), -1)
    return all_gather.local_columns(group, normed) if is_cut else normed
