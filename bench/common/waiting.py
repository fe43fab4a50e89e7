"""Progress of a command that waits for a server, on stderr."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

REPORT_S = 5.0  # between two lines where there is no terminal to draw a bar on
CONSOLE = Console(stderr=True, highlight=False, soft_wrap=True)


@contextmanager
def progress(
    what: str, total: int, console: Console = CONSOLE, every_s: float = REPORT_S
) -> Iterator[Callable[[], None]]:
    """A bar on a terminal, and a line every few seconds elsewhere.

    Args:
      what: The noun of what is counted, in the plural.

    Yields:
      Called when one more is done, on any thread.
    """
    if not console.is_terminal:
        yield _Lines(what, total, console, every_s).advance
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda: bar.advance(task)


class _Lines:
    """Progress as lines."""

    def __init__(self, what: str, total: int, console: Console, every_s: float) -> None:
        self._what, self._total, self._console, self._every_s = what, total, console, every_s
        self._done, self._lock = 0, threading.Lock()
        self._began = self._last = time.monotonic()

    def advance(self) -> None:
        """Counts one more, and prints a line where the last one is some time ago."""
        with self._lock:
            self._done, now = self._done + 1, time.monotonic()
            if now - self._last < self._every_s:
                return
            self._last = now
            self._console.print(
                f"{self._done} of {self._total} {self._what}, {now - self._began:.0f} s"
            )
