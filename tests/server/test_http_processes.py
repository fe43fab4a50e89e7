"""Engine process and HTTP server end together, report the reason, and free everything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from shared.process.loop import SILENCE_GRACE_S
from shared.process.signals import STOP_SIGNALS
from tests.support.echo_engine import FROZEN, HELD
from tests.support.http_fixtures import (
    COMPLETIONS,
    CRASH,
    FREEZE,
    ROOT,
    WATCHDOG_S,
    Server,
    is_alive,
    save_tokenizer,
    serving,
)

END_S = 60.0  # limit of a hanging shutdown; a busy machine takes seconds


@pytest.fixture
def server(tmp_path):
    save_tokenizer(tmp_path)
    with serving(["-m", "tests.support.http_fixtures", str(tmp_path)]) as running:
        yield running


class OpenRequests:
    """A whole response and a stream that are open during an event."""

    def __init__(self, server: Server) -> None:
        self.whole: httpx.Response | None = None
        self.lines: list[str] = []
        self._has_begun = threading.Event()
        fields = {"prompt": HELD, "max_tokens": 250}
        self._threads = [
            threading.Thread(target=self._post, args=(server, fields)),
            threading.Thread(target=self._stream, args=(server, fields)),
        ]
        for thread in self._threads:
            thread.start()
        server.wait_for_metric("tandem:num_requests_running", 2)
        assert self._has_begun.wait(END_S), "the stream does not begin"

    def join(self) -> None:
        for thread in self._threads:
            thread.join(END_S)
            assert not thread.is_alive()

    def _post(self, server: Server, fields: dict) -> None:
        self.whole = server.post("/v1/completions", **fields)

    def _stream(self, server: Server, fields: dict) -> None:
        body = {**fields, "stream": True}
        with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=END_S) as answer:
            for line in filter(None, answer.iter_lines()):
                self.lines.append(line.removeprefix("data: "))
                self._has_begun.set()


def wait_for_end(server: Server, pids: list[int]) -> int:
    """Waits until every process has ended; returns the engine's exit code."""
    deadline = time.monotonic() + END_S
    code = server.process.wait(END_S)
    while any(map(is_alive, pids)):
        assert time.monotonic() < deadline, "a process is still alive"
        time.sleep(0.02)
    server.join_output()
    return code


def assert_errors(requests: OpenRequests, word: str) -> None:
    requests.join()
    assert requests.whole is not None
    assert requests.whole.status_code == 503
    assert word in requests.whole.json()["error"]["message"]
    *_, event, end = requests.lines
    assert word in json.loads(event)["error"]["message"]
    assert end == "[DONE]"


def test_killed_engine_fails_requests_and_ends_server(server):
    pids, requests = server.pids(), OpenRequests(server)
    os.kill(server.process.pid, signal.SIGKILL)
    wait_for_end(server, pids)
    assert_errors(requests, "killed or crashed")
    assert any("killed or crashed" in line for line in server.lines)


def test_failing_engine_ends_both_processes_with_reason(server):
    pids, requests = server.pids(), OpenRequests(server)
    answer = server.post("/v1/completions", prompt=[CRASH])
    assert answer.status_code == 503
    assert wait_for_end(server, pids) == 1
    assert_errors(requests, "the device fell over")
    assert any("the device fell over" in line for line in server.lines)


def test_killed_http_server_ends_engine_with_reason(server):
    pids = server.pids()
    assert len(pids) == 2
    os.kill(pids[1], signal.SIGKILL)
    assert wait_for_end(server, pids) == 1
    assert any("the HTTP server process was terminated by SIGKILL" in line for line in server.lines)


ENDING = [each for each in STOP_SIGNALS if each != signal.SIGTERM]  # SIGTERM drains first
USUAL = (signal.SIGINT, signal.SIGHUP)
"""Signals of a terminal; the others have the same handler and run in the matrix."""


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, id=number.name, marks=() if number in USUAL else pytest.mark.matrix)
        for number in ENDING
    ],
)
def test_stop_signal_is_reported_to_requests_and_log(server, number):
    pids, requests = server.pids(), OpenRequests(server)
    server.process.send_signal(number)
    assert wait_for_end(server, pids) == 0
    assert_errors(requests, f"the server was stopped by {number.name}")
    assert_told(server, number)


