"""What ends a start and a step from outside, and with which words."""

from __future__ import annotations

import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shared.boundary.buffers import empty_plan
from shared.process.watchdog import STOP_WAIT_S, NamedSteps, Watchdog
from tests.support.toy_backend import ToyBackend, toy_capacity

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 0.2


class Ended:
    """What a watchdog was told to end with."""

    def __init__(self, watchdog: Watchdog) -> None:
        self.reasons: queue.Queue[str | None] = queue.Queue()
        self.told = threading.Event()
        watchdog.start(self.told.wait, self.reasons.put)


def test_the_reason_names_the_step_that_is_waited_for():
    watchdog = Watchdog(TIMEOUT_S)
    backend = NamedSteps(ToyBackend(toy_capacity(num_pages=9, num_slots=3, overlap=1)), watchdog)
    ended = Ended(watchdog)
    first, second = (
        backend.submit(empty_plan(program, backend.capacity))
        for program in backend.capacity.programs[:2]
    )
    first.result()
    with watchdog.watched():
        reason = ended.reasons.get(timeout=10)
    program = backend.capacity.programs[0]
    assert reason == f"step 1, a {program}, has not ended after 0.2 s"
    assert second is not first


def test_a_call_that_ends_in_time_is_left_alone():
    watchdog = Watchdog(1.5)
    ended = Ended(watchdog)
    for _ in range(4):
        with watchdog.watched():
            time.sleep(0.6)
    assert ended.reasons.empty()


def test_a_stop_gives_the_step_in_flight_a_little_time():
    watchdog = Watchdog(3600)
    ended, began = Ended(watchdog), time.monotonic()
    with watchdog.watched():
        ended.told.set()
        assert ended.reasons.get(timeout=10) is None
    assert STOP_WAIT_S <= time.monotonic() - began < STOP_WAIT_S + 2


PREPARES_FOR_EVER = """
import sys, time
from dataclasses import replace
from shared.process.launch import launch
from tests.support.reference_serve import PLATFORM, load

def slow(*files):
    backend = load(*files)
    def prepare(programs, progress):
        progress(programs[0])
        time.sleep(3600)
    backend.prepare = prepare
    return backend

sys.exit(launch(sys.argv[1:], replace(PLATFORM, load=slow)))
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_start_that_compiles_at_once(number):
    folder = ROOT / "models" / "random"
    command = [sys.executable, "-c", PREPARES_FOR_EVER, "--model-path", str(folder), "--port", "0"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    lines = []
    while not lines or not lines[-1].startswith("preparing"):
        lines.append(process.stderr.readline())
        assert lines[-1], lines
    assert lines[-1].startswith("preparing decode of 1 rows")
    process.send_signal(number)
    assert process.wait(5) == -number
    assert "Traceback" not in process.stderr.read()
    process.stderr.close()
