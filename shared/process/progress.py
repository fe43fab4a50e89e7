"""How far a start is, on a terminal as a bar, elsewhere as lines."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

from shared.boundary.program import Program

REPORT_S = 2.0  # between two lines where there is no terminal to draw a bar on


@contextmanager
def loading_bar(console: Console, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Takes the bytes that were read since the last call."""
    if not console.is_terminal:
        yield _Lines(console, total_bytes).add
        console.print(f"loaded {total_bytes:,} bytes")
        return
    columns = (TextColumn("loading"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("loading", total=total_bytes)
        yield lambda num_bytes: bar.advance(task, num_bytes)


class _Lines:
    """Progress as plain lines."""

    def __init__(self, console: Console, total_bytes: int) -> None:
        self._console, self._total, self._read = console, total_bytes, 0
        self._next = time.monotonic() + REPORT_S

    def add(self, num_bytes: int) -> None:
        """Notes bytes that were read."""
        self._read += num_bytes
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + REPORT_S
            self._console.print(f"loading {self._read:,} of {self._total:,} bytes")


@contextmanager
def preparing_bar(console: Console, count: int) -> Iterator[Callable[[Program], None]]:
    """Takes each program that is about to be made ready; it names it on the screen."""
    began = time.monotonic()
    if not console.is_terminal:
        yield lambda program: console.print(f"preparing {program}")
    else:
        columns = (
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("preparing", total=count)
            begun = 0

            def name(program: Program) -> None:
                nonlocal begun
                bar.update(task, completed=begun, description=f"preparing {program}")
                begun += 1

            yield name
            bar.update(task, completed=count)
    console.print(f"{count} programs are ready after {time.monotonic() - began:.1f} s")
