"""Recurrent layer between its two projections, over given states.

Same as `shared.spec.recurrent_mixer`.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shared.models.mixers import GatedDeltaConfig
from torch_impl.ops.recurrent import gated_delta
from torch_impl.ops.recurrent.recurrent_state import (
    ReplayInputs,
    chain_end,
    chain_windows,
    conv,
    tree_windows,
)


@dataclass(frozen=True)
class RecurrentWeights:
    """Weights of a GDN layer other than its two matrices; same fields as in the specification."""

    conv: Float[Tensor, "C 4"]
    a_log: Float[Tensor, " H"]
    dt_bias: Float[Tensor, " H"]
    norm: Float[Tensor, " V"]
    eps: float


def recurrent_prefill(
    inputs: Float[Tensor, "R outputs"],
    weights: RecurrentWeights,
    sizes: GatedDeltaConfig,
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
    """Computes a GDN layer between its two projections, over prefill chunks.

    Args:
      request: Request of each row.
      save_after: Number of rows after which the state is returned too; see `gated_delta.chunked`.

    Returns:
      Head outputs, the state after the rows, and the state after `save_after` rows.
    """
    channels, z, b, a = split_inputs(inputs, sizes)
    place = torch.arange(len(request), dtype=torch.int32, device=request.device)
    windows = chain_windows(window, channels, request, place - row_starts[request])
    heads = _heads_of(conv(windows, channels, weights.conv), sizes)
    gates = gated_delta.gates(b, a, weights.a_log, weights.dt_bias)
    new, out, saved = gated_delta.chunked(recurrent, *heads, *gates, row_starts, save_after)
    taken = row_starts[1:] - row_starts[:-1]
    end = chain_end(window, channels, row_starts, taken)
    saved_taken = torch.minimum(save_after.clamp(min=0), taken)
    saved_end = chain_end(window, channels, row_starts, saved_taken)
    return _normed(out, z, weights), new, end, (saved, saved_end)


def recurrent_verify_tree(
    inputs: Float[Tensor, "R outputs"],
    weights: RecurrentWeights,
    sizes: GatedDeltaConfig,
    recurrent: Float[Tensor, "B H K V"],
    window: Float[Tensor, "B 3 C"],
    parents: Int[Tensor, "B N"] | None,
    row_of: Int[Tensor, "B N"],
    request: Int[Tensor, " R"],
    node: Int[Tensor, " R"],
) -> tuple[Float[Tensor, "R values"], ReplayInputs]:
    """Same as the specification; `parents` is None for chains."""
    channels, z, b, a = split_inputs(inputs, sizes)
    before = channels[row_of]  # [B, N, C]
    windows = tree_windows(window, before, parents)
    flat = conv(windows.flatten(0, 1), before.flatten(0, 1), weights.conv)
    q, k, v = (part.unflatten(0, row_of.shape) for part in _heads_of(flat, sizes))
    gates = gated_delta.gates(b, a, weights.a_log, weights.dt_bias)
    log_decay, beta = (gate[row_of] for gate in gates)
    out = gated_delta.verify(recurrent, q, k, v, log_decay, beta, parents)
    kept = ReplayInputs(*(x[None] for x in (k, v, log_decay, beta, before)))
    return _normed(out[request, node], z, weights), kept


def recurrent_decode(
    inputs: Float[Tensor, "B outputs"],
    weights: RecurrentWeights,
    sizes: GatedDeltaConfig,
    recurrent: Float[Tensor, "B H K V"],
    window: Float[Tensor, "B 3 C"],
) -> tuple[Float[Tensor, "B values"], Float[Tensor, "B H K V"], Float[Tensor, "B 3 C"]]:
    channels, z, b, a = split_inputs(inputs, sizes)
    heads = _heads_of(conv(window, channels, weights.conv), sizes)
    gates = gated_delta.gates(b, a, weights.a_log, weights.dt_bias)
    new, out = gated_delta.step(recurrent, *heads, *gates)
    end = torch.cat([window[:, 1:], channels[:, None]], dim=1)
    return _normed(out, z, weights), new, end


def split_inputs(
    inputs: Float[Tensor, "R outputs"], sizes: GatedDeltaConfig
) -> tuple[
    Float[Tensor, "R C"], Float[Tensor, "R H V"], Float[Tensor, "R H"], Float[Tensor, "R H"]
]:
    heads, size = sizes.num_value_heads, sizes.value_size
    channels, z, b, a = inputs.split([sizes.channels, heads * size, heads, heads], dim=1)
    return channels, z.unflatten(1, (heads, size)), b, a


def _heads_of(
    channels: Float[Tensor, "R C"], sizes: GatedDeltaConfig
) -> tuple[Float[Tensor, "R H K"], Float[Tensor, "R H K"], Float[Tensor, "R H V"]]:
    return gated_delta.split(channels, sizes.num_key_heads, sizes.num_value_heads, sizes.key_size)


def _normed(
    out: Float[Tensor, "R H V"], z: Float[Tensor, "R H V"], weights: RecurrentWeights
) -> Float[Tensor, "R values"]:
    return gated_delta.gated_norm(out, z, weights.norm, weights.eps).flatten(1)
