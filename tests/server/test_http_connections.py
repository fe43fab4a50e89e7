"""Allowed hosts, and the timeout of incomplete requests."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator

import httpx
import pytest
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shared.router.upstream import KEEP_S
from shared.server.api import connection
from shared.server.api.connection import IDLE_S, ConnectionLimit, HttpConfig
from tests.support.http_fixtures import COMPLETIONS, HOST_NAME, JSON, Server, serving

TIMEOUT_S = 1.0
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\n"
ASKED = HEAD + b"word"


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = str(tmp_path_factory.mktemp("model"))
    with serving(["-m", "tests.support.http_fixtures", folder]) as running:
        yield running


@pytest.mark.parametrize(
    "name",
    ["localhost", "LOCALHOST.", "127.0.0.1", "127.9.9.9:80", "[::1]:8000", "[::1]", HOST_NAME],
)
def test_allowed_hosts_return_200(server, name):
    assert httpx.get(server.url + "/health", headers={"host": name}).status_code == 200


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("evil.example", "evil.example"),
        ("Evil.example.:8000", "evil.example"),
        ("localhost.evil.example", "localhost.evil.example"),
        ("10.0.0.1", "10.0.0.1"),
        ("[::2]:80", "::2"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", COMPLETIONS])
def test_unknown_host_returns_403(server, host, name, path):
    method = "POST" if path == COMPLETIONS else "GET"
    headers, body = {**JSON, "host": host}, b'{"prompt": [97], "max_tokens": 1}'
    answer = httpx.request(method, server.url + path, headers=headers, content=body)
    assert answer.status_code == 403
    message = answer.json()["error"]["message"]
    assert message == f"host {name!r} is not allowed; add it to --allowed-hosts"


async def _reads_and_waits(scope: Scope, receive: Receive, send: Send) -> None:
    """Reads the body and responds after twice the read timeout."""
    body = await Request(scope, receive).body()
    await asyncio.sleep(2 * TIMEOUT_S)
    await Response(b"read " + body)(scope, receive, send)


@contextlib.asynccontextmanager
async def _listening() -> AsyncIterator[int]:
    """Runs a server in this process and yields its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = uvicorn.Server(HttpConfig(_reads_and_waits, ConnectionLimit.of(500, 1), 1))
        task = asyncio.create_task(running.serve([listener]))
        while not running.started:
            await asyncio.sleep(0.01)
        try:
            yield listener.getsockname()[1]
        finally:
            running.should_exit = True
            await task


async def _converse(*parts: bytes, pause_s: float = 0.0) -> tuple[bytes, float]:
    """Returns all bytes that a client receives, and the seconds until the connection ends."""
    async with _listening() as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        began = time.monotonic()
        answer = asyncio.create_task(reader.read())
        for part in parts:
            writer.write(part)
            await asyncio.sleep(pause_s)
        got = await asyncio.wait_for(answer, 60)
        lasted = time.monotonic() - began
        writer.close()
        return got, lasted


@pytest.fixture(autouse=True)
def short_time(monkeypatch):
    monkeypatch.setattr(connection, "READ_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(connection, "IDLE_S", TIMEOUT_S)


@pytest.fixture
def timers(monkeypatch) -> list[str]:
    """The actions of the timers that connections start."""
    started: list[str] = []

    def start(timer: connection.Timer, seconds: float, action: Callable[[], None]) -> None:
        started.append(action.__name__)
        start_timer(timer, seconds, action)

    start_timer = connection.Timer.start
    monkeypatch.setattr(connection.Timer, "start", start)
    return started


@pytest.mark.parametrize(
    "parts",
    [[], [HEAD[:20]], [HEAD, b"wo"], [HEAD[i : i + 1] for i in range(5)]],
    ids=["no bytes", "partial head", "partial body", "byte by byte"],
)
def test_incomplete_request_times_out_with_408(parts, timers):
    """Later bytes of a request do not start its timer again."""
    got, lasted = asyncio.run(_converse(*parts, pause_s=0.18 * TIMEOUT_S))
    assert timers.count("_give_up") == 1
    assert lasted >= 0.9 * TIMEOUT_S  # the server's clock started earlier
    assert got.startswith(b"HTTP/1.1 408 ")
    assert b"did not arrive within 1 s" in got


def test_response_may_exceed_read_timeout():
    got, lasted = asyncio.run(_converse(ASKED))
    assert got.startswith(b"HTTP/1.1 200 ")
    assert b"read word" in got
    assert lasted >= 2 * TIMEOUT_S


def test_idle_connection_outlasts_pools_of_clients():
    """A client that reuses a connection as the server closes it receives no response."""
    pool_s = inspect.signature(httpx.Limits).parameters["keepalive_expiry"].default
    assert pool_s < KEEP_S < IDLE_S
    got, lasted = asyncio.run(_converse(ASKED))
    assert got.count(b"HTTP/1.1 ") == 1
    assert lasted < IDLE_S


def test_read_timeout_applies_to_keep_alive_requests():
    got, lasted = asyncio.run(_converse(ASKED, HEAD + b"wo", pause_s=TIMEOUT_S))
    assert got.count(b"HTTP/1.1 ") == 2
    assert b"read word" in got
    assert b"HTTP/1.1 408 " in got
    assert lasted >= 3 * TIMEOUT_S
