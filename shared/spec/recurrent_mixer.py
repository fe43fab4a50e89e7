"""Recurrent layer between its two projections, over given states, and the layers of a pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from shared.models.config import ModelConfig
from shared.models.mixers import GatedDeltaConfig, RecurrentConfig
from shared.spec import gated_delta, mamba2
from shared.spec.gated_delta import RecurrenceInputs
from shared.spec.recurrent_state import (
    RecurrentState,
    ReplayInputs,
    chain_windows,
    conv,
    tree_windows,
)


@dataclass(frozen=True)
class RecurrentWeights:
    """Weights of a recurrent layer besides its two matrices.

    Attributes:
      conv: Taps of the convolution, oldest input first.
      conv_bias: Bias of the convolution; None for GDN, and for Mamba2 without one.
      a_log, dt_bias: Parameters of the decay; see `gated_delta.gates` and
        `mamba2.recurrence_inputs`.
      skip: Multiplier of x in the output of each Mamba2 head; None for GDN.
      norm, eps: Weight and epsilon of the output norm; the weight is None for Mamba2 without one.
    """

    conv: Float[np.ndarray, "C 4"]
    conv_bias: Float[np.ndarray, " C"] | None
    a_log: Float[np.ndarray, " H"]
    dt_bias: Float[np.ndarray, " H"]
    skip: Float[np.ndarray, " H"] | None
    norm: Float[np.ndarray, " V_or_values"] | None
    eps: float


def recurrent_prefill(
    inputs: Float[np.ndarray, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    recurrent: Float[np.ndarray, "B H K V"],
    window: Float[np.ndarray, "B 3 C"],
    row_starts: Int[np.ndarray, " B1"],
) -> tuple[Float[np.ndarray, "R values"], Float[np.ndarray, "B H K V"], Float[np.ndarray, "B 3 C"]]:
    """Prefill: computes a layer between its two projections over prompt chunks.

    Convolution, gates, chunked recurrence, and for GDN the gated norm; `gated_output` applies the
    one of Mamba2.

    Args:
      inputs: Output of the input projection, see `split_inputs`.
      weights, sizes: Weights and config of the layer.
      recurrent, window: State of each request before its rows.
      row_starts: First row of each request, and the end; later rows are padding.

    Returns:
      The concatenated outputs of the heads, and the state after the rows.
    """
    channels, z, gates = split_inputs(inputs, sizes)
    recurrent, window, out = recurrent.copy(), window.copy(), np.zeros_like(z)
    for row, (start, stop) in enumerate(pairwise(row_starts)):
        windows = chain_windows(window[row], channels[start:stop])
        mixed = conv(windows[:-1], channels[start:stop], weights.conv, weights.conv_bias)
        own = recurrence_inputs(mixed, gates[start:stop], weights, sizes)
        recurrent[row], read = gated_delta.chunked(
            recurrent[row], own.q, own.k, own.v, own.log_decay, own.beta
        )
        out[start:stop] = read if own.skipped is None else read + own.skipped
        window[row] = windows[-1]
    return _normed(out, z, weights, sizes), recurrent, window


def recurrent_verify_tree(
    inputs: Float[np.ndarray, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    recurrent: Float[np.ndarray, "B H K V"],
    window: Float[np.ndarray, "B 3 C"],
    parents: Int[np.ndarray, "B N"],
    row_of: Int[np.ndarray, "B N"],
    request: Int[np.ndarray, " R"],
    node: Int[np.ndarray, " R"],
) -> tuple[Float[np.ndarray, "R values"], ReplayInputs]:
    """Tree verification: same as `recurrent_prefill`, for draft trees and without changing the
    states.

    Args:
      inputs, weights, sizes, recurrent, window: See `recurrent_prefill`.
      parents: The trees.
      row_of: Row of each node.
      request, node: Request and node of each row.

    Returns:
      The concatenated outputs of the heads, and the replay inputs, as a stack of one layer.
    """
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
    own = recurrence_inputs(mixed, gates[row_of.ravel()], weights, sizes).batched((B, N))
    out = gated_delta.verify(recurrent, own.q, own.k, own.v, own.log_decay, own.beta, parents)
    if own.skipped is not None:
        out = out + own.skipped
    kept = ReplayInputs(
        k=own.k[None],
        v=own.v[None],
        log_decay=own.log_decay[None],
        beta=None if own.beta is None else own.beta[None],
        inputs=before[None],
    )
    return _normed(out[request, node], z, weights, sizes), kept


def recurrent_decode(
    inputs: Float[np.ndarray, "B outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    recurrent: Float[np.ndarray, "B H K V"],
    window: Float[np.ndarray, "B 3 C"],
) -> tuple[Float[np.ndarray, "B values"], Float[np.ndarray, "B H K V"], Float[np.ndarray, "B 3 C"]]:
    """Decode: same as `recurrent_prefill`, for one row per request, by the recurrence."""
    channels, z, gates = split_inputs(inputs, sizes)
    mixed = conv(window, channels, weights.conv, weights.conv_bias)
    own = recurrence_inputs(mixed, gates, weights, sizes)
    recurrent, out = gated_delta.step(recurrent, own.q, own.k, own.v, own.log_decay, own.beta)
    if own.skipped is not None:
        out = out + own.skipped
    window = np.concatenate([window[:, 1:], channels[:, None]], axis=1)
    return _normed(out, z, weights, sizes), recurrent, window


def scaled_inputs(
    inputs: Float[np.ndarray, "R outputs"], sizes: RecurrentConfig
) -> Float[np.ndarray, "R outputs"]:
    """Applies the multipliers of the input projection, which only Mamba2 layers have."""
    return inputs if isinstance(sizes, GatedDeltaConfig) else mamba2.scaled_inputs(inputs, sizes)


def split_inputs(
    inputs: Float[np.ndarray, "R outputs"], sizes: RecurrentConfig
) -> tuple[Float[np.ndarray, "R C"], Float[np.ndarray, "R H V"], Float[np.ndarray, "R gates"]]:
    """Splits the projection into convolution inputs, z, and the inputs of the gates."""
    (heads, _, size), begins_with_gate = sizes.state_shape, sizes.begins_with_gate
    first = sizes.values if begins_with_gate else sizes.channels
    parts = np.split(inputs, [first, sizes.values + sizes.channels], axis=1)
    z, channels = parts[:2] if begins_with_gate else parts[1::-1]
    return channels, z.reshape(len(z), heads, size), parts[2]


def recurrence_inputs(
    channels: Float[np.ndarray, "R C"],
    gates: Float[np.ndarray, "R gates"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
) -> RecurrenceInputs:
    """Computes the inputs of the recurrence from the convolution's output and the gates' inputs."""
    if isinstance(sizes, GatedDeltaConfig):
        q, k, v = gated_delta.split(
            channels, sizes.num_key_heads, sizes.num_value_heads, sizes.key_size
        )
        b, a = np.split(gates, 2, axis=1)
        log_decay, beta = gated_delta.gates(b, a, weights.a_log, weights.dt_bias)
        return RecurrenceInputs(q=q, k=k, v=v, log_decay=log_decay, beta=beta, skipped=None)
    assert weights.skip is not None  # Mamba2 layers have one
    return mamba2.recurrence_inputs(
        channels, gates, weights.a_log, weights.dt_bias, weights.skip, sizes
    )


def _normed(
    out: Float[np.ndarray, "R H V"],
    z: Float[np.ndarray, "R H V"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
) -> Float[np.ndarray, "R values"]:
    """Applies the output norm of GDN layers, which is one of each head."""
    if isinstance(sizes, GatedDeltaConfig):
        assert weights.norm is not None  # GDN layers have one
        out = gated_delta.gated_norm(out, z, weights.norm, weights.eps)
    return out.reshape(len(out), -1)


def gated_output(
    out: Float[np.ndarray, "R values"],
    inputs: Float[np.ndarray, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
) -> Float[np.ndarray, "R values"]:
    """Applies the output norm of Mamba2 layers, which spans heads, and with TP also ranks.

    Args:
      out: Output of `recurrent_prefill`, `recurrent_verify_tree` or `recurrent_decode`.
      inputs: Output of the input projection.
      weights, sizes: Weights and config of the layer.
    """
    if isinstance(sizes, GatedDeltaConfig):
        return out
    _, z, _ = split_inputs(inputs, sizes)
    return mamba2.output_norm(out, z.reshape(out.shape), weights.norm, weights.eps, sizes)


RecurrentMixer = Callable[[int, Float[np.ndarray, "R outputs"]], Float[np.ndarray, "R values"]]
"""Recurrent layers of a pass: maps a layer's index among them and its projected inputs to its
output."""


def recurrent_weights(
    config: ModelConfig, weights: Mapping[str, Any], layer: int
) -> RecurrentWeights:
    """Returns the weights of one recurrent layer besides its matrices."""
    assert config.recurrent is not None  # a model with such layers has their sizes
    names = [field.name for field in fields(RecurrentWeights) if field.name != "eps"]
    stacks = {name: weights.get(f"{config.recurrent.kind}.{name}") for name in names}
    arrays: dict[str, Any] = {name: x if x is None else x[layer] for name, x in stacks.items()}
    return RecurrentWeights(**arrays, eps=config.rms_eps)


class RecurrentPrefill:
    """Recurrent layers of a prefill: chunked, with advancing states."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        state: RecurrentState,
        row_starts: Int[np.ndarray, " B1"],
    ) -> None:
        self._config, self._weights, self._row_starts = config, weights, row_starts
        self.recurrent, self.window = state.recurrent.copy(), state.window.copy()

    def __call__(
        self, layer: int, inputs: Float[np.ndarray, "R outputs"]
    ) -> Float[np.ndarray, "R values"]:
        """Same as `RecurrentMixer`."""
        sizes = self._config.recurrent
        assert sizes is not None  # a model with such layers has their sizes
        own = recurrent_weights(self._config, self._weights, layer)
        inputs = scaled_inputs(inputs, sizes)
        out, self.recurrent[layer], self.window[layer] = recurrent_prefill(
            inputs, own, sizes, self.recurrent[layer], self.window[layer], self._row_starts
        )
        return gated_output(out, inputs, own, sizes)


