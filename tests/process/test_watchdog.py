"""The watchdog: ends of a step and of the startup, with their reasons."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from shared.boundary.buffers import empty_plan
from shared.process import watchdog as watchdog_module
from shared.process.watchdog import STOP_WAIT_S, Watchdog, WatchedBackend
from tests.support.polling import wait_until
from tests.support.toy_backend import ToyBackend, toy_capacity

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 0.2


class EndReasons:
    """Records the end reasons of a watchdog."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.reasons: queue.Queue[str | None] = queue.Queue()
        self.stop = threading.Event()
        watchdog.start(self.stop.wait, self.reasons.put)


def test_watchdog_reason_names_waited_step():
    watchdog = Watchdog(TIMEOUT_S)
    backend = WatchedBackend(
        ToyBackend(toy_capacity(num_pages=9, num_slots=3, overlap=1)), watchdog
    )
    ended = EndReasons(watchdog)
    first, second = (
        backend.submit(empty_plan(program, backend.capacity))
        for program in backend.capacity.programs[:2]
    )
    first.result()
    with watchdog.watched():
        reason = ended.reasons.get(timeout=60)
    program = backend.capacity.programs[0]
    assert reason == f"step 1, a {program}, did not finish within 0.2 s"
    assert second is not first


def test_watchdog_reason_includes_rank_progress():
    watchdog = Watchdog(TIMEOUT_S)
    watchdog.ranks_progress = lambda: "; rank 1 has ended 4 steps"
    ended = EndReasons(watchdog)
    with watchdog.watched():
        reason = ended.reasons.get(timeout=60)
    assert reason == "a step did not finish within 0.2 s; rank 1 has ended 4 steps"


def test_watchdog_fail_ends_process():
    watchdog = Watchdog(3600)
    ended = EndReasons(watchdog)
    watchdog.fail("rank 1 was terminated by SIGKILL")
    assert ended.reasons.get(timeout=60) == "rank 1 was terminated by SIGKILL"


def test_watchdog_claim_end_waits_for_current_end():
    """A lost rank also fails the step of the engine, and only one reason is reported."""
    watchdog, entered, leave = Watchdog(3600), threading.Event(), threading.Event()

    def end(failure: str | None) -> None:
        entered.set()
        leave.wait(60)

    watchdog.start(lambda seconds: leave.wait(seconds), end)
    threading.Thread(target=watchdog.fail, args=("rank 1 is lost",), daemon=True).start()
    assert entered.wait(60)
    engine = threading.Thread(target=watchdog.claim_end, daemon=True)
    engine.start()
    engine.join(0.3)
    assert engine.is_alive(), "two threads would end the process"
    leave.set()
    engine.join(60)
    assert not engine.is_alive()


def test_watchdog_ignores_calls_that_finish_in_time(monkeypatch):
    """Four calls of 1.4 s, then one of 1.6 s; the clock is the test's."""
    now, num_checks = [0.0], [0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(watchdog_module, "time", clock)

    def wait_for_end(seconds: float) -> bool:
        num_checks[0] += 1
        time.sleep(0.001)
        return False

    watchdog, reasons = Watchdog(1.5), queue.Queue()
    watchdog.start(wait_for_end, reasons.put)
    for _ in range(4):
        with watchdog.watched():
            now[0] += 1.4
            checked = num_checks[0] + 2
            assert wait_until(lambda checked=checked: num_checks[0] >= checked)
    assert reasons.empty()
    with watchdog.watched():
        now[0] += 1.6
        assert reasons.get(timeout=60) == "a step did not finish within 1.5 s"


def test_watchdog_stop_waits_briefly_for_in_flight_step(monkeypatch):
    monkeypatch.setattr(watchdog_module, "END_WAIT_S", 3600)
    watchdog = Watchdog(3600)
    ended, began = EndReasons(watchdog), time.monotonic()
    with watchdog.watched():
        ended.stop.set()
        assert ended.reasons.get(timeout=60) is None
    assert time.monotonic() - began >= STOP_WAIT_S


def test_watchdog_end_without_step_times_out(monkeypatch):
    monkeypatch.setattr(watchdog_module, "END_WAIT_S", 0.5)
    ended, began = EndReasons(Watchdog(3600)), time.monotonic()
    ended.stop.set()
    assert ended.reasons.get(timeout=60) is None
    assert time.monotonic() - began >= 0.5


PREPARES_FOR_EVER = """
import sys, time
from dataclasses import replace
from shared.process import progress
from shared.process.launch import launch
from tests.support.serve_reference import PLATFORM, load

def slow(*files):
    backend = load(*files)
    def prepare(programs, begin):
        begin(programs[0])
        time.sleep(3600)
    backend.prepare = prepare
    return backend

progress.REPORT_S = 0.2
sys.exit(launch(sys.argv[1:], lambda: replace(PLATFORM, load=slow)))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_compilation_ends_startup_at_once(number):
    folder = ROOT / "models" / "random"
    command = [sys.executable, "-c", PREPARES_FOR_EVER, "--model-path", str(folder), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    while not lines or "; preparing decode of 1 rows" not in lines[-1]:
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    process.send_signal(number)
    assert process.wait(60) == -number
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
