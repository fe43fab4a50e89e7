"""Requests and responses of a connection: framing, pipelining, invalid input."""

from __future__ import annotations

import asyncio
import json

import h11
import pytest
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from shared.server.api.access_middleware import MAX_HEAD_BYTES
from shared.server.api.connection import (
    MAX_PIPELINED,
    ConnectionLimit,
    HttpConfig,
    HttpConnection,
)
from shared.server.api.exchange import CONTINUE, MAX_UNREAD_BYTES
from tests.support.recording_transport import RecordingTransport

GET = b"GET /a?b HTTP/1.1\r\nhost: x\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


class App:
    """Application that reads the body, and responds with given headers and parts of a body.

    Attributes:
      scopes, bodies: Scopes and bodies of requests.
    """

    def __init__(self, headers=(), parts=(b"ok",)) -> None:
        self._headers, self._parts = headers, parts
        self.scopes, self.bodies = [], []

    async def __call__(self, scope, receive, send) -> None:
        self.scopes.append(scope)
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        for number, part in enumerate(self._parts, 1):
            is_last = number == len(self._parts)
            await send({"type": "http.response.body", "body": part, "more_body": not is_last})


def exchanged(app: ASGIApp, *received: bytes) -> RecordingTransport:
    """Returns what a connection has written after it received these parts."""

    async def scenario() -> RecordingTransport:
        config = HttpConfig(app, ConnectionLimit.of(500, 1), 1)
        connection, written = HttpConnection(config, ServerState(), {}), RecordingTransport()
        connection.connection_made(written)
        for part in received:
            connection.data_received(part)
            for _ in range(3 * MAX_PIPELINED):
                await asyncio.sleep(0)
        connection.connection_lost(None)
        return written

    return asyncio.run(scenario())


def read_by_h11(data: bytes, method: str = "GET") -> tuple[list[tuple[bytes, bytes]], bytes]:
    """Returns headers and body of a response, as another implementation reads them."""
    client, body, headers = h11.Connection(h11.CLIENT), b"", []
    client.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
    client.send(h11.EndOfMessage())
    client.receive_data(data)
    client.receive_data(b"")
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        if isinstance(event, h11.Response):
            headers = [*event.headers]
        else:
            assert isinstance(event, h11.Data)
            body += bytes(event.data)
    return headers, body


