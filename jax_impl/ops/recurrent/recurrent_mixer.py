"""Recurrent layer between its two projections, over given states.

Same as `shared.spec.recurrent_mixer`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Float, Int

from jax_impl.ops import Place, Scale
from jax_impl.ops.recurrent import gated_delta, mamba2
from jax_impl.ops.recurrent.gated_delta import RecurrenceInputs
from jax_impl.ops.recurrent.recurrent_state import (
    ReplayInputs,
    chain_end,
    chain_windows,
    conv,
    tree_windows,
)
from shared.boundary.tp_group import TPGroup
from shared.models.mixers import GatedDeltaConfig, RecurrentConfig


class RecurrentWeights(NamedTuple):
    """Weights of a recurrent layer other than its two matrices; see the specification.

    They may be stacked over all GDN layers; kernels index the stack.
    """

    conv: Float[jax.Array, "*L C 4"]
    conv_bias: Float[jax.Array, "*L C"] | None
    a_log: Float[jax.Array, "*L H"]
    dt_bias: Float[jax.Array, "*L H"]
    skip: Float[jax.Array, "*L H"] | None
    norm: Float[jax.Array, "*L V_or_values"] | Scale | None
    eps: float

    def alone(self, layer: Place) -> "RecurrentWeights":
        if self.a_log.ndim == 1:
            return self
        arrays = jax.tree.map(lambda x: x[layer], self._replace(eps=None))
        return arrays._replace(eps=self.eps)

    def with_norm_of(self, layer: Place) -> "RecurrentWeights":
        """Returns the weights with the norm of one layer, which stays in its stack."""
        if self.norm is None or self.a_log.ndim == 1:
            return self
        assert isinstance(self.norm, jax.Array)  # of all layers
        return self._replace(norm=Scale(self.norm, layer))


def recurrent_prefill(
    inputs: Float[jax.Array, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
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
    """Computes a layer between its two projections, over prefill chunks.

    Args:
      request: Request of each row.
      save_after: Number of rows after which the state is returned too; see `gated_delta.chunked`.

    Returns:
      Head outputs, recurrent state and window after the rows, and both after `save_after` rows.
    """
    channels, z, gates = split_inputs(inputs, sizes)
    places = jnp.arange(len(request), dtype=jnp.int32) - row_starts[request]
    windows = chain_windows(window, channels, request, places)
    mixed = conv(windows, channels, weights.conv, weights.conv_bias)
    own = recurrence_inputs(mixed, gates, weights, sizes)
    new, out, saved = gated_delta.chunked(
        recurrent, own.q, own.k, own.v, own.log_decay, own.beta, row_starts, save_after
    )
    taken = row_starts[1:] - row_starts[:-1]
    end = chain_end(window, channels, row_starts, taken)
    saved_end = chain_end(window, channels, row_starts, jnp.clip(save_after, 0, taken))
    return _normed(_added(out, own), z, weights, sizes), new, end, (saved, saved_end)


def recurrent_verify_tree(
    inputs: Float[jax.Array, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    recurrent: Float[jax.Array, "B H K V"],
    window: Float[jax.Array, "B 3 C"],
    parents: Int[jax.Array, "B N"] | None,
    row_of: Int[jax.Array, "B N"],
    request: Int[jax.Array, " R"],
    node: Int[jax.Array, " R"],
) -> tuple[Float[jax.Array, "R values"], ReplayInputs]:
    """Same as `recurrent_prefill`, over draft trees, without changing states."""
    channels, z, gates = split_inputs(inputs, sizes)
    (B, N), C = row_of.shape, channels.shape[1]
    before = channels[row_of]  # [B, N, C]
    windows = tree_windows(window, before, parents)
    mixed = conv(
        windows.reshape(B * N, -1, C),
        before.reshape(B * N, C),
        weights.conv,
        weights.conv_bias,
    )
    own = recurrence_inputs(mixed, gates[row_of.reshape(-1)], weights, sizes).batched((B, N))
    out = gated_delta.verify(recurrent, own.q, own.k, own.v, own.log_decay, own.beta, parents)
    replayed = ReplayInputs(own.k, own.v, own.log_decay, own.beta, before)
    kept = jax.tree.map(lambda x: x[None], replayed)
    return _normed(_added(out, own)[request, node], z, weights, sizes), kept


def recurrent_decode(
    inputs: Float[jax.Array, "B outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    recurrent: Float[jax.Array, "B H K V"],
    window: Float[jax.Array, "B 3 C"],
) -> tuple[Float[jax.Array, "B values"], Float[jax.Array, "B H K V"], Float[jax.Array, "B 3 C"]]:
    """Same as `recurrent_prefill`, over one row of each request, with the recurrent form."""
    channels, z, gates = split_inputs(inputs, sizes)
    mixed = conv(window, channels, weights.conv, weights.conv_bias)
    own = recurrence_inputs(mixed, gates, weights, sizes)
    new, out = gated_delta.step(recurrent, own.q, own.k, own.v, own.log_decay, own.beta)
    end = jnp.concatenate([window[:, 1:], channels[:, None]], axis=1)
    return _normed(_added(out, own), z, weights, sizes), new, end


def scaled_inputs(
    inputs: Float[jax.Array, "R outputs"], sizes: RecurrentConfig
) -> Float[jax.Array, "R outputs"]:
    """Applies the multipliers of the input projection, which only Mamba2 layers have."""
    return inputs if isinstance(sizes, GatedDeltaConfig) else mamba2.scaled_inputs(inputs, sizes)


def split_inputs(
    inputs: Float[jax.Array, "R outputs"], sizes: RecurrentConfig
) -> tuple[Float[jax.Array, "R C"], Float[jax.Array, "R H V"], Float[jax.Array, "R gates"]]:
    """Splits the projection into convolution inputs, z, and the inputs of the gates."""
    (heads, _, size), begins_with_gate = sizes.state_shape, sizes.begins_with_gate
    first = sizes.values if begins_with_gate else sizes.channels
    *parts, gates = jnp.split(inputs, [first, sizes.values + sizes.channels], axis=1)
    z, channels = parts if begins_with_gate else parts[::-1]
    return channels, z.reshape(len(z), heads, size), gates


def recurrence_inputs(
    channels: Float[jax.Array, "R C"],
    gates: Float[jax.Array, "R gates"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
) -> RecurrenceInputs:
    """Computes the inputs of the recurrence from the convolution's output and the gates' inputs."""
    if isinstance(sizes, GatedDeltaConfig):
        q, k, v = gated_delta.split(
            channels, sizes.num_key_heads, sizes.num_value_heads, sizes.key_size
        )
        b, a = jnp.split(gates, 2, axis=1)
        log_decay, beta = gated_delta.gates(b, a, weights.a_log, weights.dt_bias)
        return RecurrenceInputs(q=q, k=k, v=v, log_decay=log_decay, beta=beta, skipped=None)
    assert weights.skip is not None  # Mamba2 layers have one
    return mamba2.recurrence_inputs(
        channels, gates, weights.a_log, weights.dt_bias, weights.skip, sizes
    )


def _added(
    out: Float[jax.Array, "*batch H V"], own: RecurrenceInputs
) -> Float[jax.Array, "*batch H V"]:
    return out if own.skipped is None else out + own.skipped


def _normed(
    out: Float[jax.Array, "R H V"],
    z: Float[jax.Array, "R H V"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
) -> Float[jax.Array, "R values"]:
    """Applies the output norm of GDN layers; the result has the dtype of `z`."""
    if isinstance(sizes, GatedDeltaConfig):
        assert isinstance(weights.norm, jax.Array)  # GDN layers have one
        out = gated_delta.gated_norm(out, z, weights.norm, weights.eps)
    return out.astype(z.dtype).reshape(len(out), -1)


def gated_output(
    out: Float[jax.Array, "R values"],
    inputs: Float[jax.Array, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    group: TPGroup,
) -> Float[jax.Array, "R values"]:
    """Same as the specification; `group` is the tensor-parallel group of the heads."""
    if isinstance(sizes, GatedDeltaConfig):
        return out
    return mamba2.gated_output(out, inputs, weights.norm, weights.eps, sizes, group)
