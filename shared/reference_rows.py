"""The rows of a plan and their trees, as the reference backend works with them."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int, Int32

from shared.backend import (
    Mask,
    Snapshots,
    StepPlan,
)
from shared.spec import acceptance, sampling
from shared.spec.mamba_state import DeltaState
from shared.spec.sampling import Sampling


@dataclass(frozen=True)
class Batch:
    """The rows of a plan that are no padding; `index` is their place in the plan."""

    index: Int[np.ndarray, " B"]
    slots: Int32[np.ndarray, " B"]
    page_table: Int32[np.ndarray, "B P"]
    starts: Bool[np.ndarray, " B"]
    draft_from: Int32[np.ndarray, " B"]
    sampling: Sampling
    snapshots: Snapshots

    @classmethod
    def of(cls, plan: StepPlan) -> "Batch":
        """The rows that name a slot."""
        index = np.flatnonzero(plan.slots)
        snapshots = plan.snapshots
        return cls(
            index,
            plan.slots[index],
            plan.page_table[index],
            plan.starts[index] != 0,
            plan.draft_from[index],
            plan.sampling.rows(index),
            Snapshots(snapshots.restore[index], snapshots.save[index], snapshots.save_at[index]),
        )


@dataclass(frozen=True)
class Trees:
    """The draft tree of each row."""

    tokens: Int[np.ndarray, "B N"]
    parents: Int[np.ndarray, "B N"]
    num_nodes: Int[np.ndarray, " B"]
    forced: Bool[np.ndarray, " B"]

    def forced_choices(
        self, choices: Int[np.ndarray, "B N"]
    ) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
        """As `acceptance.force`."""
        return acceptance.force(self.tokens, self.num_nodes, choices, self.forced)


def take(state: DeltaState, index: Int[np.ndarray, " B"]) -> DeltaState:
    """The states of some slots or snapshots."""
    return DeltaState(state.recurrent[:, index], state.window[:, index])


def put(state: DeltaState, index: Int[np.ndarray, " B"], rows: DeltaState) -> None:
    """Writes the states of some slots or snapshots."""
    state.recurrent[:, index] = rows.recurrent
    state.window[:, index] = rows.window


def noise_of(
    scores: Float[np.ndarray, "R vocab"], positions: Int[np.ndarray, " R"], how: Sampling
) -> Float[np.ndarray, "R vocab"]:
    """The target's noise; greedy batches compute none."""
    if not (how.temperature > 0).any():
        return np.zeros(scores.shape, np.float32)
    return sampling.gumbel(how.seed, positions, scores.shape[1], sampling.TARGET_STREAM)


def allowed_of(
    mask: Mask | None, index: Int[np.ndarray, " B"], vocab: int
) -> Bool[np.ndarray, "B N vocab"] | None:
    """The tokens that the grammar allows at each node, or None without a grammar."""
    if mask is None:
        return None
    bytes_of = np.ascontiguousarray(mask.bits).view(np.uint8)
    bits = np.unpackbits(bytes_of, axis=1, bitorder="little")[:, :vocab]
    return bits[mask.index[index]] != 0


def roots(newest: Int32[np.ndarray, " B"]) -> Trees:
    """Trees of one node."""
    parents = np.zeros((len(newest), 1), np.int32)
    return Trees(newest[:, None], parents, np.ones_like(newest), np.zeros(len(newest), bool))


def tree_fields(trees: Trees) -> dict[str, np.ndarray]:
    """As the result names them."""
    return {"drafts": trees.tokens, "parents": trees.parents, "num_nodes": trees.num_nodes}
