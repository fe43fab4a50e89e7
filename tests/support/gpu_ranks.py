"""Ranks as processes, each with a GPU; several share one where there are fewer."""

from __future__ import annotations

import multiprocessing
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

SECONDS = 120.0
"""In which each rank must reach the next meeting of all."""
LOOKS = 1 << 21
"""Of a wait: some seconds at most."""


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
        """Waits for all ranks, and gives what each has brought, in their order."""
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
      AssertionError: A rank has failed or is late; says which and why.
    """
    context = multiprocessing.get_context("spawn")
    lines, processes = [], []
    for rank in range(count):
        here, there = context.Pipe()
        process = context.Process(target=_run, args=(rank, count, there, function, arguments))
        process.start()
        there.close()
        lines.append(here)
        processes.append(process)
    try:
        while True:
            said = [_hear(rank, line, seconds) for rank, line in enumerate(lines)]
            kinds = {kind for kind, _ in said}
            assert len(kinds) == 1, f"ranks are at different places: {said}"
            if kinds == {"done"}:
                return [message for _, message in said]
            for line in lines:
                line.send([message for _, message in said])
    finally:
        for process in processes:
            process.join(10)
            if process.is_alive():
                process.kill()


def _hear(rank: int, line: Connection, seconds: float) -> tuple[str, Any]:
    until = time.monotonic() + seconds
    assert line.poll(max(until - time.monotonic(), 0)), f"rank {rank} is late"
    try:
        kind, message = line.recv()
    except EOFError as error:
        raise AssertionError(f"rank {rank} has ended") from error
    assert kind != "failed", f"rank {rank} has failed: {message}"
    return kind, message


def _run(
    rank: int, count: int, line: Connection, function: Callable[..., Any], arguments: Any
) -> None:
    try:
        line.send(("done", function(Rank(rank, count, line), *arguments)))
    except Exception:  # of whatever kind: the others are told
        line.send(("failed", traceback.format_exc()))
