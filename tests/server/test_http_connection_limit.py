"""Connection limit below the file descriptor limit, and rate-limited logging."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from shared.process import logs
from shared.process.logs import RateLimitFilter
from shared.server.api.connection import LINGER_S, MAX_BACKLOG, MAX_SPARE, ConnectionLimit
from tests.support.http_fixtures import Server, serving

DESCRIPTORS, NUM_CLIENTS = 48, 120
BOUNDED = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))
from tests.support import http_fixtures
sys.exit(http_fixtures.main())
"""


@pytest.fixture
def server(tmp_path) -> Iterator[Server]:
    with serving(["-c", BOUNDED, str(tmp_path), "--with-admin-listener"]) as running:
        yield running


def address(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").partition(":")
    return host, int(port)


def received_by(connection: socket.socket) -> bytes | None:
    """Returns the bytes that a silent client receives; None for an accepted connection."""
    connection.settimeout(0.1)
    try:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))
    except TimeoutError:
        return None
    except ConnectionError:
        return b""


def test_connection_limit_returns_503_and_keeps_open_connections(server):
    with contextlib.ExitStack() as ends:
        inside = ends.enter_context(socket.create_connection(address(server.url), timeout=5))
        clients = [
            ends.enter_context(socket.create_connection(address(server.url), timeout=5))
            for _ in range(NUM_CLIENTS)
        ]
        time.sleep(2 * LINGER_S)  # all of these have their response
        late = httpx.get(server.url + "/health", timeout=5)
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "too_many_connections"
        responses = list(map(received_by, clients))
        refused = [each for each in responses if each]
        assert len([each for each in responses if each is None]) >= 5, "no connection was accepted"
        assert refused, "no connection received 503"
        for each in refused:
            head, _, body = each.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert "connection limit reached" in json.loads(body)["error"]["message"]
        inside.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert inside.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        (line,) = [line for line in server.lines if "admin routes at " in line]
        admin = line.rpartition(" ")[2]
        assert httpx.get(admin + "/metrics", timeout=5).status_code == 200
    deadline = time.monotonic() + 60
    while httpx.get(server.url + "/health", timeout=5).status_code != 200:
        assert time.monotonic() < deadline, "connections are rejected after all clients have left"
        time.sleep(0.1)
    server.process.terminate()
    assert server.process.wait(60) == 0
    assert len(server.lines) < 30
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize("descriptors", [0, 1, 7, 40, 1000, 1 << 16])
@pytest.mark.parametrize("num_sockets", [1, 2])
def test_connection_limit_fits_file_descriptors(descriptors, num_sockets):
    room = ConnectionLimit.of(descriptors, num_sockets)
    assert min(room.most, room.spare, room.backlog) >= 1
    assert room.spare <= MAX_SPARE
    assert room.backlog <= MAX_BACKLOG
    least = 2 + num_sockets  # a server with fewer descriptors still serves some connections
    assert room.most + room.spare + num_sockets * room.backlog <= max(descriptors, least)


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.addFilter(RateLimitFilter())

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def logged() -> tuple[logging.Logger, list[str]]:
    logger, handler = logging.Logger("any"), Lines()
    logger.addHandler(handler)
    return logger, handler.lines


def test_rate_limit_filter_suppresses_repeats_with_count(logged, monkeypatch):
    logger, lines = logged
    now = 0.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    for number in range(1000):
        try:
            raise OSError(number)
        except OSError:
            logger.exception("no. %d", number)
        logger.warning("the same")
        logger.info("no. %d", number)
    assert lines.count("the same") == 1
    assert len(lines) == 2 + 1000
    now = logs.REPEAT_S
    logger.warning("the same")
    assert lines[-1] == "the same (999 similar lines suppressed)"
    now *= 2
    logger.warning("the same")
    assert lines[-1] == "the same"


def test_rate_limit_filter_passes_distinct_errors_bounded(logged):
    logger, lines = logged
    for number in range(3 * logs.MAX_KINDS):
        logger.error("no. %d", number)
    assert len(lines) == 3 * logs.MAX_KINDS
    (handler,) = logger.handlers
    (repeats,) = handler.filters
    assert len(repeats._seen) == logs.MAX_KINDS
