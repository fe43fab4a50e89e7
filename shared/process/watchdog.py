"""Watchdog: terminates the server when a step exceeds `--watchdog-timeout`.

The engine's thread waits for the device and cannot check a clock meanwhile, so another thread does.
The message names the step, and the traceback shows the position.
"""

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from shared.boundary.backend import Backend, StepFuture, StepPlan, StepResult
from shared.boundary.program import LaunchMode, Program

CHECK_S = 0.5
EXIT_FAILED = 1
STOP_WAIT_S = 2.0  # for the step in flight when a signal arrives; the total end takes below 5 s
END_WAIT_S = 8.0  # for an end without a step in flight


class Watchdog:
    """Monitors the calls of one thread.

    Attributes:
      doing: Description of the current call.
      timeout_s: Maximum seconds of a call.
      ranks_progress: Returns the progress of other ranks, for messages.
    """

    def __init__(self, timeout_s: float) -> None:
        """Creates a watchdog that is not started.

        Args:
          timeout_s: Maximum seconds of a call.
        """
        self.doing, self.timeout_s = "a step", timeout_s
        self.ranks_progress: Callable[[], str] = str
        self._began = None
        self._end: Callable[[str], None] = _end_start
        self._ending = threading.Lock()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Monitors a call."""
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._began = None

    def start(
        self, wait_for_end: Callable[[float], bool], end: Callable[[str | None], None]
    ) -> None:
        """Starts the monitoring thread.

        From here on `fail` ends the process with `end`.

        Args:
          wait_for_end: Waits at most a number of seconds; returns True after a stop signal.
          end: Ends the process at once; receives the failure, or None after a stop signal.
        """
        self._end = end
        threading.Thread(target=self._watch, args=(wait_for_end, end), daemon=True).start()

    def fail(self, failure: str) -> None:
        """Ends the process at once with a failure found by any thread.

        Args:
          failure: The reason.
        """
        with self._ending:
            self._end(failure)

    def claim_end(self) -> None:
        """Lets the calling thread end the process; does not return if another thread is ending it
        with `fail`.
        """
        self._ending.acquire()

    def _watch(
        self, wait_for_end: Callable[[float], bool], end: Callable[[str | None], None]
    ) -> None:
        while not wait_for_end(CHECK_S):
            if self._lasts() > self.timeout_s:
                faulthandler.dump_traceback(file=sys.stderr)
                self.fail(
                    f"{self.doing} did not finish within {self.timeout_s:g} s"
                    f"{self.ranks_progress()}"
                )
                return
        stopped = time.monotonic()
        while self._lasts() < STOP_WAIT_S and time.monotonic() - stopped < END_WAIT_S:
            time.sleep(CHECK_S / 5)
        if self._began is None:  # not in a step: the traceback shows the position
            faulthandler.dump_traceback(file=sys.stderr)
        end(None)

    def _lasts(self) -> float:
        """Returns the seconds of the current call."""
        began = self._began  # the other thread may set it to None at any time
        return 0.0 if began is None else time.monotonic() - began


def _end_start(failure: str) -> None:
    """Ends a process that does not serve yet."""
    print(failure, file=sys.stderr, flush=True)
    os._exit(EXIT_FAILED)


class WatchedBackend:
    """Backend wrapper that sets the watchdog's description of the current step."""

    def __init__(self, backend: Backend, watchdog: Watchdog) -> None:
        self.capacity = backend.capacity
        self._backend, self._watchdog, self._count = backend, watchdog, 0

    def workspace(self, program: Program) -> int:
        """Same as `Backend.workspace`."""
        return self._backend.workspace(program)

    def prepare(self, programs: Sequence[Program], progress: Callable[[Program], None]) -> None:
        """Same as `Backend.prepare`."""
        self._backend.prepare(programs, progress)

    def launch(self, program: Program) -> LaunchMode:
        """Same as `Backend.launch`."""
        return self._backend.launch(program)

    def submit(self, plan: StepPlan) -> StepFuture:
        """Same as `Backend.submit`."""
        self._count += 1
        name = f"step {self._count}, a {plan.program},"
        self._watchdog.doing = name
        return _Named(self._backend.submit(plan), name, self._watchdog)

    def close(self) -> None:
        """Same as `Backend.close`."""
        self._backend.close()


class _Named:
    """Result of a step with a description."""

    def __init__(self, future: StepFuture, name: str, watchdog: Watchdog) -> None:
        self._future, self._name, self._watchdog = future, name, watchdog

    def result(self) -> StepResult:
        """Same as `StepFuture.result`."""
        self._watchdog.doing = self._name
        return self._future.result()
