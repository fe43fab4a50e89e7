"""Recurrent state of a slot, and its replay over an accepted path.

Per layer, the state is the recurrent state `[H, K, V]` in float32 and the convolution window: the
last three convolution inputs, oldest first, zeros before the first token. A verify step changes
neither; it stores the inputs of its nodes. The inputs of the accepted path are then replayed from
the old state, by the same recurrence and in the same order as plain decoding. (Serving engines call
this state "mamba state".)
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from shared.spec import gated_delta, layers

WINDOW = 3
"""Convolution inputs (width 4) before the current one."""


@dataclass(frozen=True)
class RecurrentState:
    """States of a batch of rows in all recurrent layers.

    Attributes:
      recurrent: Recurrent state, float32.
      window: The last three convolution inputs, oldest first.
    """

    recurrent: Float[np.ndarray, "L B H K V"]
    window: Float[np.ndarray, "L B 3 C"]


@dataclass(frozen=True)
class ReplayInputs:
    """Inputs of a verify step's nodes in all recurrent layers, stored unchanged for state replay.

    Without the delta rule there is no `beta`.
    """

    k: Float[np.ndarray, "L B N H K"]
    v: Float[np.ndarray, "L B N H V"]
    log_decay: Float[np.ndarray, "L B N H"]
    beta: Float[np.ndarray, "L B N H"] | None
    inputs: Float[np.ndarray, "L B N C"]


def conv(
    windows: Float[np.ndarray, "*rows 3 C"],
    inputs: Float[np.ndarray, "*rows C"],
    weight: Float[np.ndarray, "C 4"],
    bias: Float[np.ndarray, " C"] | None,
) -> Float[np.ndarray, "*rows C"]:
    """Computes the depthwise causal convolution of width 4, then SiLU; `windows` are the inputs
    before.
    """
    taps = np.concatenate([windows, inputs[..., None, :]], axis=-2)
    total = np.sum(taps * weight.T, axis=-2)
    return layers.silu(total if bias is None else total + bias)


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
    state: RecurrentState,
    kept: ReplayInputs,
    path: Int[np.ndarray, "B W"],
    counts: Int[np.ndarray, " B"],
    save_after: Int[np.ndarray, " B"],
) -> tuple[RecurrentState, RecurrentState, Bool[np.ndarray, " B"]]:
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
    rows = np.arange(len(path))[:, None]
    k, v, log_decay, inputs = (
        x[:, rows, path] for x in (kept.k, kept.v, kept.log_decay, kept.inputs)
    )
    beta = None if kept.beta is None else kept.beta[:, rows, path]
    recurrent = saved = state.recurrent
    for i in range(path.shape[1]):
        own = None if beta is None else beta[:, :, i]
        after = gated_delta.update(recurrent, k[:, :, i], v[:, :, i], log_decay[:, :, i], own)
        recurrent = np.where(np.greater(counts, i)[None, :, None, None, None], after, recurrent)
        saved = np.where(np.equal(save_after, i + 1)[None, :, None, None, None], recurrent, saved)
    passed = (save_after >= 1) & (save_after <= counts)
    save_window = path_window(state.window, inputs, np.where(passed, save_after, 0))
    new_window = path_window(state.window, inputs, counts)
    return RecurrentState(recurrent, new_window), RecurrentState(saved, save_window), passed
