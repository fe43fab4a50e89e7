"""Works that are made ready side by side, each in a process of its own, and go on one at a time.

A start takes most of a short measurement, and most of a start is compiling: several take little
longer than one, where there are processors enough. What is timed runs alone, and each process ends
before the next one's turn.
"""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

Wait = Callable[[], None]
"""What a work calls when it is ready: it returns when the work's turn has come."""
END_S = 30.0
"""In which a process that has given all must end."""


class _Begun(NamedTuple):
    """A work's process, and the line to it."""

    process: Any
    line: Connection

    def heard(self, until: float) -> tuple[str, Any]:
        """What it says next, or how it failed.

        Args:
          until: Of `time.monotonic`: how long it may take.
        """
        if not self.line.poll(max(until - time.monotonic(), 0)):
            return "failed", TimeoutError("it has said nothing for too long")
        try:
            return self.line.recv()
        except EOFError:
            self.process.join(END_S)
            return "failed", RuntimeError(f"it has ended with code {self.process.exitcode}")

    def end(self) -> None:
        """Waits for the process as long as it may take, and kills it then."""
        self.process.join(END_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


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
    context = multiprocessing.get_context("spawn")
    for first in range(0, len(works), at_once):
        all_begun = [_begin(context, function, work) for work in works[first : first + at_once]]
        try:
            until = time.monotonic() + ready_s
            heard = [begun.heard(until) for begun in all_begun]
            for number, (begun, said) in enumerate(zip(all_begun, heard, strict=True), first):
                yield from ((number, found) for found in _turn(begun, said, turn_s))
        finally:
            for begun in all_begun:
                begun.process.kill()
                begun.process.join()


def _begin(context: Any, function: Callable[..., Iterator[Any]], work: tuple) -> _Begun:
    here, there = context.Pipe()
    process = context.Process(target=_run, args=(there, function, work))
    process.start()
    there.close()
    return _Begun(process, here)


def _turn(begun: _Begun, said: tuple[str, Any], turn_s: float) -> Iterator[Any]:
    """Lets a process go on that is ready, and gives what it says until it ends."""
    kind, value = said
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

    with suppress(BrokenPipeError):  # nobody hears it any more
        try:
            for found in function(wait, *work):
                line.send(("found", found))
            line.send(("done", None))
        except ValueError as error:
            line.send(("failed", ValueError(str(error))))
        except Exception as error:  # of whatever kind: the others go on
            traceback.print_exc()
            line.send(("failed", RuntimeError(f"{type(error).__name__}: {error}")))
