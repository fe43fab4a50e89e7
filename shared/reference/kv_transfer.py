"""Export and import steps of the reference backend; see `shared.spec.kv_transfer`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import BackendLimits, StepPlan
from shared.boundary.transfer_spec import ImportKV, TransferArray, TransferSpec, word_spans
from shared.reference.device_state import DeviceState
from shared.reference.drafters import ReferenceDrafter
from shared.spec import kv_transfer


@dataclass(frozen=True)
class ReferenceTransfer:
    """One export or import step.

    Attributes:
      plan: The plan.
      state: State of the target.
      drafter: Drafter with a state of its own; None without one.
      spec: Entries of KV transfer.
    """

    plan: StepPlan
    state: DeviceState
    drafter: ReferenceDrafter | None
    spec: TransferSpec

    @classmethod
    def of(
        cls,
        plan: StepPlan,
        capacity: BackendLimits,
        state: DeviceState,
        drafter: ReferenceDrafter | None,
    ) -> ReferenceTransfer:
        """Returns the step of a plan."""
        assert capacity.transfer is not None  # otherwise the program does not exist
        return cls(plan, state, drafter, capacity.transfer)

    def run(self) -> dict[str, np.ndarray]:
        """Runs the step; returns the words of an export by the names of `TransferSpec.fields`."""
        arrays, work = self.spec.arrays_by_field(self.plan.program), self.plan.work
        if not isinstance(work, ImportKV):
            return {
                name: np.concatenate([self._words(x, i) for x in each], axis=1)
                for i, (name, each) in enumerate(arrays.items())
            }
        layers = work.words.layers
        given = work.words.all_pages if layers is None else [layers]
        for place, (each, words) in enumerate(zip(arrays.values(), given, strict=True)):
            for array, span in word_spans(each):
                self._write(array, place, np.ascontiguousarray(words[:, span]))
        return {}

    def _words(self, array: TransferArray, place: int) -> Int32[np.ndarray, "n words"]:
        if self.plan.program.blocks:
            return kv_transfer.layer_words(self._states(array), int(self.plan.snapshots.restore[0]))
        return kv_transfer.page_words(self._pool(array), self.plan.page_tables[place][0])

    def _write(self, array: TransferArray, place: int, words: Int32[np.ndarray, "n words"]) -> None:
        if self.plan.program.blocks:
            states, snapshot = self._states(array), int(self.plan.snapshots.save[0])
            states[:] = kv_transfer.with_layers(states, snapshot, words)
        else:
            pool, table = self._pool(array), self.plan.page_tables[place][0]
            pool[:] = kv_transfer.with_pages(pool, table, words)

    def _pool(self, array: TransferArray) -> np.ndarray:
        if not array.of_drafter:
            return self.state.kv[array.index]
        assert self.drafter is not None  # it has a pool
        return self.drafter.kv_pools[array.index]

    def _states(self, array: TransferArray) -> np.ndarray:
        """Returns the snapshots of the layers of the step."""
        held = self.state.snapshots
        if array.of_drafter:
            assert self.drafter is not None  # it has states
            assert self.drafter.snapshots is not None
            held = self.drafter.snapshots
        return getattr(held, array.name)[self.spec.local_layers(self.plan.program.blocks)]
