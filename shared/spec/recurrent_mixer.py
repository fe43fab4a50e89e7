"""Recurrent layer between its two projections, over given states, and the layers of a pass."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from shared.models.config import ModelConfig
from shared.models.mixers import GatedDeltaConfig
from shared.spec import gated_delta
from shared.spec.recurrent_state import (
    RecurrentState,
    ReplayInputs,
    chain_windows,
    conv,
    tree_windows,
)


@dataclass(frozen=True)
class RecurrentWeights:
    """Weights of a GDN layer besides its two matrices.

    Attributes:
      conv: Taps of the convolution, oldest input first.
      a_log, dt_bias: Parameters of the decay, see `gated_delta.gates`.
      norm, eps: Weight and epsilon of the output norm.
    """

    conv: Float[np.ndarray, "C 4"]
    a_log: Float[np.ndarray, " H"]
    dt_bias: Float[np.ndarray, " H"]
    norm: Float[np.ndarray, " V"]
    eps: float


def recurrent_prefill(
    inputs: Float[np.ndarray, "R outputs"],
    weights: RecurrentWeights,
    sizes: GatedDeltaConfig,
    recurrent: Float[np.ndarray, "B H K V"],
    window: Float[np.ndarray, "B 3 C"],
    row_starts: Int[np.ndarray, " B1"],
) -> tuple[Float[np.ndarray, "R values"], Float[np.ndarray, "B H K V"], Float[np.ndarray, "B 3 C"]]:
    """GDN prefill: computes a layer between its two projections over prompt chunks.

    Convolution, gates, chunked delta rule, gated norm.

    Args:
      inputs: Output of the input projection, see `split_inputs`.
      weights, sizes: Weights and config of the layer.
      recurrent, window: State of each request before its rows.
      row_starts: First row of each request, and the end; later rows are padding.

    Returns:
      The concatenated outputs of the heads, and the state after the rows.
    """
    channels, z, b, a = split_inputs(inputs, sizes)
    log_decay, beta = gated_delta.gates(b, a, weights.a_log, weights.dt_bias)
    recurrent, window, out = recurrent.copy(), window.copy(), np.zeros_like(z)
    for row, (start, stop) in enumerate(pairwise(row_starts)):
        windows = chain_windows(window[row], channels[start:stop])
        q, k, v = _heads_of(conv(windows[:-1], channels[start:stop], weights.conv), sizes)
        recurrent[row], out[start:stop] = gated_delta.chunked(
            recurrent[row], q, k, v, log_decay[start:stop], beta[start:stop]
        )
        window[row] = windows[-1]
    return _normed(out, z, weights), recurrent, window


def recurrent_verify_tree(
    inputs: Float[np.ndarray, "R outputs"],
    weights: RecurrentWeights,
    sizes: GatedDeltaConfig,
    recurrent: Float[np.ndarray, "B H K V"],
    window: Float[np.ndarray, "B 3 C"],
    parents: Int[np.ndarray, "B N"],
    row_of: Int[np.ndarray, "B N"],
    request: Int[np.ndarray, " R"],
    node: Int[np.ndarray, " R"],
) -> tuple[Float[np.ndarray, "R values"], ReplayInputs]:
    """GDN tree verification: same as `recurrent_prefill`, for draft trees and without changing the
    states.

    Args:
      inputs, weights, sizes, recurrent, window: See `recurrent_prefill`.
      parents: The trees.
      row_of: Row of each node.
      request, node: Request and node of each row.

    Returns:
      The concatenated outputs of the heads, and the replay inputs, as a stack of one layer.
    """
    channels, z, b, a = split_inputs(inputs, sizes)
    (B, N), C = row_of.shape, channels.shape[1]
    before = channels[row_of]  # [B, N, C]
    windows = tree_windows(window, before, parents)
    after = conv(windows.reshape(B * N, -1, C), before.reshape(B * N, C), weights.conv)
    q, k, v = (part.reshape(B, N, *part.shape[1:]) for part in _heads_of(after, sizes))
    gates = gated_delta.gates(b, a, weights.a_log, weights.dt_bias)
    log_decay, beta = (gate[row_of] for gate in gates)
    out = gated_delta.verify(recurrent, q, k, v, log_decay, beta, parents)
    kept = ReplayInputs(
        k=k[None], v=v[None], log_decay=log_decay[None], beta=beta[None], inputs=before[None]
    )
    return _normed(out[request, node], z, weights), kept


def recurrent_decode(
    inputs: Float[np.ndarray, "B outputs"],
    weights: RecurrentWeights,
    sizes: GatedDeltaConfig,
    recurrent: Float[np.ndarray, "B H K V"],
    window: Float[np.ndarray, "B 3 C"],
) -> tuple[Float[np.ndarray, "B values"], Float[np.ndarray, "B H K V"], Float[np.ndarray, "B 3 C"]]:
    """GDN decode: same as `recurrent_prefill`, for one row per request, by the recurrence."""
    channels, z, b, a = split_inputs(inputs, sizes)
    q, k, v = _heads_of(conv(window, channels, weights.conv), sizes)
    log_decay, beta = gated_delta.gates(b, a, weights.a_log, weights.dt_bias)
    recurrent, out = gated_delta.step(recurrent, q, k, v, log_decay, beta)
    window = np.concatenate([window[:, 1:], channels[:, None]], axis=1)
    return _normed(out, z, weights), recurrent, window


def split_inputs(
    inputs: Float[np.ndarray, "R outputs"], sizes: GatedDeltaConfig
) -> tuple[
    Float[np.ndarray, "R C"],
    Float[np.ndarray, "R H V"],
    Float[np.ndarray, "R H"],
    Float[np.ndarray, "R H"],
]:
    """Splits the projection into convolution inputs, z, b and a, in this order."""
    heads, size = sizes.num_value_heads, sizes.value_size
    ends = np.cumsum([sizes.channels, heads * size, heads])
    channels, z, b, a = np.split(inputs, ends, axis=1)
    return channels, z.reshape(len(z), heads, size), b, a


def _heads_of(
    channels: Float[np.ndarray, "R C"], sizes: GatedDeltaConfig
) -> tuple[Float[np.ndarray, "R H K"], Float[np.ndarray, "R H K"], Float[np.ndarray, "R H V"]]:
    return gated_delta.split(channels, sizes.num_key_heads, sizes.num_value_heads, sizes.key_size)


def _normed(
    out: Float[np.ndarray, "R H V"], z: Float[np.ndarray, "R H V"], weights: RecurrentWeights
) -> Float[np.ndarray, "R values"]:
    return gated_delta.gated_norm(out, z, weights.norm, weights.eps).reshape(len(out), -1)


RecurrentMixer = Callable[[int, Float[np.ndarray, "R outputs"]], Float[np.ndarray, "R values"]]
"""GDN layers of a pass: maps a layer's index among GDN layers and its projected inputs to its
output."""


def recurrent_weights(
    config: ModelConfig, weights: Mapping[str, Any], layer: int
) -> RecurrentWeights:
    """Returns the weights of one GDN layer besides its matrices."""
    names = ("conv", "a_log", "dt_bias", "norm")
    arrays = {name: weights[f"gated_delta.{name}"][layer] for name in names}
    return RecurrentWeights(**arrays, eps=config.rms_eps)


class RecurrentPrefill:
    """GDN layers of a prefill: chunked, with advancing states."""

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
        assert self._config.recurrent is not None  # a model with such layers has their sizes
        out, self.recurrent[layer], self.window[layer] = recurrent_prefill(
            inputs,
            recurrent_weights(self._config, self._weights, layer),
            self._config.recurrent,
            self.recurrent[layer],
            self.window[layer],
            self._row_starts,
        )
        return out


class RecurrentVerify:
    """GDN layers of a verify step: nodes continue from their parents; replay inputs are stored."""

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
        assert self._config.recurrent is not None  # a model with such layers has their sizes
        out, kept = recurrent_verify_tree(
            inputs,
            recurrent_weights(self._config, self._weights, layer),
            self._config.recurrent,
            self._state.recurrent[layer],
            self._state.window[layer],
            self._parents,
            self._row_of,
            self._request,
            self._node,
        )
        self._kept.append(kept)
        return out

    def all_kept(self) -> ReplayInputs:
        """Returns the replay inputs of all layers, stacked."""
        if self._kept:
            names = [field.name for field in fields(ReplayInputs)]
            layers_of = {name: [getattr(each, name) for each in self._kept] for name in names}
            return ReplayInputs(**{name: np.concatenate(x) for name, x in layers_of.items()})
        gates = np.zeros((0, *self._parents.shape, 0), np.float32)
        heads_of = np.zeros((*gates.shape, 0), np.float32)
        return ReplayInputs(heads_of, heads_of, gates, gates, gates)
