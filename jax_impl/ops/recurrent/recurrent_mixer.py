"""Recurrent layer between its two projections, over given states.

Same as `shared.spec.recurrent_mixer`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.ops import Place
from jax_impl.ops.recurrent import gated_delta
from jax_impl.ops.recurrent.recurrent_state import (
    ReplayInputs,
    chain_end,
    chain_windows,
    conv,
    tree_windows,
)
from shared.models.mixers import GatedDeltaConfig


class RecurrentWeights(NamedTuple):
    """Weights of a GDN layer other than its two matrices; same fields as in the specification.

    They may be stacked over all GDN layers; kernels index the stack.
    """

    conv: Float[jax.Array, "*L C 4"]
    a_log: Float[jax.Array, "*L H"]
    dt_bias: Float[jax.Array, "*L H"]
    norm: Float[jax.Array, "*L V"]
    eps: float

    def alone(self, layer: Place) -> "RecurrentWeights":
        if self.a_log.ndim == 1:
            return self
        conv, a_log, dt_bias, norm = (x[layer] for x in self[:4])
        return RecurrentWeights(conv, a_log, dt_bias, norm, self.eps)


def recurrent_prefill(
    inputs: Float[jax.Array, "R outputs"],
    weights: RecurrentWeights,
    sizes: GatedDeltaConfig,
    recurrent: Float[jax.Array, "B H K V"],
    window: Float[jax.Array, "B 3 C"],
    row_starts: Int[jax.Array, " B1"],
    request: Int[jax.Array, " R"],
    save_after: Int[jax.Array, " B"],
) -> tuple[
    Float[jax.Array, "R values"],
    Float[jax.Array, "B H K V"],
    Float[jax.Array, "B 3 C"],
    tuple[Float[jax.Array, "B H K V"], Float[jax.Array, "B 3 C"]],
]:
    """Computes a GDN layer between its two projections, over prefill chunks.

    Args:
      request: Request of each row.
      save_after: Number of rows after which the state is returned too; see `gated_delta.chunked`.

    Returns:
      Head outputs, recurrent state and window after the rows, and both after `save_after` rows.
    """
    channels, z, b, a = split_inputs(inputs, sizes)
    places = jnp.arange(len(request), dtype=jnp.int32) - row_starts[request]
    windows = chain_windows(window, channels, request, places)
    q, k, v = _heads_of(conv(windows, channels, weights.conv), sizes)
    log_decay, beta = gated_delta.gates(b, a, weights.a_log, weights.dt_bias)
    new, out, saved = gated_delta.chunked(
        recurrent, q, k, v, log_decay, beta, row_starts, save_after
    )
    taken = row_starts[1:] - row_starts[:-1]
    end = chain_end(window, channels, row_starts, taken)
    saved_end = chain_end(window, channels, row_starts, jnp.clip(save_after, 0, taken))
    return _normed(out, z, weights), new, end, (saved, saved_end)


def recurrent_verify_tree(
    inputs: Float[jax.Array, "R outputs"],
    weights: RecurrentWeights,
    sizes: GatedDeltaConfig,
    recurrent: Float[jax.Array, "B H K V"],
    window: Float[jax.Array, "B 3 C"],
    parents: Int[jax.Array, "B N"] | None,
    row_of: Int[jax.Array, "B N"],
    request: Int[jax.Array, " R"],
    node: Int[jax.Array, " R"],
) -> tuple[Float[jax.Array, "R values"], ReplayInputs]:
    """Same as `recurrent_prefill`, over draft trees, without changing states."""
    channels, z, b, a = split_inputs(inputs, sizes)
    (B, N), C = row_of.shape, channels.shape[1]
    before = channels[row_of]  # [B, N, C]
    windows = tree_windows(window, before, parents)
    after = conv(windows.reshape(B * N, -1, C), before.reshape(B * N, C), weights.conv)
    q, k, v = (part.reshape(B, N, *part.shape[1:]) for part in _heads_of(after, sizes))
    gates = gated_delta.gates(b, a, weights.a_log, weights.dt_bias)
    log_decay, beta = (gate[row_of] for gate in gates)
    out = gated_delta.verify(recurrent, q, k, v, log_decay, beta, parents)
    kept = ReplayInputs(*(x[None] for x in (k, v, log_decay, beta, before)))
    return _normed(out[request, node], z, weights), kept


def recurrent_decode(
    inputs: Float[jax.Array, "B outputs"],
    weights: RecurrentWeights,
    sizes: GatedDeltaConfig,
    recurrent: Float[jax.Array, "B H K V"],
    window: Float[jax.Array, "B 3 C"],
) -> tuple[Float[jax.Array, "B values"], Float[jax.Array, "B H K V"], Float[jax.Array, "B 3 C"]]:
    """Same as `recurrent_prefill`, over one row of each request, with the recurrent form."""
    channels, z, b, a = split_inputs(inputs, sizes)
    q, k, v = _heads_of(conv(window, channels, weights.conv), sizes)
    log_decay, beta = gated_delta.gates(b, a, weights.a_log, weights.dt_bias)
    new, out = gated_delta.step(recurrent, q, k, v, log_decay, beta)
    end = jnp.concatenate([window[:, 1:], channels[:, None]], axis=1)
    return _normed(out, z, weights), new, end


def split_inputs(
    inputs: Float[jax.Array, "R outputs"], sizes: GatedDeltaConfig
) -> tuple[
    Float[jax.Array, "R C"],
    Float[jax.Array, "R H V"],
    Float[jax.Array, "R H"],
    Float[jax.Array, "R H"],
]:
    """Splits the projection into inputs of the convolution, z, b and a."""
    heads, size = sizes.num_value_heads, sizes.value_size
    ends = (sizes.channels, sizes.channels + heads * size, sizes.channels + heads * (size + 1))
    channels, z, b, a = jnp.split(inputs, ends, axis=1)
    return channels, z.reshape(len(z), heads, size), b, a


def _heads_of(
    channels: Float[jax.Array, "R C"], sizes: GatedDeltaConfig
) -> tuple[Float[jax.Array, "R H K"], Float[jax.Array, "R H K"], Float[jax.Array, "R H V"]]:
    return gated_delta.split(channels, sizes.num_key_heads, sizes.num_value_heads, sizes.key_size)


def _normed(
    out: Float[jax.Array, "R H V"], z: Float[jax.Array, "R H V"], weights: RecurrentWeights
) -> Float[jax.Array, "R values"]:
    return gated_delta.gated_norm(out, z, weights.norm, weights.eps).reshape(len(out), -1)
