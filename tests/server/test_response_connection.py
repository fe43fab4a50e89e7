"""Head of a response and its first data are one write, and the bytes are those of h11."""

from __future__ import annotations

import h11
import pytest

from shared.server.api.connection import ResponseConnection

CHUNKED = ([], [b"data: 1\n\n", b"data: 2\n\n", b""])
SIZED = ([(b"content-length", b"4")], [b"12", b"34"])
EMPTY = ([(b"content-length", b"0")], [b""])


def written(
    connection: h11.Connection, method: bytes, headers: list[tuple[bytes, bytes]], data: list[bytes]
) -> list[bytes]:
    """Returns the output for each event of a response."""
    connection.receive_data(method + b" /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n")
    while not isinstance(connection.next_event(), h11.EndOfMessage):
        pass
    events = [h11.Response(status_code=200, headers=headers), *(h11.Data(data=x) for x in data)]
    outputs = [connection.send(event) or b"" for event in (*events, h11.EndOfMessage())]
    connection.start_next_cycle()
    return outputs


@pytest.mark.parametrize(("headers", "data"), [CHUNKED, SIZED, EMPTY])
def test_head_is_written_with_first_data(headers, data):
    plain, joined = h11.Connection(h11.SERVER), ResponseConnection(h11.SERVER)
    for _ in range(2):  # the second response is on the same connection
        wanted = written(plain, b"GET", headers, data)
        head, first, *rest = wanted
        assert written(joined, b"GET", headers, data) == [b"", head + first, *rest]


def test_head_without_data_ends_response():
    wanted = written(h11.Connection(h11.SERVER), b"HEAD", SIZED[0], [b""])
    assert b"".join(written(ResponseConnection(h11.SERVER), b"HEAD", SIZED[0], [b""])) == wanted[0]


def test_interim_response_is_written_at_once():
    connection = ResponseConnection(h11.SERVER)
    connection.receive_data(b"POST / HTTP/1.1\r\nhost: a\r\nexpect: 100-continue\r\n")
    connection.receive_data(b"content-length: 2\r\n\r\n")
    connection.next_event()
    interim = connection.send(h11.InformationalResponse(status_code=100, headers=[]))
    assert (interim or b"").startswith(b"HTTP/1.1 100 ")
