"""Recurrent state of GDN layers, the layers of a pass, and replay over an accepted path.

Per layer, the state is the recurrent state `[H, K, V]` in float32 and the convolution window: the
last three convolution inputs, oldest first, zeros before the first token. A verify step changes
neither; it stores the inputs of its nodes. The inputs of the accepted path are then replayed from
the old state, by the same recurrence and in the same order as plain decoding. (Serving engines call
this state "mamba state"; no Mamba layer is involved.)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from shared.models.config import ModelConfig
from shared.models.mixers import GatedDeltaConfig
from shared.spec import gated_delta, layers

WINDOW = 3
"""Convolution inputs (width 4) before the current one."""


@dataclass(frozen=True)
class GDNState:
    """States of a batch of rows in all GDN layers.

    Attributes:
      recurrent: Recurrent state, float32.
      window: The last three convolution inputs, oldest first.
    """

    recurrent: Float[np.ndarray, "L B H K V"]
    window: Float[np.ndarray, "L B 3 C"]


@dataclass(frozen=True)
class ReplayInputs:
    """Inputs of a verify step's nodes in all GDN layers, stored unchanged for state replay."""

    k: Float[np.ndarray, "L B N H K"]
    v: Float[np.ndarray, "L B N H V"]
    log_decay: Float[np.ndarray, "L B N H"]
    beta: Float[np.ndarray, "L B N H"]
    inputs: Float[np.ndarray, "L B N C"]


def conv(
    windows: Float[np.ndarray, "*rows 3 C"],
    inputs: Float[np.ndarray, "*rows C"],
    weight: Float[np.ndarray, "C 4"],
) -> Float[np.ndarray, "*rows C"]:
    """Computes the depthwise causal convolution of width 4, then SiLU; `windows` are the inputs
    before.
    """
    taps = np.concatenate([windows, inputs[..., None, :]], axis=-2)
    return layers.silu(np.sum(taps * weight.T, axis=-2))


def chain_windows(
    window: Float[np.ndarray, "3 C"], inputs: Float[np.ndarray, "T C"]
) -> Float[np.ndarray, "T1 3 C"]:
    """Returns the window before each of a request's T tokens; entry T is the window after the
    last.
    """
    rows = np.concatenate([window, inputs])
    return rows[np.arange(len(inputs) + 1)[:, None] + np.arange(WINDOW)]


def tree_windows(
    window: Float[np.ndarray, "B 3 C"],
    inputs: Float[np.ndarray, "B N C"],
    parents: Int[np.ndarray, "B N"],
) -> Float[np.ndarray, "B N 3 C"]:
    """Returns the window before each node of a draft tree: its ancestors, preceded by the old
    window.
    """
    rows = np.arange(len(window))
    before = [window]
    for node in range(1, inputs.shape[1]):
        parent = parents[:, node]
        older = np.stack(before, axis=1)[rows, parent]
        before.append(np.concatenate([older[:, 1:], inputs[rows, parent][:, None]], axis=1))
    return np.stack(before, axis=1)


def path_window(
    window: Float[np.ndarray, "L B 3 C"],
    inputs: Float[np.ndarray, "L B W C"],
    taken: Int[np.ndarray, " B"],
) -> Float[np.ndarray, "L B 3 C"]:
    """Returns the window after `taken` inputs of a path: rows `[taken, taken + 3)` of the
    concatenation.
    """
    rows = np.concatenate([window, inputs], axis=2)
    index = taken[:, None] + np.arange(WINDOW)
    return np.take_along_axis(rows, index[None, :, :, None], axis=2)


def replay(
    state: GDNState,
    kept: ReplayInputs,
    path: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
    save_after: Int[np.ndarray, " B"],
) -> tuple[GDNState, GDNState, Bool[np.ndarray, " B"]]:
    """Advances each row's state along its accepted path (state replay).

    Args:
      state: States before the step.
      kept: Replay inputs of the tree's nodes.
      path: Nodes of the path, the root first.
      counts: Number of committed nodes; 0 leaves the state unchanged.
      save_after: Tokens of this step after which a snapshot is taken: the plan's `save_at` minus
        the row's length.

    Returns:
      The states after the path; the snapshots; and True for rows whose snapshot was passed, that is
      `1 <= save_after <= counts`. Other snapshots are undefined.
    """
    rows = np.arange(len(path))
    k, v, log_decay, beta, inputs = (
        x[:, rows[:, None], path] for x in (kept.k, kept.v, kept.log_decay, kept.beta, kept.inputs)
    )
    recurrent = saved = state.recurrent
    for i in range(path.shape[1]):
        after = gated_delta.update(
            recurrent, k[:, :, i], v[:, :, i], log_decay[:, :, i], beta[:, :, i]
        )
        recurrent = np.where(np.greater(counts, i)[None, :, None, None, None], after, recurrent)
        saved = np.where(np.equal(save_after, i + 1)[None, :, None, None, None], recurrent, saved)
    passed = (save_after >= 1) & (save_after <= counts)
    save_window = path_window(state.window, inputs, np.where(passed, save_after, 0))
    new_window = path_window(state.window, inputs, counts)
    return GDNState(recurrent, new_window), GDNState(saved, save_window), passed


