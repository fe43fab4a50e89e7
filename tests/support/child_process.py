"""Child processes that run one function each, with a pipe for progress messages."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

END_S = 30.0
"""Seconds within which a process must end after its last message."""


class Spawned(NamedTuple):
    """A process, and the line to it."""

    process: Any
    line: Connection

    @classmethod
    def begin(cls, function: Callable[..., None], *arguments: Any) -> Spawned:
        """Runs a function of a module in a new process.

        Args:
          function: Takes its end of the line, over which it sends pairs of a kind and a value, and
            the arguments.
        """
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        process = context.Process(target=function, args=(there, *arguments))
        process.start()
        there.close()
        return cls(process, here)

    def heard(self, until: float) -> tuple[str, Any]:
        """Receives the next message; after a timeout or an exit it has the kind "failed" and an
        error.

        Args:
          until: Deadline, as a value of `time.monotonic`.
        """
        if not self.line.poll(max(until - time.monotonic(), 0)):
            return "failed", TimeoutError("it sent nothing for too long")
        try:
            return self.line.recv()
        except EOFError:
            self.process.join(END_S)
            return "failed", RuntimeError(f"it has ended with code {self.process.exitcode}")

    def end(self) -> None:
        """Waits for the process within the time limit, and kills it afterwards."""
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
