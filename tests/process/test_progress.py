"""Startup progress: log lines at a bounded rate without a terminal, none for instant work."""

import io
import json
import logging
import math
import re
import time

import pytest
from rich.console import Console

from shared.boundary.program import Program, ProgramFeature, StepKind
from shared.options.observing import ObservingOptions
from shared.process import progress
from shared.process.logs import JsonLines, log
from shared.spec.draft_tree import TreeShape

PROGRAMS = [
    Program(
        work=StepKind.DECODE,
        batch=batch,
        pages=4,
        tokens=0,
        shape=TreeShape(nodes=1, depth=0, width=0, rows=1),
        extras=ProgramFeature.NONE,
    )
    for batch in range(1, 12)
]


@pytest.fixture
def console(caplog) -> Console:
    """A console without a terminal, with captured log lines."""
    caplog.set_level(logging.INFO, log.name)
    return Console(file=io.StringIO(), force_terminal=False)


@pytest.fixture
def hurried(monkeypatch) -> None:
    monkeypatch.setattr(progress, "REPORT_S", 0.02)
    monkeypatch.setattr(progress, "SHORT_S", 0.0)


def test_progress_of_instant_work_logs_nothing(console, caplog, monkeypatch):
    monkeypatch.setattr(progress, "REPORT_S", 60.0)
    monkeypatch.setattr(progress, "SHORT_S", 60.0)
    with progress.loading_progress(console, 100) as add:
        add(100)
    with progress.preparing_progress(console, len(PROGRAMS)) as begin:
        for program in PROGRAMS:
            begin(program)
    assert not caplog.messages
    assert not console.file.getvalue()


def test_preparing_progress_counts_programs(console, caplog, hurried):
    began = time.monotonic()
    with progress.preparing_progress(console, len(PROGRAMS)) as begin:
        for program in PROGRAMS[:4]:
            begin(program)
        while not any("3 of 11" in message for message in caplog.messages):
            assert time.monotonic() - began < 60
            time.sleep(0.01)
    *lines, last = caplog.messages
    assert re.match(r"Prepared 3 of 11 programs, \d+ s; preparing decode of 4 rows", lines[-1])
    assert re.fullmatch(r"Prepared 11 programs in \d+\.\d s", last)
    assert len(lines) <= math.log2(1 + (time.monotonic() - began) / progress.REPORT_S)


def test_loading_progress_reports_bytes_and_seconds(console, caplog, hurried):
    with progress.loading_progress(console, 3_000_000) as add:
        add(2_000_000)
        while not caplog.messages:
            time.sleep(0.01)
    first, last = (json.loads(JsonLines().format(caplog.records[at])) for at in (0, -1))
    assert re.fullmatch(r"Loading weights: 2\.0 MB of 3\.0 MB, \d+ s", first["message"])
    assert (first["loaded_bytes"], first["total_bytes"]) == (2_000_000, 3_000_000)
    assert last["message"] == f"Loaded 3.0 MB of weights in {last['seconds']:.1f} s"
    assert last["loaded_bytes"] == 3_000_000


def test_progress_stops_after_failure(console, caplog, hurried):
    with pytest.raises(MemoryError), progress.loading_progress(console, 100):
        raise MemoryError
    count = len(caplog.messages)
    time.sleep(3 * progress.REPORT_S)
    assert len(caplog.messages) == count
    assert not any("Loaded" in message for message in caplog.messages)


def test_progress_bar_shows_count_on_terminal():
    terminal = Console(file=io.StringIO(), force_terminal=True, width=120, get_time=lambda: 0.0)
    with progress.preparing_progress(terminal, len(PROGRAMS)) as begin:
        for program in PROGRAMS:
            begin(program)
    assert "11 of 11 programs, 0 s" in terminal.file.getvalue()


@pytest.mark.parametrize(
    ("observing", "is_terminal", "is_quiet"),
    [
        (ObservingOptions(log_format="json"), False, False),
        (ObservingOptions(log_level="warning"), True, True),
        (ObservingOptions(), True, False),
    ],
)
def test_console_of_draws_bars_for_info_text_only(monkeypatch, observing, is_terminal, is_quiet):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich treats the stream as a terminal
    console = progress.console_of(observing)
    assert (console.is_terminal, console.quiet) == (is_terminal, is_quiet)
