"""Export and import steps of the reference backend; see `shared.spec.kv_transfer`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int32

from shared.boundary.backend import BackendLimits, StepPlan
from shared.boundary.transfer_spec import Arrays, ImportKV, TransferSpec
from shared.reference.device_state import DeviceState
from shared.reference.drafters import ReferenceDrafter
from shared.spec import kv_transfer
from shared.spec.gdn_state import GDNState


@dataclass(frozen=True)
class ReferenceTransfer:
    """One export or import step.

    Attributes:
      plan: The plan.
      state: State of the target.
      drafter: Drafter with a state of its own; None without one.
      windows: Sliding windows of the window pools.
      spec: Entries of KV transfer.
    """

    plan: StepPlan
    state: DeviceState
    drafter: ReferenceDrafter | None
    windows: tuple[int, ...]
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
        windows = tuple(pool.window for pool in capacity.window_pools)
        return cls(plan, state, drafter, windows, capacity.transfer)

    def run(self) -> dict[str, np.ndarray]:
        """Runs the step; returns the words of an export by the names of `TransferSpec.fields`."""
        if self.plan.program.blocks:
            return self._layers()
        given = self.plan.work.words if isinstance(self.plan.work, ImportKV) else None
        tables = [table[0] for table in self.plan.page_tables]
        if given is None:
            fields = self.spec.fields(self.plan.program)
            pairs = zip((self.spec.pages, *self.spec.windows), tables, strict=True)
            return {
                name: self._exported(arrays, table)
                for (name, _), (arrays, table) in zip(fields, pairs, strict=True)
            }
        assert given.pages is not None  # those of the page table
        pages = given.pages, *given.windows
        pairs = zip((self.spec.pages, *self.spec.windows), tables, pages, strict=True)
        for arrays, table, words in pairs:
            self._import(arrays, table, words)
        return {}

    def _exported(
        self, arrays: Arrays, table: Int32[np.ndarray, " n"]
    ) -> Int32[np.ndarray, "n words"]:
        pools = [self._pools(array.of_drafter)[array.index] for array in arrays]
        found = [kv_transfer.page_words(pool, table) for pool in pools]
        return np.concatenate(found or [np.zeros((len(table), 0), np.int32)], axis=1)

    def _import(
        self, arrays: Arrays, table: Int32[np.ndarray, " n"], words: Int32[np.ndarray, "n words"]
    ) -> None:
        ends = np.cumsum([array.words for array in arrays])
        for array, part in zip(arrays, np.split(words, ends[:-1], axis=1), strict=True):
            pool = self._pools(array.of_drafter)[array.index]
            pool[:] = kv_transfer.with_pages(pool, table, np.ascontiguousarray(part))

    def _layers(self) -> dict[str, np.ndarray]:
        layers, plan = self.plan.program.blocks, self.plan
        arrays, local = self.spec.arrays_of(layers), self.spec.local_layers(layers)
        held = [getattr(self._snapshots(array.of_drafter), array.name)[local] for array in arrays]
        if not isinstance(plan.work, ImportKV):
            snapshot = int(plan.snapshots.restore[0])
            found = [kv_transfer.layer_words(states, snapshot) for states in held]
            return {"kv_layers": np.concatenate(found, axis=1)}
        words, snapshot = plan.work.words.layers, int(plan.snapshots.save[0])
        assert words is not None  # those of the layers
        ends = np.cumsum([array.words for array in arrays])
        for states, part in zip(held, np.split(words, ends[:-1], axis=1), strict=True):
            states[:] = kv_transfer.with_layers(states, snapshot, np.ascontiguousarray(part))
        return {}

    def _pools(self, of_drafter: bool) -> tuple[np.ndarray, ...]:
        if not of_drafter:
            return self.state.kv
        assert self.drafter is not None
        return self.drafter.kv_pools

    def _snapshots(self, of_drafter: bool) -> GDNState:
        if not of_drafter:
            return self.state.snapshots
        assert self.drafter is not None
        assert self.drafter.snapshots is not None  # otherwise it has no pool of states
        return self.drafter.snapshots
