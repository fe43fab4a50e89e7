"""Recurrent layer between its two projections, over given states.

Same as `shared.spec.recurrent_mixer`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.boundary.tp_group import TPGroup
from shared.models.mixers import GatedDeltaConfig, RecurrentConfig
from torch_impl.ops.recurrent import gated_delta, mamba2
from torch_impl.ops.recurrent.gated_delta import RecurrenceInputs
from torch_impl.ops.recurrent.recurrent_state import (
    ReplayInputs,
    chain_end,
    chain_windows,
    conv,
    tree_windows,
)


@dataclass(frozen=True)
class RecurrentWeights:
    """Weights of a recurrent layer other than its two matrices; see the specification."""

    conv: Float[Tensor, "C 4"]
    conv_bias: Float[Tensor, " C"] | None
    a_log: Float[Tensor, " H"]
    dt_bias: Float[Tensor, " H"]
    skip: Float[Tensor, " H"] | None
    norm: Float[Tensor, " V_or_values"] | None
    eps: float


def recurrent_prefill(
    inputs: Float[Tensor, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    recurrent: Float[Tensor, "B H K V"],
    window: Float[Tensor, "B 3 C"],
    row_starts: Int[Tensor, " B1"],
    request: Int[Tensor, " R"],
    save_after: Int[Tensor, " B"],
) -> tuple[
    Float[Tensor, "R values"],
    Float[Tensor, "B H K V"],
    Float[Tensor, "B 3 C"],
    tuple[Float[Tensor, "B H K V"], Float[Tensor, "B 3 C"]],
]:
    """Computes a layer between its two projections, over prefill chunks.

    Args:
      request: Request of each row.
      save_after: Number of rows after which the state is returned too; see `gated_delta.chunked`.

    Returns:
      Head outputs, the state after the rows, and the state after `save_after` rows.
    """
    channels, z, gates = split_inputs(inputs, sizes)
    place = torch.arange(len(request), dtype=torch.int32, device=request.device)
    windows = chain_windows(window, channels, request, place - row_starts[request])
    mixed = conv(windows, channels, weights.conv, weights.conv_bias)
    own = recurrence_inputs(mixed, gates, weights, sizes)
    new, out, saved = gated_delta.chunked(
        recurrent, own.q, own.k, own.v, own.log_decay, own.beta, row_starts, save_after
    )
    taken = row_starts[1:] - row_starts[:-1]
    end = chain_end(window, channels, row_starts, taken)
    saved_taken = torch.minimum(save_after.clamp(min=0), taken)
    saved_end = chain_end(window, channels, row_starts, saved_taken)
    return _normed(_added(out, own), z, weights, sizes), new, end, (saved, saved_end)


def recurrent_verify_tree(
    inputs: Float[Tensor, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    recurrent: Float[Tensor, "B H K V"],
    window: Float[Tensor, "B 3 C"],
    parents: Int[Tensor, "B N"] | None,
    row_of: Int[Tensor, "B N"],
    request: Int[Tensor, " R"],
    node: Int[Tensor, " R"],
) -> tuple[Float[Tensor, "R values"], ReplayInputs]:
    """Same as the specification; `parents` is None for chains."""
    channels, z, gates = split_inputs(inputs, sizes)
    before = channels[row_of]  # [B, N, C]
    windows = tree_windows(window, before, parents)
    flat = windows.flatten(0, 1)
    mixed = conv(flat, before.flatten(0, 1), weights.conv, weights.conv_bias)
    flat_tokens = recurrence_inputs(mixed, gates[row_of.flatten()], weights, sizes)
    own = flat_tokens.batched(row_of.shape)
    out = gated_delta.verify(recurrent, own.q, own.k, own.v, own.log_decay, own.beta, parents)
    kept = ReplayInputs(
        k=own.k[None],
        v=own.v[None],
        log_decay=own.log_decay[None],
        beta=None if own.beta is None else own.beta[None],
        inputs=before[None],
    )
    return _normed(_added(out, own)[request, node], z, weights, sizes), kept


def recurrent_decode(
    inputs: Float[Tensor, "B outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    recurrent: Float[Tensor, "B H K V"],
    window: Float[Tensor, "B 3 C"],
) -> tuple[Float[Tensor, "B values"], Float[Tensor, "B H K V"], Float[Tensor, "B 3 C"]]:
    channels, z, gates = split_inputs(inputs, sizes)
    mixed = conv(window, channels, weights.conv, weights.conv_bias)
    own = recurrence_inputs(mixed, gates, weights, sizes)
    new, out = gated_delta.step(recurrent, own.q, own.k, own.v, own.log_decay, own.beta)
    end = torch.cat([window[:, 1:], channels[:, None]], dim=1)
    return _normed(_added(out, own), z, weights, sizes), new, end


def scaled_inputs(
    inputs: Float[Tensor, "R outputs"], sizes: RecurrentConfig
) -> Float[Tensor, "R outputs"]:
    """Applies the multipliers of the input projection, which only Mamba2 layers have."""
    return inputs if isinstance(sizes, GatedDeltaConfig) else mamba2.scaled_inputs(inputs, sizes)


def split_inputs(
    inputs: Float[Tensor, "R outputs"], sizes: RecurrentConfig
) -> tuple[Float[Tensor, "R C"], Float[Tensor, "R H V"], Float[Tensor, "R gates"]]:
    (heads, _, size), begins_with_gate = sizes.state_shape, sizes.begins_with_gate
    parts = [sizes.values, sizes.channels] if begins_with_gate else [sizes.channels, sizes.values]
    first, second, gates = inputs.split([*parts, inputs.shape[1] - sum(parts)], dim=1)
    z, channels = (first, second) if begins_with_gate else (second, first)
    return channels, z.unflatten(1, (heads, size)), gates


def recurrence_inputs(
    channels: Float[Tensor, "R C"],
    gates: Float[Tensor, "R gates"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
) -> RecurrenceInputs:
    if isinstance(sizes, GatedDeltaConfig):
        q, k, v = gated_delta.split(
            channels, sizes.num_key_heads, sizes.num_value_heads, sizes.key_size
        )
        b, a = gates.chunk(2, dim=1)
        log_decay, beta = gated_delta.gates(b, a, weights.a_log, weights.dt_bias)
        return RecurrenceInputs(q=q, k=k, v=v, log_decay=log_decay, beta=beta, skipped=None)
    assert weights.skip is not None  # Mamba2 layers have one
    return mamba2.recurrence_inputs(
        channels, gates, weights.a_log, weights.dt_bias, weights.skip, sizes
    )


def _added(out: Float[Tensor, "*batch H V"], own: RecurrenceInputs) -> Float[Tensor, "*batch H V"]:
    return out if own.skipped is None else out + own.skipped


def _normed(
    out: Float[Tensor, "R H V"],
    z: Float[Tensor, "R H V"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
) -> Float[Tensor, "R values"]:
    """Applies the output norm of GDN layers; the result has the dtype of `z`."""
    if isinstance(sizes, GatedDeltaConfig):
        assert weights.norm is not None  # GDN layers have one
        out = gated_delta.gated_norm(out, z, weights.norm, weights.eps)
    return out.to(z.dtype).flatten(1)


def gated_output(
    out: Float[Tensor, "R values"],
    inputs: Float[Tensor, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    group: TPGroup,
) -> Float[Tensor, "R values"]:
    """Same as the specification; `group` is the tensor-parallel group of the heads."""
    if isinstance(sizes, GatedDeltaConfig):
        return out
    return mamba2.gated_output(out, inputs, weights.norm, weights.eps, sizes, group)
