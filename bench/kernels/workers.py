"""Items shared among processes, each within a time limit."""

import multiprocessing
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

MOST_ITEMS = 40
"""Items of one process at most, since its memory grows with each compilation."""
_PLACE = "JaxStackTraceBeforeTransformation"
"""Name of the error that JAX gives as a cause: the place where the operation was traced."""


@dataclass(frozen=True)
class Done:
    """An item of work that has ended.

    Attributes:
      value: What the work has returned.
      error: What it has raised, or how its process has ended; None: it has returned.
      seconds: Since it began.
    """

    item: Any
    value: Any
    error: str | None
    seconds: float


@dataclass
class _Worker:
    process: BaseProcess
    link: Connection
    item: Any
    began: float
    items: int = 1


class Bounded:
    """Items as long as there is time for another.

    Attributes:
      left: Items that were not begun in time.
    """

    def __init__(self, items: Sequence[Any], total_s: float) -> None:
        """The time runs from here on."""
        self.left, self._items = 0, items
        self._end = time.monotonic() + total_s

    def __iter__(self) -> Iterator[Any]:
        for number, item in enumerate(self._items):
            if time.monotonic() > self._end:
                self.left = len(self._items) - number
                return
            yield item


def shared_out(
    work: Callable[[Any], Any],
    items: Iterable[Any],
    jobs: int,
    limit_s: float,
    max_items: int = MOST_ITEMS,
) -> Iterator[Done]:
    """Does the work of each item in some process, and yields items as they end.

    Args:
      work: A function of a module.
      jobs: How many processes run at once.
      limit_s: After so long a process is ended, and the next item has another.
      max_items: Of one process.
    """
    left, workers = iter(items), list[_Worker]()
    try:
        workers += [_begun(work, item) for item in islice(left, jobs)]
        while workers:
            yield from _some_done(work, left, workers, limit_s, max_items)
    finally:
        for worker in workers:
            _end(worker)


def _begun(work: Callable[[Any], Any], item: Any) -> _Worker:
    context = multiprocessing.get_context("spawn")
    link, other = context.Pipe()
    process = context.Process(target=_serve, args=(work, other), daemon=True)
    process.start()
    other.close()
    link.send(item)
    return _Worker(process, link, item, time.monotonic())


def _some_done(
    work: Callable[[Any], Any],
    left: Iterator[Any],
    workers: list[_Worker],
    limit_s: float,
    max_items: int,
) -> Iterator[Done]:
    """Waits for an item, or the time limit of one; what has ended takes the next item."""
    now = time.monotonic()
    rest = min(worker.began + limit_s for worker in workers) - now
    ready = wait([worker.link for worker in workers], max(rest, 0))
    now = time.monotonic()
    for worker in list(workers):
        seconds, is_late = now - worker.began, now - worker.began > limit_s
        if worker.link in ready:
            try:
                value, error = worker.link.recv()
            except EOFError:
                worker.process.join()
                value, error = None, f"its process has ended with code {worker.process.exitcode}"
        elif is_late:
            value, error = None, f"it has not ended within {limit_s:.0f} s"
        else:
            continue
        yield Done(worker.item, value, error, seconds)
        can_stay = worker.process.is_alive() and not is_late and worker.items < max_items
        _take_next(work, left, workers, worker, can_stay)


def _take_next(
    work: Callable[[Any], Any],
    left: Iterator[Any],
    workers: list[_Worker],
    worker: _Worker,
    can_stay: bool,
) -> None:
    item = next(left, None)
    if item is not None and can_stay:
        worker.link.send(item)
        worker.item, worker.began, worker.items = item, time.monotonic(), worker.items + 1
        return
    workers.remove(worker)
    _end(worker)
    if item is not None:
        workers.append(_begun(work, item))


def _end(worker: _Worker) -> None:
    worker.link.close()
    worker.process.kill()
    worker.process.join()


def _serve(work: Callable[[Any], Any], link: Connection) -> None:
    while True:
        try:
            item = link.recv()
        except EOFError:
            return
        try:
            answer = (work(item), None)
        except Exception as error:  # of whatever kind: the other items are still to be done
            answer = (None, format_error(error))
        link.send(answer)


def format_error(error: BaseException) -> str:
    """The first cause of an error, in one line."""
    while error.__cause__ is not None and type(error.__cause__).__name__ != _PLACE:
        error = error.__cause__
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
