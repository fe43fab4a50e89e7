"""Ranks as processes, each with a GPU; several share one where there are fewer."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from tests.support.child_process import Spawned

SECONDS = 120.0
"""In which each rank must reach the next meeting of all."""
LOOKS = 1 << 21
"""Polls of a wait: some seconds at most."""


@dataclass(frozen=True)
class Rank:
    """One of some processes.

    Attributes:
      rank, count: Which of how many.
      line: To the process that has started it.
    """

    rank: int
    count: int
    line: Connection

    def meet(self, message: object = None) -> list[Any]:
        """Waits for all ranks, and returns the value of each, in their order."""
        self.line.send(("meet", message))
        return self.line.recv()


def in_processes(
    count: int, function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS
) -> list[Any]:
    """Runs a function of a module in a process a rank.

    Args:
      function: Takes its `Rank` and the arguments.

    Returns:
      What it returns in each.

    Raises:
      AssertionError: A rank has failed or is late; the message names it and the reason.
    """
    processes = [Spawned.begin(_run, rank, count, function, arguments) for rank in range(count)]
    try:
        while True:
            said = [_hear(rank, each, seconds) for rank, each in enumerate(processes)]
            kinds = {kind for kind, _ in said}
            assert len(kinds) == 1, f"ranks are at different places: {said}"
            if kinds == {"done"}:
                return [message for _, message in said]
            for each in processes:
                each.line.send([message for _, message in said])
    finally:
        for each in processes:
            each.process.join(10)
            each.process.kill()


def _hear(rank: int, process: Spawned, seconds: float) -> tuple[str, Any]:
    kind, message = process.heard(time.monotonic() + seconds)
    assert kind != "failed", f"rank {rank} has failed: {message}"
    return kind, message


def _run(
    line: Connection, rank: int, count: int, function: Callable[..., Any], arguments: Any
) -> None:
    try:
        line.send(("done", function(Rank(rank, count, line), *arguments)))
    except Exception:  # of any kind: reported to the other ranks
        line.send(("failed", traceback.format_exc()))
