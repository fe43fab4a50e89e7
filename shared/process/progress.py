"""Progress of a start: a bar on a terminal, otherwise log lines at a bounded rate.

Without a terminal a thread logs how far the work is, also while a single program is compiled for
minutes. Work that ends before `SHORT_S` is not reported.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TransferSpeedColumn,
)

from shared.boundary.program import Program
from shared.options.observing import ObservingOptions
from shared.process import logs

REPORT_S = 10.0
"""Time of the first line; the time between two lines doubles from there to `MAX_REPORT_S`."""

MAX_REPORT_S = 60.0
SHORT_S = 0.5
UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


def console_of(observing: ObservingOptions) -> Console:
    """Returns the console of a start; it counts as a terminal only where a log for readers goes."""
    return Console(
        stderr=True,
        highlight=False,
        soft_wrap=True,
        quiet=observing.log_level not in ("debug", "info"),
        force_terminal=False if observing.log_format == "json" else None,
    )


@contextmanager
def loading_progress(console: Console, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Reports the loading of weights; yields a function that takes the bytes read since its call.

    Args:
      console: Where a bar is drawn if it is a terminal.
      total_bytes: Stored bytes that are read in all.
    """
    with _counted(console, total_bytes, "load") as add:
        yield add


@contextmanager
def downloading_progress(console: Console, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Reports the download of weights as `loading_progress` does; several threads may add to it."""
    with _counted(console, total_bytes, "download") as add:
        yield add


@contextmanager
def _counted(console: Console, total_bytes: int, verb: str) -> Iterator[Callable[[int], None]]:
    work, lock = _Work(total_bytes), threading.Lock()
    columns = (TextColumn(f"{verb}ing"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with _shown(console, work, columns, lambda: _log_bytes(work, verb)) as update:

        def add(num_bytes: int) -> None:
            with lock:
                work.done += num_bytes
            update("")

        yield add
    if work.is_long:
        logs.report(
            f"{verb.capitalize()}ed {size(total_bytes)} of weights in {work.seconds:.1f} s",
            **{f"{verb}ed_bytes": total_bytes, "seconds": round(work.seconds, 3)},
        )


def _log_bytes(work: "_Work", verb: str) -> None:
    logs.report(
        f"{verb.capitalize()}ing weights: {size(work.done)} of {size(work.total)}, "
        f"{work.seconds:.0f} s",
        **{f"{verb}ed_bytes": work.done, "total_bytes": work.total},
        seconds=round(work.seconds, 3),
    )


@contextmanager
def preparing_progress(console: Console, count: int) -> Iterator[Callable[[Program], None]]:
    """Reports the preparation of programs; yields a function that takes each before it begins.

    Args:
      console: Where a bar is drawn if it is a terminal.
      count: Programs in all.
    """
    work = _Work(count, done=-1)
    columns = (
        BarColumn(),
        TextColumn("{task.completed} of {task.total} programs, {task.elapsed:.0f} s"),
        TextColumn("{task.description}"),
    )
    with _shown(console, work, columns, lambda: _log_preparing(work)) as update:

        def begin(program: Program) -> None:
            work.done += 1  # the one before has ended
            work.name = str(program)
            update(f"preparing {program}")

        yield begin
        work.done = count
        update("")
    if work.is_long:
        logs.report(
            f"Prepared {count} programs in {work.seconds:.1f} s",
            programs=count,
            seconds=round(work.seconds, 3),
        )


def _log_preparing(work: "_Work") -> None:
    done = max(work.done, 0)
    logs.report(
        f"Prepared {done} of {work.total} programs, {work.seconds:.0f} s; preparing {work.name}",
        programs=done,
        total_programs=work.total,
        seconds=round(work.seconds, 3),
        program=work.name,
    )


@dataclass
class _Work:
    """Progress of a part of the start, as its own thread knows it.

    Attributes:
      total, done: In bytes or programs.
      name: The program that is being prepared; "programs" before the first.
    """

    total: int
    done: int = 0
    name: str = "programs"
    began: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the work began."""
        return time.monotonic() - self.began

    @property
    def is_long(self) -> bool:
        """Returns whether the work took so long that its end is worth a line."""
        return self.seconds >= SHORT_S


@contextmanager
def _shown(
    console: Console, work: _Work, columns: tuple, log: Callable[[], None]
) -> Iterator[Callable[[str], None]]:
    """Draws a bar on a terminal, or calls `log` now and then until the work ends."""
    if not console.is_terminal:
        with _repeated(log):
            yield lambda description: None
        return
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=work.total)
        yield lambda text: bar.update(task, completed=max(work.done, 0), description=text)


@contextmanager
def _repeated(call: Callable[[], None]) -> Iterator[None]:
    """Calls a function again and again on a thread of its own."""
    has_ended = threading.Event()

    def repeat() -> None:
        wait_s = REPORT_S
        while not has_ended.wait(wait_s):
            call()
            wait_s = min(2 * wait_s, MAX_REPORT_S)

    thread = threading.Thread(target=repeat, name="tandem-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        has_ended.set()
        thread.join()


def size(num_bytes: int) -> str:
    """Writes a number of bytes for a reader, as `16.7 MB`."""
    for unit, name in UNITS:
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes} bytes"
