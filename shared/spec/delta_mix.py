"""What a gated-delta layer does between its two products, to the states of the slots.

As `shared.spec.mamba_state`, whose states are those of a batch's rows: here they stay in the slots,
of which a batch names some. A verify reads them and keeps what a replay needs; plain decoding
advances them at once, all but the windows; a commit makes the accepted path their past.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from shared.models.layers import GatedDeltaConfig
from shared.spec.mamba_state import (
    DeltaState,
    DeltaWeights,
    Kept,
    mix_chunks,
    mix_step,
    mix_tree,
    path_window,
    replay,
)


@dataclass(frozen=True)
class Nodes:
    """Where the nodes of a step's trees stand.

    Attributes:
      parents: The trees; of a backend None where all are chains.
      row_starts: First flat row of each request, and the end.
      row_of: The row of each node.
      request, node: Of each row.
    """

    parents: Int[np.ndarray, "B N"]
    row_starts: Int[np.ndarray, " B1"]
    row_of: Int[np.ndarray, "B N"]
    request: Int[np.ndarray, " R"]
    node: Int[np.ndarray, " R"]


def take(states: DeltaState, index: Int[np.ndarray, " B"]) -> DeltaState:
    """The states of some slots or snapshots."""
    return DeltaState(states.recurrent[:, index], states.window[:, index])


def put(states: DeltaState, index: Int[np.ndarray, " B"], rows: DeltaState) -> DeltaState:
    """Replaces the states of some slots or snapshots."""
    recurrent, window = states.recurrent.copy(), states.window.copy()
    recurrent[:, index], window[:, index] = rows.recurrent, rows.window
    return DeltaState(recurrent, window)


def feed(
    inputs: Float[np.ndarray, "R outputs"],
    weights: DeltaWeights,
    sizes: GatedDeltaConfig,
    states: DeltaState,
    layer: int,
    slots: Int[np.ndarray, " B"],
    row_starts: Int[np.ndarray, " B1"],
) -> tuple[Float[np.ndarray, "R values"], DeltaState]:
    """`mamba_state.mix_chunks` of a layer.

    Args:
      states: Of all layers and slots.
      slots: Of the requests.
    """
    held = (states.recurrent[layer, slots], states.window[layer, slots])
    out, *new = mix_chunks(inputs, weights, sizes, *held, row_starts)
    recurrent, window = states.recurrent.copy(), states.window.copy()
    recurrent[layer, slots], window[layer, slots] = new
    return out, DeltaState(recurrent, window)


def verify(
    inputs: Float[np.ndarray, "R outputs"],
    weights: DeltaWeights,
    sizes: GatedDeltaConfig,
    states: DeltaState,
    layer: int,
    slots: Int[np.ndarray, " B"],
    nodes: Nodes,
) -> tuple[Float[np.ndarray, "R values"], Kept]:
    """`mamba_state.mix_tree` of a layer; see `feed`."""
    held = (states.recurrent[layer, slots], states.window[layer, slots])
    where = (nodes.parents, nodes.row_of, nodes.request, nodes.node)
    return mix_tree(inputs, weights, sizes, *held, *where)


def advance(
    inputs: Float[np.ndarray, "R outputs"],
    weights: DeltaWeights,
    sizes: GatedDeltaConfig,
    states: DeltaState,
    layer: int,
    slots: Int[np.ndarray, " B"],
) -> tuple[Float[np.ndarray, "R values"], DeltaState]:
    """`mamba_state.mix_step` of a layer, whose windows follow in `commit`; see `feed`."""
    held = (states.recurrent[layer, slots], states.window[layer, slots])
    out, new, _ = mix_step(inputs, weights, sizes, *held)
    recurrent = states.recurrent.copy()
    recurrent[layer, slots] = new
    return out, DeltaState(recurrent, states.window)


def commit(
    states: DeltaState,
    snapshots: DeltaState,
    kept: Kept | Float[np.ndarray, "L B one C"],
    slots: Int[np.ndarray, " B"],
    path: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
    save_after: Int[np.ndarray, " B"],
    save: Int[np.ndarray, " B"],
) -> tuple[DeltaState, DeltaState]:
    """`mamba_state.replay` of all layers; of states that have advanced only the windows follow.

    Args:
      states, snapshots: Of all slots, and all snapshots.
      kept: What verifies have kept; of states that have advanced, the convolution's inputs.
      path, counts, save_after: See `mamba_state.replay`.
      save: Which snapshot a request's is written to; 0: none.
    """
    before = take(states, slots)
    passed = (save_after >= 1) & (save_after <= counts) & (save != 0)
    if isinstance(kept, Kept):
        new, saved, _ = replay(before, kept, path, counts, save_after)
    else:
        lengths = (counts, np.where(passed, save_after, 0))
        new, saved = (
            DeltaState(before.recurrent, path_window(before.window, kept, x)) for x in lengths
        )
    taken = take(saved, np.flatnonzero(passed))
    return put(states, slots, new), put(snapshots, save[passed], taken)
