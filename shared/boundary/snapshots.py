"""Recurrent-state snapshots of a step."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32


@dataclass(frozen=True)
class Snapshots:
    """Recurrent state to restore before and to save within a step; snapshot 0 means none.

    A decode step can save the state at any length that it passes. A prefill can save it where the
    chunked delta rule computes one: a multiple of `shared.spec.gated_delta.CHUNK` tokens after the
    row's first token in this step, or after its last. Elsewhere `StepResult.snapshot_saved` is 0.

    Attributes:
      restore: Snapshot from which a starting row takes its state.
      save: Snapshot to write if the step passes `save_at` and can save there.
      save_at: Length at which the state is saved.
    """

    restore: Int32[np.ndarray, " B"]
    save: Int32[np.ndarray, " B"]
    save_at: Int32[np.ndarray, " B"]
