"""Recurrent layer (gated DeltaNet) between its two projections, on the states of request slots.

The operations are those of `shared.spec.recurrent_mixer`, with states addressed by slot. A verify
step reads the states and stores the inputs for state replay. Plain decoding advances the recurrent
states at once, but not the convolution windows. A commit applies the accepted path to both.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from shared.models.mixers import RecurrentConfig
from shared.spec.recurrent_mixer import (
    RecurrentWeights,
    recurrent_decode,
    recurrent_prefill,
    recurrent_verify_tree,
)
from shared.spec.recurrent_state import RecurrentState, ReplayInputs, path_window, replay


@dataclass(frozen=True)
class TreeNodes:
    """Layout of the nodes of a step's trees.

    Attributes:
      parents: The trees; None in a backend if all are chains.
      row_starts: First flat row of each request, and the end.
      row_of: Row of each node.
      request, node: Request and node of each row.
    """

    parents: Int[np.ndarray, "B N"]
    row_starts: Int[np.ndarray, " B1"]
    row_of: Int[np.ndarray, "B N"]
    request: Int[np.ndarray, " R"]
    node: Int[np.ndarray, " R"]


def take(states: RecurrentState, index: Int[np.ndarray, " B"]) -> RecurrentState:
    """Reads the states of some slots or snapshots."""
    return RecurrentState(states.recurrent[:, index], states.window[:, index])


def put(
    states: RecurrentState, index: Int[np.ndarray, " B"], rows: RecurrentState
) -> RecurrentState:
    """Writes the states of some slots or snapshots."""
    recurrent, window = states.recurrent.copy(), states.window.copy()
    recurrent[:, index], window[:, index] = rows.recurrent, rows.window
    return RecurrentState(recurrent, window)


def prefill(
    inputs: Float[np.ndarray, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    states: RecurrentState,
    layer: int,
    slots: Int[np.ndarray, " B"],
    row_starts: Int[np.ndarray, " B1"],
) -> tuple[Float[np.ndarray, "R values"], RecurrentState]:
    """Prefill: applies `recurrent_mixer.recurrent_prefill` to one layer.

    Args:
      inputs: Output of the input projection.
      weights, sizes: Weights and config of the layer.
      states: States of all layers and slots.
      layer: Index of the layer.
      slots: Slots of the requests.
      row_starts: First flat row of each request, and the end.
    """
    recurrent, window = states.recurrent.copy(), states.window.copy()
    out, recurrent[layer, slots], window[layer, slots] = recurrent_prefill(
        inputs,
        weights,
        sizes,
        states.recurrent[layer, slots],
        states.window[layer, slots],
        row_starts,
    )
    return out, RecurrentState(recurrent, window)


def verify(
    inputs: Float[np.ndarray, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    states: RecurrentState,
    layer: int,
    slots: Int[np.ndarray, " B"],
    nodes: TreeNodes,
) -> tuple[Float[np.ndarray, "R values"], ReplayInputs]:
    """Tree verification: applies `recurrent_mixer.recurrent_verify_tree`; see `prefill`."""
    return recurrent_verify_tree(
        inputs,
        weights,
        sizes,
        states.recurrent[layer, slots],
        states.window[layer, slots],
        nodes.parents,
        nodes.row_of,
        nodes.request,
        nodes.node,
    )


def decode(
    inputs: Float[np.ndarray, "R outputs"],
    weights: RecurrentWeights,
    sizes: RecurrentConfig,
    states: RecurrentState,
    layer: int,
    slots: Int[np.ndarray, " B"],
) -> tuple[Float[np.ndarray, "R values"], RecurrentState]:
    """Decode: applies `recurrent_mixer.recurrent_decode` to one layer; `commit` updates the
    convolution windows.
    """
    recurrent = states.recurrent.copy()
    out, recurrent[layer, slots], _ = recurrent_decode(
        inputs, weights, sizes, states.recurrent[layer, slots], states.window[layer, slots]
    )
    return out, RecurrentState(recurrent, states.window)


def commit(
    states: RecurrentState,
    snapshots: RecurrentState,
    kept: ReplayInputs | Float[np.ndarray, "L B one C"],
    slots: Int[np.ndarray, " B"],
    path: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
    save_after: Int[np.ndarray, " B"],
    save: Int[np.ndarray, " B"],
) -> tuple[RecurrentState, RecurrentState]:
    """State commit: applies `recurrent_state.replay` to all layers, or only the windows of advanced
    states.

    Args:
      states, snapshots: States of all slots, and all snapshots.
      kept: Replay inputs of a verify step; for advanced states, the convolution inputs.
      slots: Slots of the requests.
      path, counts, save_after: See `recurrent_state.replay`.
      save: Snapshot to write for each request; 0 for none.
    """
    before = take(states, slots)
    passed = (save_after >= 1) & (save_after <= counts) & (save != 0)
    if isinstance(kept, ReplayInputs):
        new, saved, _ = replay(before, kept, path, counts, save_after)
    else:
        lengths = (counts, np.where(passed, save_after, 0))
        new, saved = (
            RecurrentState(before.recurrent, path_window(before.window, kept, x)) for x in lengths
        )
    taken = take(saved, np.flatnonzero(passed))
    return put(states, slots, new), put(snapshots, save[passed], taken)
