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

FLAGS = ["-m", "tests.support.fake_server", "--port", "0", "--replicas"]
CHECKS = ["--health-check-interval", "1", "--health-check-timeout", "1"]
KEY = "a secret key"
HEADERS = {"authorization": f"Bearer {KEY}"}
START_S, DETECTION_S = 20.0, 5.0


def replicas_of(server: Server) -> dict[str, str]:
    """Returns the state of each replica by its URL."""
    fields = httpx.get(f"{server.url}/capabilities", timeout=30, headers=HEADERS).json()
    return {each["url"]: each["state"] for each in fields.get("replicas", [])}


def wait_ready(server: Server, count: int) -> float:
    """Waits until all replicas are ready; returns the seconds."""
    began = time.monotonic()
    while [*replicas_of(server).values()].count("ready") != count:
        assert time.monotonic() - began < START_S, replicas_of(server)
        time.sleep(0.05)
    return time.monotonic() - began


@contextmanager
def routing(count: int) -> Iterator[Server]:
    with serving([*FLAGS, str(count), *CHECKS, "--api-key", KEY]) as server:
        wait_ready(server, count)
        yield server


@pytest.fixture(scope="module")
def four() -> Iterator[Server]:
    with routing(4) as server:
        yield server


def complete(server: Server) -> httpx.Response:
    return httpx.post(server.url + COMPLETIONS, json={}, timeout=20, headers=HEADERS)


def metrics_of(server: Server) -> dict[str, float]:
    page = httpx.get(f"{server.url}/metrics", timeout=30, headers=HEADERS).text
    rows = (line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


def processes_of(server: Server) -> list[int]:
    """Returns the process ids of all replicas."""
    return server.pids()[1:]


def stream(url: str, events: int, pace_s: float) -> list[str]:
    """Returns the data of all events of a stream."""
    fields = {"stream": True, "max_tokens": events, "pace_s": pace_s}
    with httpx.stream(
        "POST", url + COMPLETIONS, json=fields, timeout=60, headers=HEADERS
    ) as response:
        return [line[6:] for line in response.iter_lines() if line.startswith("data: ")]


def ended(server: Server, pids: list[int], timeout_s: float = 15.0) -> int:
    """Waits for the end of the router and of all replicas; returns the exit code."""
    code = server.process.wait(timeout_s)
    until = time.monotonic() + 5
    while any(map(is_alive, pids)):
        assert time.monotonic() < until, pids
        time.sleep(0.02)
    return code


def test_killed_replica_restarts_while_others_serve(four):
    found: list[list[str]] = []
    clients = [
        threading.Thread(target=lambda: found.append(stream(four.url, 100, 0.03)))
        for _ in range(16)
    ]
    for each in clients:
        each.start()
    is_open = "tandem:router_replica_open_requests"
    while sum(value for name, value in metrics_of(four).items() if is_open in name) < 16:
        time.sleep(0.02)
    os.kill(processes_of(four)[0], signal.SIGKILL)
    assert wait_ready(four, 4) < START_S + DETECTION_S
    for each in clients:
        each.join()
    lost = [each for each in found if len(each) != 101]
    assert len(found) == 16
    assert 1 <= len(lost) <= 4  # a request without a first byte is retried
    codes = {json.loads(each[-2])["error"]["code"] for each in lost}
    assert codes == {"replica_lost"}
    assert metrics_of(four)["tandem:router_replica_restarts_total"] == 1


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


def test_sigterm_drains_and_leaves_nothing():
    with routing(2) as server:
        pids, urls = server.pids(), [*replicas_of(server)]
        found: list[list[str]] = []
        client = threading.Thread(target=lambda: found.append(stream(server.url, 40, 0.05)))
        client.start()
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert complete(server).json()["error"]["code"] == "draining"
        client.join()
        assert len(found[0]) == 41
        assert ended(server, pids) == 0
        for url in (server.url, *urls):
            with pytest.raises(httpx.ConnectError):
                httpx.get(url)


@pytest.mark.matrix
def test_second_signal_ends_all_at_once():
    with routing(2) as server:
        pids = server.pids()
        client = threading.Thread(target=stream, args=(server.url, 1000, 0.05), daemon=True)
        client.start()
        time.sleep(0.3)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        server.process.send_signal(signal.SIGTERM)
        assert ended(server, pids, 8.0) == 0


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
