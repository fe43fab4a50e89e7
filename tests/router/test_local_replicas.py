"""Replicas as child processes: restart, hung processes, drain, and nothing left at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from shared.options.command_line import parse, words_of
from shared.options.flags import ConfigError
from shared.options.options import PARTS
from shared.router.local_replicas import gpus_of_replicas
from tests.support.fake_server import FATAL
from tests.support.http_fixtures import COMPLETIONS, ROOT, Server, is_alive, serving
from tests.support.polling import wait_until

FLAGS = ["-m", "tests.support.fake_server", "--port", "0", "--replicas"]
CHECKS = ["--health-check-interval", "1", "--health-check-timeout", "1"]
KEY = "a secret key"
HEADERS = {"authorization": f"Bearer {KEY}"}
START_S = 120.0


def replicas_of(server: Server) -> dict[str, str]:
    """Returns the state of each replica by its URL."""
    fields = httpx.get(f"{server.url}/capabilities", timeout=30, headers=HEADERS).json()
    return {each["url"]: each["state"] for each in fields.get("replicas", [])}


def wait_ready(server: Server, count: int) -> None:
    """Waits until all replicas are ready."""
    until = time.monotonic() + START_S
    while [*replicas_of(server).values()].count("ready") != count:
        assert time.monotonic() < until, replicas_of(server)
        time.sleep(0.05)


@contextmanager
def routing(count: int, *more: str) -> Iterator[Server]:
    with serving([*FLAGS, str(count), *CHECKS, "--api-key", KEY, *more]) as server:
        wait_ready(server, count)
        yield server


@pytest.fixture(scope="module")
def four() -> Iterator[Server]:
    with routing(4) as server:
        yield server


def complete(server: Server) -> httpx.Response:
    return httpx.post(server.url + COMPLETIONS, json={}, timeout=60, headers=HEADERS)


def metrics_of(server: Server) -> dict[str, float]:
    page = httpx.get(f"{server.url}/metrics", timeout=30, headers=HEADERS).text
    rows = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def processes_of(server: Server) -> list[int]:
    """Returns the process ids of all replicas."""
    return server.pids()[1:]


class OpenStreams:
    """Streams of 40 events, the first of which has arrived; the servers wait with the others."""

    def __init__(self, server: Server, count: int, gate: Path) -> None:
        self.found: list[list[str]] = []
        self._begun, self._gate = threading.Semaphore(0), gate
        self._threads = [
            threading.Thread(target=self._read, args=(server.url,), daemon=True)
            for _ in range(count)
        ]
        for each in self._threads:
            each.start()
        for _ in self._threads:
            assert self._begun.acquire(timeout=START_S), "a stream does not begin"

    def join(self) -> None:
        """Lets the servers send all events, and reads them."""
        self._gate.touch()
        for each in self._threads:
            each.join(START_S)

    def _read(self, url: str) -> None:
        fields = {"stream": True, "max_tokens": 40, "pace_s": 0.01, "gate": str(self._gate)}
        with httpx.stream(
            "POST", url + COMPLETIONS, json=fields, timeout=START_S, headers=HEADERS
        ) as response:
            lines = (line[6:] for line in response.iter_lines() if line.startswith("data: "))
            events = [next(lines)]
            self._begun.release()
            self.found.append(events + [*lines])


def ended(server: Server, pids: list[int], timeout_s: float = 60.0) -> int:
    """Waits for the end of the router and of all replicas; returns the exit code."""
    code = server.process.wait(timeout_s)
    until = time.monotonic() + 60
    while any(map(is_alive, pids)):
        assert time.monotonic() < until, pids
        time.sleep(0.02)
    return code


def test_killed_replica_restarts_while_others_serve(four, tmp_path):
    streams = OpenStreams(four, 16, tmp_path / "gate")
    os.kill(processes_of(four)[0], signal.SIGKILL)
    restarts = "tandem:router_replica_restarts_total"
    assert wait_until(lambda: metrics_of(four)[restarts] == 1)
    wait_ready(four, 4)
    streams.join()
    assert len(streams.found) == 16
    lost = [each for each in streams.found if len(each) != 41]
    assert len(lost) == 4  # each replica has a quarter of the streams
    codes = {json.loads(each[-2])["error"]["code"] for each in lost}
    assert codes == {"replica_lost"}
    assert metrics_of(four)[restarts] == 1


def test_key_of_replicas_is_in_no_process_list(four):
    for pid in processes_of(four):
        assert KEY.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()


def test_stopped_replica_is_replaced(four):
    stopped = processes_of(four)[1]
    os.kill(stopped, signal.SIGSTOP)
    until = time.monotonic() + START_S
    while is_alive(stopped):
        assert complete(four).status_code == 200
        assert time.monotonic() < until
        time.sleep(0.1)
    wait_ready(four, 4)


def code_of(server: Server) -> str | None:
    """Returns the code of the error of a completion, or None if it has none."""
    return complete(server).json().get("error", {}).get("code")


def test_sigterm_drains_and_leaves_nothing(tmp_path):
    with routing(2) as server:
        pids, urls = server.pids(), [*replicas_of(server)]
        streams = OpenStreams(server, 1, tmp_path / "gate")
        server.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: code_of(server) == "draining")
        streams.join()
        assert [len(each) for each in streams.found] == [41]
        assert ended(server, pids) == 0
        for url in (server.url, *urls):
            with pytest.raises(httpx.ConnectError):
                httpx.get(url)


@pytest.mark.matrix
def test_second_signal_ends_all_at_once(tmp_path):
    with routing(2, "--graceful-shutdown-timeout", "3600") as server:
        pids = server.pids()
        OpenStreams(server, 1, tmp_path / "gate")
        server.process.send_signal(signal.SIGTERM)
        assert wait_until(lambda: code_of(server) == "draining")
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, pids) == 0


@pytest.mark.matrix
def test_replicas_end_with_killed_router():
    with routing(2) as server:
        pids = server.pids()
        server.process.kill()
        assert ended(server, pids) == -signal.SIGKILL


def test_rejected_configuration_ends_router_with_code_2():
    command = [sys.executable, *FLAGS, "2", "--served-model-name", FATAL]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "exited with code 2" in done.stderr


GPUS = {
    (2, 2, "0,1,2,3"): ["0,1", "2,3"],
    (2, 1, "GPU-a,GPU-b"): ["GPU-a", "GPU-b"],
    (2, 1, ""): [None, None],
    (2, 1, None): ["0", "1"],
}


@pytest.mark.parametrize("case", GPUS, ids=str)
def test_gpus_are_split_between_replicas(case):
    count, tp_size, names = case
    environment = {} if names is None else {"CUDA_VISIBLE_DEVICES": names}
    assert gpus_of_replicas(environment, 4, count, tp_size) == GPUS[case]


def test_too_few_gpus_raise_error():
    with pytest.raises(ConfigError, match=r"^--replicas 2 with --tp-size 4 requires 8 GPUs"):
        gpus_of_replicas({}, 4, 2, 4)


def test_words_give_equal_options():
    words = ["--tp-size", "2", "--quantization", "w8a8_fp8", "--disable-radix-cache"]
    words += ["--speculative-algorithm", "NGRAM", "--api-key", "a b", "--admin-port", "9"]
    options = parse(words)
    found = parse(words_of(options))
    assert all(getattr(found, part) == getattr(options, part) for part in PARTS)
    changed = parse(words_of(options, admin_port=None, port=7))
    assert (changed.server.admin_port, changed.server.port) == (None, 7)
