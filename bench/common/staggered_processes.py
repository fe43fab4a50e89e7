"""Processes that start side by side and are measured one after the other.

Startup takes most of a short measurement, and compiling takes most of startup. With enough CPU
cores several starts take little longer than one. Timed work runs alone, and each process ends
before the next one continues.
"""

import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from tests.support.child_process import Spawned

Wait = Callable[[], None]
"""Called by a process that is ready: it returns when the turn of the process has come."""


def in_turns(
    function: Callable[..., Iterator[Any]],
    works: Sequence[tuple],
    at_once: int,
    ready_s: float = 600.0,
    turn_s: float = 600.0,
) -> Iterator[tuple[int, Any]]:
    """Runs a function for each work, and yields the work's number with all that it yields.

    Args:
      function: Of a module; takes a `Wait` and the arguments of a work.
      works: Arguments.
      at_once: Works that are made ready side by side.
      ready_s: Seconds after which one that is not ready is given up.
      turn_s: The same of what it yields in its turn.

    Yields:
      In place of more an exception, where a work has failed; the others go on.
    """
    for first in range(0, len(works), at_once):
        some = works[first : first + at_once]
        all_begun = [Spawned.begin(_run, function, work) for work in some]
        try:
            until = time.monotonic() + ready_s
            messages = [begun.heard(until) for begun in all_begun]
            for number, (begun, message) in enumerate(zip(all_begun, messages, strict=True), first):
                yield from ((number, found) for found in _turn(begun, message, turn_s))
        finally:
            for begun in all_begun:
                begun.process.kill()
                begun.process.join()


def _turn(begun: Spawned, message: tuple[str, Any], turn_s: float) -> Iterator[Any]:
    """Continues a process that is ready, and yields its results until it ends."""
    kind, value = message
    until = time.monotonic() + turn_s
    while kind != "done":
        if kind == "ready":
            begun.line.send(None)
        else:
            yield value
        if kind == "failed":
            begun.process.kill()
            break
        kind, value = begun.heard(until)
    begun.end()


def _run(line: Connection, function: Callable[..., Iterator[Any]], work: tuple) -> None:
    def wait() -> None:
        line.send(("ready", None))
        line.recv()

    with suppress(BrokenPipeError):  # the receiver has ended
        try:
            for found in function(wait, *work):
                line.send(("found", found))
            line.send(("done", None))
        except ValueError as error:
            line.send(("failed", ValueError(str(error))))
        except Exception as error:  # of whatever kind: the others go on
            traceback.print_exc()
            line.send(("failed", RuntimeError(f"{type(error).__name__}: {error}")))
