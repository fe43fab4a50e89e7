"""The end of a step that does not end.

The engine's thread waits for the device and cannot look at a clock meanwhile, so another thread
does. It is no profiler: it says which step was waited for, and where.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shared.boundary.backend import Backend, Launch, StepFuture, StepPlan, StepResult
from shared.boundary.program import Program

CHECK_S = 0.5
EXIT_FAILED = 1
STOP_WAIT_S = 2.0  # for the step in flight when a signal came; all in all the end takes below 5 s
END_WAIT_S = 8.0  # for an end that no step holds up


class Watchdog:
    """Watches the calls of one thread.

    Attributes:
      doing: What the watched thread is at, for the reader.
      timeout_s: How long a call may take.
      standing: Says how far others are that take part, for the reader.
    """

    def __init__(self, timeout_s: float) -> None:
        """Watches nothing yet.

        Args:
          timeout_s: How long a call may take.
        """
        self.doing, self.timeout_s = "a step", timeout_s
        self.standing: Callable[[], str] = str
        self._began = None
        self._end: Callable[[str], None] = _end_start
        self._ending = threading.Lock()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A call that must end in time."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def start(
        self, wait_for_end: Callable[[float], bool], end: Callable[[str | None], None]
    ) -> None:
        """Begins to look at the clock.

        From here on `fail` ends the process in the same way.

        Args:
          wait_for_end: Waits at most so many seconds; whether the process was told to end.
          end: Ends the process at once; it gets the failure, or None where that was told.
        """
        self._end = end
        threading.Thread(target=self._watch, args=(wait_for_end, end), daemon=True).start()

    def fail(self, failure: str) -> None:
        """Ends the process at once, with what any thread has found out.

        Args:
          failure: The reason, for the reader.
        """
        with self._ending:
            self._end(failure)

    def claim_end(self) -> None:
        """Has the calling thread end the process, unless one that `fail`s is about to.

        That one is not disturbed: this then does not return.
        """
        self._ending.acquire()

    def _watch(
        self, wait_for_end: Callable[[float], bool], end: Callable[[str | None], None]
    ) -> None:
        while not wait_for_end(CHECK_S):
            if self._lasts() > self.timeout_s:
                faulthandler.dump_traceback(file=sys.stderr)
                self.fail(
                    f"{self.doing} did not finish within {self.timeout_s:g} s{self.standing()}"
                )
                return
        told = time.monotonic()
        while self._lasts() < STOP_WAIT_S and time.monotonic() - told < END_WAIT_S:
            time.sleep(CHECK_S / 5)
        if self._began is None:  # what stands still is no step: the traceback says what
            faulthandler.dump_traceback(file=sys.stderr)
        end(None)

    def _lasts(self) -> float:
        """Seconds of the call that is under way."""
        began = self._began  # the other thread may set it to None between two looks
        return 0.0 if began is None else time.monotonic() - began


def _end_start(failure: str) -> None:
    """Of a process that does not serve yet."""
    print(failure, file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)


class NamedSteps:
    """A backend that tells a watchdog which step is waited for."""

    def __init__(self, backend: Backend, watchdog: Watchdog) -> None:
        self.capacity = backend.capacity
        self._backend, self._watchdog, self._count = backend, watchdog, 0

    def workspace(self, program: Program) -> int:
        """See `Backend`."""
        return self._backend.workspace(program)

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """See `Backend`."""
        self._backend.prepare(programs, progress)

    def launch(self, program: Program) -> Launch:
        """See `Backend`."""
        return self._backend.launch(program)

    def submit(self, plan: StepPlan) -> StepFuture:
        """See `Backend`."""
        self._count += 1
        name = f"step {self._count}, a {plan.program},"
        self._watchdog.doing = name
        return _Named(self._backend.submit(plan), name, self._watchdog)

    def close(self) -> None:
        """See `Backend`."""
        self._backend.close()


class _Named:
    """The result of a step that has a name."""

    def __init__(self, future: StepFuture, name: str, watchdog: Watchdog) -> None:
        self._future, self._name, self._watchdog = future, name, watchdog

    def result(self) -> StepResult:
        """See `StepFuture`."""
        self._watchdog.doing = self._name
        return self._future.result()
