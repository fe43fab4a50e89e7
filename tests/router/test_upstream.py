"""Responses that a connection to a server receives."""

from __future__ import annotations

import asyncio

import h11
import pytest

from shared.router.upstream import (
    MAX_HEAD_BYTES,
    READ_BYTES,
    Connection,
    ResponseHead,
    UpstreamError,
)
from tests.support.recording_transport import RecordingTransport

PARTS = [b"data: 1\n\n", b"x" * 300, b"\r\n0\r\n\r\n", b"y"]
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def written_by_h11(status: int, fields: list[tuple[str, str]], parts: list[bytes]) -> bytes:
    """Returns a response that another implementation has written."""
    http = h11.Connection(h11.SERVER)
    http.receive_data(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    http.next_event()
    data = http.send(h11.Response(status_code=status, headers=fields, reason="No"))
    data += b"".join(http.send(h11.Data(part)) for part in parts)
    trailer = [("x-trailer", "1")] if ("transfer-encoding", "chunked") in fields else []
    return data + http.send(h11.EndOfMessage(headers=trailer))


def received(*parts: bytes, is_lost: bool = False) -> tuple[ResponseHead, bytes, bool]:
    """Returns head and body of a response in these parts, and if the connection can be reused.

    Raises:
      UpstreamError: The response is invalid, or not complete.
    """

    async def scenario() -> tuple[ResponseHead, bytes, bool]:
        connection = Connection()
        connection.connection_made(RecordingTransport())
        connection.send(b"GET", b"/", [], b"")
        reading = asyncio.create_task(_whole(connection))
        for part in parts:
            await asyncio.sleep(0)
            connection.data_received(part)
        if is_lost:
            connection.connection_lost(None)
        head, body = await asyncio.wait_for(reading, 1)
        return head, body, connection.start_next()

    return asyncio.run(scenario())


async def _whole(connection: Connection) -> tuple[ResponseHead, bytes]:
    head, body, is_whole = await connection.response(), b"", False
    while not is_whole:
        data, is_whole = await connection.data()
        body += data
    return head, body


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
@pytest.mark.parametrize("length", [("transfer-encoding", "chunked"), ("content-length", "317")])
def test_response_equals_h11_at_any_split(size, length):
    fields = [("Content-Type", "a"), ("x-a", "b: c"), ("x-a", ""), length]
    data = written_by_h11(503, fields, PARTS)
    head, body, is_reusable = received(*(data[at : at + size] for at in range(0, len(data), size)))
    assert head.status == 503
    assert head.headers == [(name.lower().encode(), value.encode()) for name, value in fields]
    assert (body, is_reusable) == (b"".join(PARTS), True)


def test_header_values_are_stripped():
    head, _, _ = received(HEAD[:-2] + b"X-A: \t b c \t\r\nx-b:\r\n\r\nabc")
    assert head.headers[1:] == [(b"x-a", b"b c"), (b"x-b", b"")]


def test_request_is_written_at_once():
    connection, transport = Connection(), RecordingTransport()
    connection.connection_made(transport)
    connection.send(b"POST", b"/a?b", [(b"host", b"c"), (b"content-length", b"1")], b"d")
    assert transport.parts == [b"POST /a?b HTTP/1.1\r\nhost: c\r\ncontent-length: 1\r\n\r\nd"]


@pytest.mark.parametrize(
    ("data", "is_reusable"),
    [
        (HEAD + b"abc", True),
        (b"HTTP/1.1 204 No\r\n\r\n", True),
        (HEAD.replace(b"3", b"0"), True),
        (HEAD[:-2] + b"connection: close\r\n\r\nabc", False),
        (HEAD.replace(b"1.1", b"1.0") + b"abc", False),
        (HEAD + b"abc" + HEAD, False),
        (HEAD + b"abcd", False),
    ],
)
def test_connection_is_reused_after_valid_response(data, is_reusable):
    assert received(data)[2] is is_reusable


@pytest.mark.parametrize(
    "data",
    [
        b"HTTP/1.1 99 x\r\n\r\n",
        b"HTTP/1.1 100 x\r\n\r\n",
        b"HTTP/1.1 101 x\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n",
        b"ICY 200 OK",
        b"HTTP/1.1 200 OK\r\nx\r\n\r\n",
        CHUNKED + b"zz\r\n",
        CHUNKED + b"-1\r\n",
        CHUNKED + b"1\r\nab\r\n",
    ],
)
def test_invalid_response_raises_error(data):
    with pytest.raises(UpstreamError, match="the response is invalid: "):
        received(data)


@pytest.mark.parametrize("begin", [HEAD[:-2] + b"a: ", CHUNKED + b"1;"], ids=["head", "chunk"])
def test_endless_head_or_chunk_raises_error(begin):
    with pytest.raises(UpstreamError, match="too long"):
        received(begin, b"x" * (MAX_HEAD_BYTES + 1))


@pytest.mark.parametrize("data", [b"", HEAD[:-2], HEAD + b"ab", CHUNKED + b"1\r\na\r\n"])
def test_lost_connection_raises_error(data):
    with pytest.raises(UpstreamError, match="the server closed the connection"):
        received(data, is_lost=True)


def test_data_without_request_closes_connection():
    connection, transport = Connection(), RecordingTransport()
    connection.connection_made(transport)
    connection.data_received(HEAD + b"abc")
    assert transport.is_closing()
    assert not connection.is_usable()


def test_reading_pauses_above_read_limit():
    async def scenario() -> None:
        connection, transport = Connection(), RecordingTransport()
        connection.connection_made(transport)
        connection.send(b"GET", b"/", [], b"")
        connection.data_received(HEAD.replace(b"3", b"1000000") + b"x" * READ_BYTES)
        assert transport.reads
        connection.data_received(b"x")
        assert not transport.reads
        assert await connection.data() == (b"x" * (READ_BYTES + 1), False)
        assert transport.reads

    asyncio.run(scenario())
