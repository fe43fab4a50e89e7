"""Mamba2: the inputs of its recurrence, and its output norm; same as `shared.spec.mamba2`."""

import torch
from jaxtyping import Float
from torch import Tensor

from shared.boundary.tp_group import TPGroup
from shared.models.mixers.mamba2 import Mamba2Config, OutputNorm
from shared.spec.reduction_order import SQUARES
from torch_impl.ops import Kernels, is_bfloat16, kernel_or_reference
from torch_impl.ops.collectives import all_gather
from torch_impl.ops.gemm import layers
from torch_impl.ops.recurrent.gated_delta import RecurrenceInputs


def scaled_inputs(
    inputs: Float[Tensor, "R outputs"], sizes: Mamba2Config
) -> Float[Tensor, "R outputs"]:
    if {*sizes.input_factors} == {1.0}:
        return inputs
    parts = zip(inputs.split(sizes.input_sections, dim=1), sizes.input_factors, strict=True)
    return torch.cat([(x.float() * factor).to(x.dtype) for x, factor in parts], dim=1)


def recurrence_inputs(
    channels: Float[Tensor, "R C"],
    dt: Float[Tensor, "R H"],
    a_log: Float[Tensor, " H"],
    dt_bias: Float[Tensor, " H"],
    skip: Float[Tensor, " H"],
    sizes: Mamba2Config,
) -> RecurrenceInputs:
    """Same as the specification; channels are rounded to the dtype of `dt`."""
    (H, N, P), G = sizes.state_shape, sizes.num_groups
    rounded = channels.to(dt.dtype).float()
    x, b, c = rounded.split([H * P, G * N, G * N], dim=1)
    x = x.unflatten(1, (H, P))
    k, q = (each.unflatten(1, (G, N)).repeat_interleave(H // G, dim=1) for each in (b, c))
    dt = layers.softplus(dt.float() + dt_bias)
    return RecurrenceInputs(
        q=q,
        k=k,
        v=dt[..., None] * x,
        log_decay=-dt * a_log.exp(),
        beta=None,
        skipped=skip[:, None] * x,
    )


def output_norm(
    out: Float[Tensor, "R values"],
    z: Float[Tensor, "R values"],
    weight: Float[Tensor, " values"] | None,
    eps: float,
    sizes: Mamba2Config,
    group: TPGroup,
) -> Float[Tensor, "R values"]:
    """Same as the specification, in float32; the result has the dtype of `z`.

    Ranks of the tensor-parallel group gather the columns of a group of the norm that they share.
    """
    gate, out = layers.silu(z.float()), out.float()
    if weight is None:
        return (out * gate * sizes.out_factor).to(z.dtype)
    is_gated = sizes.norm is OutputNorm.AFTER_GATE
    normed = weight * _normed(out * gate if is_gated else out, eps, sizes, group)
    return ((normed if is_gated else normed * gate) * sizes.out_factor).to(z.dtype)


def plain_gated_output(
    out: Float[Tensor, "R values"],
    inputs: Float[Tensor, "R outputs"],
    weight: Float[Tensor, " values"] | None,
    eps: float,
    sizes: Mamba2Config,
    group: TPGroup,
) -> Float[Tensor, "R values"]:
    """Applies `output_norm` with the gate, which begins the input projection."""
    return output_norm(out, inputs[:, : sizes.values], weight, eps, sizes, group)


def kernel_gated_output(
    kernels: Kernels,
    out: Float[Tensor, "R values"],
    inputs: Float[Tensor, "R outputs"],
    weight: Float[Tensor, " values"] | None,
    eps: float,
    sizes: Mamba2Config,
    group: TPGroup,
) -> Float[Tensor, "R values"]:
    if sizes.has_cut_norm and not sizes.has_whole_chunks(SQUARES.chunk):
        return plain_gated_output(out, inputs, weight, eps, sizes, group)
    gates_first = sizes.norm is not OutputNorm.BEFORE_GATE
    sums, norm = None, kernels.mamba2_output
    if sizes.has_cut_norm:
        own = norm.squares_of_chunks(out, inputs, gates_first=gates_first, order=SQUARES)
        sums = all_gather.all_gather(group, own)
    return norm.gated_output(
        out,
        inputs,
        weight,
        sums,
        group.rank * (sizes.values // SQUARES.chunk),
        eps=eps,
        norm_size=sizes.values if weight is None else sizes.norm_size,
        gates_first=gates_first,
        factor=sizes.out_factor,
        order=SQUARES,
    )


gated_output = kernel_or_reference(kernel_gated_output, plain_gated_output, takes=is_bfloat16)


def _normed(
    x: Float[Tensor, "R values"], eps: float, sizes: Mamba2Config, group: TPGroup
) -> Float[Tensor, "R values"]:
    """Divides the columns of each group by their root mean square."""
    is_cut = sizes.has_cut_norm
    whole = all_gather.all_gather(group, x) if is_cut else x
    groups = whole.unflatten(1, (-1, sizes.norm_size))
    normed = layers.rms_norm(groups, None, eps).flatten(1)
    return all_gather.local_columns(group, normed) if is_cut else normed
