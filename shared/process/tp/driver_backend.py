"""Backend of rank 0, which broadcasts every step plan to the worker ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from shared.boundary.backend import Backend, StepFuture, StepPlan, StepResult
from shared.boundary.program import LaunchMode, Program
from shared.boundary.shm_allgather import AllGatherTimeout
from shared.process.tp.plan_broadcast import EXCHANGE_S, PlanBroadcast
from shared.process.tp.workers import SERVING, RankError, Workers

LOST_S = 1.0
PLAN_S = 10.0
"""Time that a rank may take to free a slot for the next plan."""


class DriverBackend:
    """Backend of rank 0 and of the worker ranks, which run the same plans.

    The engine and the inner backend of rank 0 are unaware of other ranks.

    Attributes:
      capacity: BackendLimits of every rank.
    """

    def __init__(self, own: Backend, followers: Workers, shared: PlanBroadcast) -> None:
        self.capacity = own.capacity
        self._own, self._followers, self._shared = own, followers, shared
        self._indices = {program: index for index, program in enumerate(own.capacity.programs)}

    def workspace(self, program: Program) -> int:
        """See `Backend`; the same on every rank."""
        return self._own.workspace(program)

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """See `Backend`; returns when the last rank is ready, and reports the progress of the
        slowest.

        Raises:
          RankError: A rank is lost.
        """
        indices = [self._indices[program] for program in programs if program in self._indices]
        if len(indices) == len(programs):  # otherwise rank 0 raises the error
            self._followers.send("prepare", indices)
        begun: list[Program] = []
        reported = 0

        def report() -> None:
            nonlocal reported
            slowest = min([each.begun for each in self._followers.ranks], default=len(begun))
            while reported < min(len(begun), slowest):
                progress(begun[reported])
                reported += 1

        def begin(program: Program) -> None:
            begun.append(program)
            self._followers.check()
            report()

        self._own.prepare(programs, begin)
        self._followers.wait_until(lambda each: each.phase == SERVING, "ready", report)
        self._shared.wait_at_most(EXCHANGE_S)

    def launch(self, program: Program) -> LaunchMode:
        """See `Backend`."""
        return self._own.launch(program)

    def submit(self, plan: StepPlan) -> StepFuture:
        """See `Backend`; worker ranks receive the plan first, as their path is longer.

        Raises:
          RankError: A rank is lost.
        """
        self._followers.check()
        self._shared.write(self._indices[plan.program], plan.buffer, PLAN_S)
        return _DriverResult(self._own.submit(plan), self._followers)

    def close(self) -> None:
        """See `Backend`; all ranks end together, and may need a collective for it."""
        if self._followers.failure is None:
            self._followers.begin_close(self._shared.written)
        else:  # no other rank will join
            self._shared.wait_at_most(0.0)
        with suppress(AllGatherTimeout):  # a lost rank holds no resources
            self._own.close()
        self._followers.close()
        self._shared.close()


class _DriverResult:
    """Future of a step that runs on several ranks."""

    def __init__(self, future: StepFuture, followers: Workers) -> None:
        self._future, self._followers = future, followers

    def result(self) -> StepResult:
        """See `StepFuture`; if rank 0 could not complete the step, the error gives the lost rank.

        Raises:
          RankError: A rank is lost.
        """
        try:
            return self._future.result()
        except AllGatherTimeout as error:
            # A lost rank fails this step too, and may be detected slightly later.
            if not self._followers.lost_within(LOST_S):
                raise
            raise RankError(self._followers.failure) from error