class RecurrentVerify:
    """Recurrent layers of a verify step: nodes continue from their parents; replay inputs are
    stored.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        state: RecurrentState,
        parents: Int[np.ndarray, "B N"],
        row_of: Int[np.ndarray, "B N"],
        request: Int[np.ndarray, " R"],
        node: Int[np.ndarray, " R"],
    ) -> None:
        self._config, self._weights = config, weights
        self._state, self._parents, self._row_of = state, parents, row_of
        self._request, self._node = request, node
        self._kept: list[ReplayInputs] = []

    def __call__(
        self, layer: int, inputs: Float[np.ndarray, "R outputs"]
    ) -> Float[np.ndarray, "R values"]:
        """Same as `RecurrentMixer`."""
        sizes = self._config.recurrent
        assert sizes is not None  # a model with such layers has their sizes
        own = recurrent_weights(self._config, self._weights, layer)
        inputs = scaled_inputs(inputs, sizes)
        out, kept = recurrent_verify_tree(
            inputs,
            own,
            sizes,
            self._state.recurrent[layer],
            self._state.window[layer],
            self._parents,
            self._row_of,
            self._request,
            self._node,
        )
        self._kept.append(kept)
        return gated_output(out, inputs, own, sizes)

    def all_kept(self) -> ReplayInputs:
        """Returns the replay inputs of all layers, stacked."""
        if self._kept:
            names = [field.name for field in fields(ReplayInputs)]
            layers_of = {name: [getattr(each, name) for each in self._kept] for name in names}
            stacks: dict[str, Any] = {
                name: None if x[0] is None else np.concatenate(x) for name, x in layers_of.items()
            }
            return ReplayInputs(**stacks)
        gates = np.zeros((0, *self._parents.shape, 0), np.float32)
        heads_of = np.zeros((*gates.shape, 0), np.float32)
        return ReplayInputs(heads_of, heads_of, gates, gates, gates)
