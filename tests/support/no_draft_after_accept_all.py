"""A backend with steps without drafts after a step in which every draft was accepted.

Another engine read a stale recurrent state there (v#52942): its steps of zero accepted drafts were
special, and the path of the step before was longer than one token.
"""

from __future__ import annotations

from itertools import cycle

import numpy as np

from shared.boundary.backend import Backend, StepFuture, StepPlan
from shared.boundary.program import StepKind


class Starving:
    """Allows rows one, two, ... drafts in turn, and none after a step that accepted all it had.

    Attributes:
      capacity: The backend's.
      max_before: Drafts of the longest accepted path before each step that was denied drafts.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend, self.capacity, self.launch = backend, backend.capacity, backend.launch
        self._last: tuple[int, StepFuture] | None = None
        self._most = cycle(
            range(1, 1 + max(program.shape.depth for program in self.capacity.programs))
        )
        self.max_before: list[int] = []

    def submit(self, plan: StepPlan) -> StepFuture:
        """Queues a step, if it decodes with fewer drafts than it was planned to have."""
        if plan.program.work is not StepKind.DECODE:
            return self._backend.submit(plan)
        accepted = self._accepted_by_all()
        if accepted:
            self.max_before.append(accepted)
        plan.sampling.max_drafts[:] = 0 if accepted else next(self._most)
        future = self._backend.submit(plan)
        self._last = int(np.count_nonzero(plan.slots)), future
        return future

    def _accepted_by_all(self) -> int:
        """The most drafts of a row in the step before, if every row accepted all of its own."""
        if self._last is None:
            return 0
        rows, future = self._last
        result = future.result()
        counts, nodes = result.counts[:rows], result.num_nodes[:rows]
        return int(nodes.max()) - 1 if (counts == nodes).all() else 0

    def close(self) -> None:
        self._backend.close()
