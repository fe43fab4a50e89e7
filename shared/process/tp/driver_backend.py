"""A backend whose steps other ranks run too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from shared.boundary.backend import Backend, Launch, StepFuture, StepPlan, StepResult
from shared.boundary.program import Program
from shared.boundary.shm_allgather import RankMissingError
from shared.process.tp.plan_broadcast import EXCHANGE_S, Shared
from shared.process.tp.workers import SERVING, Followers, RankError

LOST_S = 1.0
PLAN_S = 10.0
"""How long a rank may take to free a place for the next plan."""


class LeadingBackend:
    """Rank 0's own backend, and the others, which get the same plans.

    The engine and rank 0's backend know of no other rank.

    Attributes:
      capacity: Of every rank.
    """

    def __init__(self, own: Backend, followers: Followers, shared: Shared) -> None:
        self.capacity = own.capacity
        self._own, self._followers, self._shared = own, followers, shared
        self._indices = {program: index for index, program in enumerate(own.capacity.programs)}

    def workspace(self, program: Program) -> int:
        """See `Backend`; the same on every rank."""
        return self._own.workspace(program)

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """See `Backend`; returns when the last rank is ready, and tells of the slowest.

        Raises:
          RankError: A rank is lost.
        """
        indices = [self._indices[program] for program in programs if program in self._indices]
        if len(indices) == len(programs):  # else rank 0 says what is wrong
            self._followers.tell("prepare", indices)
        begun: list[Program] = []
        told = 0

        def tell() -> None:
            nonlocal told
            slowest = min([each.begun for each in self._followers.ranks], default=len(begun))
            while told < min(len(begun), slowest):
                progress(begun[told])
                told += 1

        def begin(program: Program) -> None:
            begun.append(program)
            self._followers.check()
            tell()

        self._own.prepare(programs, begin)
        self._followers.wait_until(lambda each: each.phase == SERVING, "ready", tell)
        self._shared.wait_at_most(EXCHANGE_S)

    def launch(self, program: Program) -> Launch:
        """See `Backend`."""
        return self._own.launch(program)

    def submit(self, plan: StepPlan) -> StepFuture:
        """See `Backend`; the others have the plan first, as they have the longer way to it.

        Raises:
          RankError: A rank is lost.
        """
        self._followers.check()
        self._shared.write(self._indices[plan.program], plan.buffer, PLAN_S)
        return _Led(self._own.submit(plan), self._followers)

    def close(self) -> None:
        """See `Backend`; all ranks end together, and may have to meet for it."""
        if self._followers.failure is None:
            self._followers.begin_close(self._shared.written)
        else:  # nobody comes any more
            self._shared.wait_at_most(0.0)
        with suppress(RankMissingError):  # whose rank has nothing more to give back
            self._own.close()
        self._followers.close()
        self._shared.close()


class _Led:
    """The result of a step of several ranks."""

    def __init__(self, future: StepFuture, followers: Followers) -> None:
        self._future, self._followers = future, followers

    def result(self) -> StepResult:
        """See `StepFuture`; where rank 0 could not end the step, the lost rank is the reason.

        Raises:
          RankError: A rank is lost.
        """
        try:
            return self._future.result()
        except RankMissingError as error:
            # A rank that is lost fails this step too, and may be found out a moment later.
            if not self._followers.lost_within(LOST_S):
                raise
            raise RankError(self._followers.failure) from error