@pytest.mark.parametrize(
    ("headers", "parts"),
    [
        ([], [b"data: 1\n\n", b"data: 2\n\n", b""]),
        ([(b"content-length", b"4")], [b"12", b"34"]),
        ([(b"content-length", b"0")], [b""]),
        ([(b"x-a", b"1"), (b"x-a", b"2")], [b"", b"1", b"2"]),
    ],
    ids=["chunked", "sized", "empty", "empty part"],
)
def test_head_is_written_with_first_data(headers, parts):
    written = exchanged(App(headers, parts), GET, GET).parts
    expected = [part for part in parts if part] or [b""]
    first, second = written[: len(written) // 2], written[len(written) // 2 :]
    assert first == second  # the second response is on the same connection
    assert expected[0] in first[0].partition(b"\r\n\r\n")[2]
    found, body = read_by_h11(b"".join(first))
    assert found[: len(headers)] == headers
    assert body == b"".join(parts)


def test_response_to_head_has_no_body():
    headers = [(b"content-length", b"2")]
    (written,) = exchanged(App(headers), GET.replace(b"GET", b"HEAD")).parts
    assert read_by_h11(written, "HEAD") == (headers, b"")
    assert written.endswith(b"\r\n\r\n")


@pytest.mark.parametrize("field", [b"", b"connection: keep-alive\r\n"])
def test_http_1_0_response_ends_with_connection(field):
    written = exchanged(App(parts=(b"1", b"2")), b"GET / HTTP/1.0\r\n" + field + b"\r\n")
    assert written.is_closing()
    assert b"".join(written.parts) == b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n12"


@pytest.mark.parametrize("value", [b"close", b"Close"])
def test_connection_close_ends_connection(value):
    written = exchanged(App(), GET[:-2] + b"connection: " + value + b"\r\n\r\n" + GET)
    assert (len(written.parts), written.is_closing()) == (1, True)
    assert b"\r\nconnection: close\r\n" in written.parts[0]


def test_application_can_end_connection():
    written = exchanged(App([(b"connection", b"Close")]), GET)
    assert (len(written.parts), written.is_closing()) == (1, True)
    assert written.parts[0].count(b"connection") == 1


def test_continue_is_sent_when_body_is_expected():
    app, head = App(), POST + b"expect: 100-Continue\r\n\r\n"
    assert exchanged(app, head).parts == [CONTINUE]
    assert exchanged(app, head, b"word").parts[0] == CONTINUE
    assert CONTINUE not in exchanged(app, head + b"word").parts
    assert app.bodies == [b"word"] * 2


def test_body_is_received_at_any_split():
    app, data = App(), CHUNKED + b"3;x=y\r\nwor\r\n1\r\nd\r\n0\r\nauthorization: z\r\n\r\n"
    for size in (1, 2, 7, len(data)):
        exchanged(app, *(data[at : at + size] for at in range(0, len(data), size)))
    assert app.bodies == [b"word"] * 4
    assert all(not any(b"z" in field for field in scope["headers"]) for scope in app.scopes)


def test_scope_has_target_and_headers():
    app = App()
    exchanged(app, b"GET /a%20b?c=%20 HTTP/1.1\r\nHost: x\r\nX-A: \t b c \t\r\nx-a:\r\n\r\n")
    (scope,) = app.scopes
    assert (scope["path"], scope["raw_path"]) == ("/a b", b"/a%20b")
    assert (scope["query_string"], scope["method"]) == (b"c=%20", "GET")
    assert scope["headers"] == [(b"host", b"x"), (b"x-a", b"b c"), (b"x-a", b"")]


def test_reading_pauses_above_unread_limit():
    async def waits(scope, receive, send) -> None:
        await asyncio.Event().wait()

    head = POST.replace(b"4", b"1000000") + b"\r\n"
    assert exchanged(waits, head, b"x" * MAX_UNREAD_BYTES).reads
    assert not exchanged(waits, head, b"x" * (MAX_UNREAD_BYTES + 1)).reads


def test_pipelined_requests_are_answered_in_order():
    app = App()
    targets = [b"/%d" % number for number in range(MAX_PIPELINED)]
    written = exchanged(app, b"".join(GET.replace(b"/a", target) for target in targets))
    assert [scope["raw_path"] for scope in app.scopes] == targets
    assert len(written.parts) == len(targets)
    assert not written.is_closing()


def test_connection_ends_after_too_many_pipelined_requests():
    written = exchanged(app := App(), GET * (2 * MAX_PIPELINED))
    assert len(app.scopes) == len(written.parts) == MAX_PIPELINED + 1
    assert written.is_closing()


def test_invalid_request_keeps_response_before_it():
    written = exchanged(App(), GET + b"hello\r\n\r\n", GET)
    assert (len(written.parts), written.is_closing()) == (1, True)
    assert written.parts[0].startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        GET[:-2] + b"host: y\r\n\r\n",
        GET[:-2] + b"a : b\r\n\r\n",
        GET[:-2] + b"a: b\r\n c\r\n\r\n",
        GET[:-2] + b"a: b\0\r\n\r\n",
        GET.replace(b"\r\n", b"\n"),
        GET.replace(b"/a", b"/\xc3\xa4"),
        GET.replace(b"/a", b"/a b"),
        POST + b"content-length: 5\r\n\r\n",
        POST + b"transfer-encoding: chunked\r\n\r\n",
        POST.replace(b"4", b"-4") + b"\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"1\r\nab\r\n",
        b"\x16\x03\x01\x02\x00",
    ],
)
def test_invalid_request_returns_400(data):
    written = exchanged(app := App(), data)
    assert written.parts[0].startswith(b"HTTP/1.1 400 ")
    error = json.loads(read_by_h11(written.parts[0])[1])["error"]
    assert error["type"] == "invalid_request_error"
    assert (len(written.parts), written.is_closing(), app.bodies) == (1, True, [])


@pytest.mark.parametrize("begin", [b"1;", b"0\r\n", b"0\r\na: "], ids=["chunk", "trailer", "value"])
def test_endless_chunk_or_trailer_returns_431(begin):
    parts = [b"a:b\r\n" if begin.endswith(b"\n") else b"abcde"] * (MAX_HEAD_BYTES // 5 + 1)
    written = exchanged(App(), CHUNKED + begin, b"".join(parts))
    assert written.parts[0].startswith(b"HTTP/1.1 431 ")
    assert written.is_closing()


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_upgrade_is_ignored(size):
    """HTTP clients of Java offer an upgrade to HTTP/2."""
    upgrade = b"connection: upgrade\r\nupgrade: h2c\r\n\r\n"
    data = POST + upgrade + b"word" + CHUNKED[:-2] + upgrade + b"2\r\nwo\r\n" + END
    data += GET[:-2] + upgrade + GET
    app = App()
    written = exchanged(app, *(data[at : at + size] for at in range(0, len(data), size)))
    assert app.bodies == [b"word", b"wo", b"", b""]
    assert [part.startswith(b"HTTP/1.1 200 ") for part in written.parts] == [True] * 4


@pytest.mark.parametrize("field", [(b"x-a", b"b\r\nc: d"), (b"x\n", b"b"), (b"x", b"\0")])
def test_invalid_response_header_returns_500(field):
    written = exchanged(App([field]), GET)
    assert written.parts[0].startswith(b"HTTP/1.1 500 ")
    assert (len(written.parts), written.is_closing()) == (1, True)


@pytest.mark.parametrize("parts", [[b"1"], [b"1", b""], [b"123"], [b"1", b"23"]])
def test_wrong_content_length_closes_connection(parts):
    written = exchanged(App([(b"content-length", b"2")], parts), GET, GET)
    assert written.is_closing()
    assert b"HTTP/1.1" not in b"".join(written.parts)[1:]


def test_failing_application_returns_500():
    async def fails(scope, receive, send) -> None:
        raise RuntimeError

    written = exchanged(fails, GET)
    assert written.parts[0].startswith(b"HTTP/1.1 500 ")
    assert written.is_closing()
