"""Graceful shutdown after SIGTERM: open requests finish, new ones return 503."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from shared.options.server import ServerOptions
from tests.support.echo_engine import FROZEN, HELD, release
from tests.support.http_fixtures import (
    COMPLETIONS,
    FREEZE,
    Server,
    is_alive,
    save_tokenizer,
    serving,
)

DEFAULT_S = ServerOptions().graceful_shutdown_timeout
"""Seconds after which a server ends that ignores its flag."""
LONG = {"prompt": HELD, "max_tokens": 60, "temperature": 0}


def command(folder: Path, *flags: str) -> list[str]:
    save_tokenizer(folder)
    return ["-m", "tests.support.http_fixtures", str(folder), *flags]


def in_background(call: Callable[[], object]) -> tuple[threading.Thread, list]:
    found: list = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    return thread, found


def wait_until_it_drains(server: Server) -> None:
    deadline = time.monotonic() + 60
    while httpx.get(server.url + "/health").status_code != 503:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_drain_finishes_open_requests_and_rejects_new(tmp_path):
    with serving(command(tmp_path)) as server:
        pids = server.pids()
        whole, answers = in_background(lambda: server.post(COMPLETIONS, **LONG, n=2))
        streamed, events = in_background(lambda: server.stream(COMPLETIONS, **LONG))
        waiting, later = in_background(lambda: server.post(COMPLETIONS, **LONG, n=4))
        server.wait_for_metric("tandem:num_requests_waiting", 3)
        server.process.send_signal(signal.SIGTERM)
        wait_until_it_drains(server)
        refused = server.post(COMPLETIONS, prompt="a")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert 1 <= int(refused.headers["retry-after"]) <= 20
        assert httpx.get(server.url + "/live").status_code == 200
        assert server.metrics()["tandem:num_requests_running"] > 0
        release(tmp_path)
        for thread in (whole, streamed, waiting):
            thread.join(60)
        assert server.process.wait(60) == 0
    assert answers[0].json()["usage"]["completion_tokens"] == 120
    assert events[0][-1]["usage"]["completion_tokens"] == 60
    assert later[0].json()["usage"]["completion_tokens"] == 240
    assert not any(map(is_alive, pids))
    assert any("draining" in line for line in server.lines)
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.matrix
def test_drain_of_idle_server_ends_immediately(tmp_path):
    with serving(command(tmp_path)) as server:
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(5) == 0
        assert time.monotonic() - began < 3


@pytest.mark.parametrize(
    "prompt",
    [pytest.param(HELD, id="held", marks=pytest.mark.matrix), [FREEZE]],
)
def test_drain_ends_at_graceful_shutdown_timeout(tmp_path, prompt):
    with serving(command(tmp_path, "--graceful-shutdown-timeout", "1")) as server:
        thread, found = in_background(
            lambda: server.post(COMPLETIONS, prompt=prompt, max_tokens=300)
        )
        if prompt == [FREEZE]:
            server.wait_for_line(FROZEN)
        else:
            server.wait_for_metric("tandem:num_requests_running", 1)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert 0.9 < time.monotonic() - began < DEFAULT_S
        thread.join(60)
    assert found[0].status_code == 503
    assert found[0].json()["error"]["message"] == "the server was stopped by SIGTERM"