@dataclass(frozen=True)
class GDNWeights:
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


def gdn_prefill(
    inputs: Float[np.ndarray, "R outputs"],
    weights: GDNWeights,
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


def gdn_verify_tree(
    inputs: Float[np.ndarray, "R outputs"],
    weights: GDNWeights,
    sizes: GatedDeltaConfig,
    recurrent: Float[np.ndarray, "B H K V"],
    window: Float[np.ndarray, "B 3 C"],
    parents: Int[np.ndarray, "B N"],
    row_of: Int[np.ndarray, "B N"],
    request: Int[np.ndarray, " R"],
    node: Int[np.ndarray, " R"],
) -> tuple[Float[np.ndarray, "R values"], ReplayInputs]:
    """GDN tree verification: same as `gdn_prefill`, for draft trees and without changing the
    states.

    Args:
      inputs, weights, sizes, recurrent, window: See `gdn_prefill`.
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


def gdn_decode(
    inputs: Float[np.ndarray, "B outputs"],
    weights: GDNWeights,
    sizes: GatedDeltaConfig,
    recurrent: Float[np.ndarray, "B H K V"],
    window: Float[np.ndarray, "B 3 C"],
) -> tuple[Float[np.ndarray, "B values"], Float[np.ndarray, "B H K V"], Float[np.ndarray, "B 3 C"]]:
    """GDN decode: same as `gdn_prefill`, for one row per request, by the recurrence itself."""
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
    out: Float[np.ndarray, "R H V"], z: Float[np.ndarray, "R H V"], weights: GDNWeights
) -> Float[np.ndarray, "R values"]:
    return gated_delta.gated_norm(out, z, weights.norm, weights.eps).reshape(len(out), -1)


GDNMixer = Callable[[int, Float[np.ndarray, "R outputs"]], Float[np.ndarray, "R values"]]
"""GDN layers of a pass: maps a layer's index among GDN layers and its projected inputs to its
output."""


def gdn_weights(config: ModelConfig, weights: Mapping[str, Any], layer: int) -> GDNWeights:
    """Returns the weights of one GDN layer besides its matrices."""
    names = ("conv", "a_log", "dt_bias", "norm")
    arrays = {name: weights[f"gated_delta.{name}"][layer] for name in names}
    return GDNWeights(**arrays, eps=config.rms_eps)


class PrefillGDN:
    """GDN layers of a prefill: chunked, with advancing states."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        state: GDNState,
        row_starts: Int[np.ndarray, " B1"],
    ) -> None:
        self._config, self._weights, self._row_starts = config, weights, row_starts
        self.recurrent, self.window = state.recurrent.copy(), state.window.copy()

    def __call__(
        self, layer: int, inputs: Float[np.ndarray, "R outputs"]
    ) -> Float[np.ndarray, "R values"]:
        """Same as `GDNMixer`."""
        assert self._config.gated_delta is not None  # a model with such layers has their sizes
        out, self.recurrent[layer], self.window[layer] = gdn_prefill(
            inputs,
            gdn_weights(self._config, self._weights, layer),
            self._config.gated_delta,
            self.recurrent[layer],
            self.window[layer],
            self._row_starts,
        )
        return out


class VerifyGDN:
    """GDN layers of a verify step: nodes continue from their parents; replay inputs are stored."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Any],
        state: GDNState,
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
        """Same as `GDNMixer`."""
        assert self._config.gated_delta is not None  # a model with such layers has their sizes
        out, kept = gdn_verify_tree(
            inputs,
            gdn_weights(self._config, self._weights, layer),
            self._config.gated_delta,
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