@pytest.mark.parametrize("pause_s", [0.0, 0.2])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_repeated_stop_signal_during_hung_step_is_reported(server, number, pause_s):
    """The engine is in a hung step, and the last signal kills it before it can report."""
    pids, answers = server.pids(), []
    frozen = threading.Thread(
        target=lambda: answers.append(server.post("/v1/completions", prompt=[FREEZE])), daemon=True
    )
    frozen.start()
    server.wait_for_line(FROZEN)
    # Signals that arrive while the same one is pending are merged.
    for pause in [pause_s] * 3 + [0.2] * 10:
        if server.process.poll() is not None:
            break
        server.process.send_signal(number)
        time.sleep(pause)
    assert wait_for_end(server, pids) in (0, -number)
    frozen.join(END_S)
    assert answers[0].json()["error"]["message"] == f"the server was stopped by {number.name}"
    assert_told(server, number)


def assert_told(server: Server, number: signal.Signals) -> None:
    assert any(f"the server was stopped by {number.name}" in line for line in server.lines)
    for line in server.lines:
        assert "killed or crashed" not in line
        assert "Traceback" not in line
        assert " error " not in line


def test_http_server_ignores_stop_signals(server):
    """A terminal sends signals to the whole process group."""
    _, http_server = server.pids()
    for number in STOP_SIGNALS:
        os.kill(http_server, number)
    time.sleep(0.2)
    assert httpx.get(server.url + "/live").status_code == 200


def test_http_server_ignores_stop_signals_during_startup(tmp_path):
    with serving(["-c", OBSERVED, str(tmp_path)]) as running:  # `OBSERVED` sends all stop signals
        assert httpx.get(running.url + "/live").status_code == 200


OBSERVED = """
import os, subprocess, sys
from shared.process.signals import STOP_SIGNALS
from tests.support import http_fixtures

class Observed(subprocess.Popen):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        for number in STOP_SIGNALS:
            os.kill(self.pid, number)

subprocess.Popen = Observed
sys.exit(http_fixtures.main())
"""


def test_inherited_ignored_signal_stays_ignored(tmp_path):
    """For example with nohup."""
    ignoring = "import signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
    ignoring += "from tests.support import http_fixtures; sys.exit(http_fixtures.main())"
    with serving(["-c", ignoring, str(tmp_path)]) as running:
        running.process.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert httpx.get(running.url + "/live").status_code == 200
        assert running.process.poll() is None


def signal_to_end(server: Server, numbers: list[int]) -> None:
    """Sends signals that end a server without drain."""
    for number in numbers:
        server.process.send_signal(number)
        time.sleep(0.1)  # a pending signal is not delivered twice


AT_ONCE = pytest.mark.parametrize(
    "numbers", [[signal.SIGINT], [signal.SIGTERM] * 2], ids=["interrupt", "second"]
)


@AT_ONCE
def test_interrupt_or_second_sigterm_ends_processes_without_drain(server, numbers):
    pids, requests = server.pids(), OpenRequests(server)
    signal_to_end(server, numbers)
    assert wait_for_end(server, pids) == 0
    assert_errors(requests, "stopped")
    assert not any("Traceback" in line for line in server.lines)


def test_watchdog_ends_server_on_hung_step(server):
    pids, requests = server.pids(), OpenRequests(server)
    began = time.monotonic()
    answer = server.post("/v1/completions", prompt=[FREEZE])
    assert answer.status_code == 503
    assert time.monotonic() - began > WATCHDOG_S
    assert wait_for_end(server, pids) == 1
    assert_errors(requests, "a step did not finish within 5 s")
    assert any("a step did not finish within 5 s" in line for line in server.lines)
    assert any("in _advance" in line for line in server.lines), (
        "the log has no traceback of the hung step"
    )


@AT_ONCE
def test_signal_ends_processes_during_hung_step(server, numbers):
    pids = server.pids()
    frozen = threading.Thread(
        target=lambda: server.post("/v1/completions", prompt=[FREEZE]), daemon=True
    )
    frozen.start()
    server.wait_for_line(FROZEN)
    signal_to_end(server, numbers)
    assert wait_for_end(server, pids) == 0
    frozen.join(END_S)
    assert not frozen.is_alive()


def test_stopped_engine_is_killed_after_silence(server):
    """The engine's own watchdog is stopped too; the server detects the silence."""
    pids, requests = server.pids(), OpenRequests(server)
    os.kill(server.process.pid, signal.SIGSTOP)
    assert httpx.get(server.url + "/live").status_code == 200, (
        "the silence is still below its limit"
    )
    assert server.process.wait(WATCHDOG_S + SILENCE_GRACE_S + END_S) == -signal.SIGKILL
    wait_for_end(server, pids)
    assert_errors(requests, "sent nothing for")
    assert any("sent nothing for" in line and "killing" in line for line in server.lines)


def test_broken_tokenizer_fails_startup_with_message(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    command = [sys.executable, "-m", "tests.support.http_fixtures", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert process.returncode == 2
    assert "tokenizer.json cannot be read" in process.stderr.splitlines()[-1]
