"""A backend that keeps the draft trees of its steps."""

from __future__ import annotations

import numpy as np

from shared.boundary.backend import Backend, StepFuture, StepPlan
from shared.boundary.program import StepKind


class Recorder:
    """A backend that keeps the draft trees of its decode steps."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self.capacity, self.launch = backend, backend.capacity, backend.launch
        self._steps: list[tuple[int, StepFuture]] = []

    def submit(self, plan: StepPlan) -> StepFuture:
        future = self._backend.submit(plan)
        if plan.program.work is StepKind.DECODE:
            self._steps.append((np.count_nonzero(plan.slots), future))
        return future

    def close(self) -> None:
        self._backend.close()

    def trees(self) -> list[tuple]:
        """Tokens and parents of every tree, in order."""
        return [
            (tuple(result.drafts[row]), tuple(result.parents[row]))
            for rows, future in self._steps
            for result in [future.result()]
            for row in range(rows)
        ]
