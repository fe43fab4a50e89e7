"""Readers of heads and bodies of responses."""

import h11
import pytest

from shared.router.upstream import (
    MAX_LINE_BYTES,
    ChunkedBody,
    ResponseHead,
    SizedBody,
    UpstreamError,
)

PARTS = [b"data: 1\n\n", b"x" * 300, b"\r\n0\r\n\r\n", b"y"]


def encoded() -> bytes:
    http = h11.Connection(h11.SERVER)
    http.receive_data(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    http.next_event()
    fields = [("transfer-encoding", "chunked")]
    http.send(h11.Response(status_code=200, headers=fields))
    body = b"".join(http.send(h11.Data(part)) for part in PARTS)
    return body + http.send(h11.EndOfMessage(headers=[("x-trailer", "1")]))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 1000])
def test_chunked_body_equals_parts_at_any_split(size):
    data, body, found = encoded(), ChunkedBody(), b""
    for at in range(0, len(data), size):
        assert not body.is_whole
        found += body.take(data[at : at + size])
    assert found == b"".join(PARTS)
    assert body.is_whole


@pytest.mark.parametrize(
    "data", [b"zz\r\n", b"-1\r\n", b"1\r\nab\r\n", b"0" * (MAX_LINE_BYTES + 1)]
)
def test_invalid_chunk_raises_error(data):
    with pytest.raises(UpstreamError, match="invalid chunk"):
        ChunkedBody().take(data)


def test_sized_body_ends_with_last_byte():
    body = SizedBody(5)
    assert (body.take(b"abc"), body.is_whole) == (b"abc", False)
    assert (body.take(b"de"), body.is_whole) == (b"de", True)
    assert SizedBody(0).is_whole


def test_response_head_equals_h11():
    http = h11.Connection(h11.SERVER)
    http.receive_data(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
    http.next_event()
    fields = [("Content-Length", "3"), ("x-a", "b: c"), ("x-a", "")]
    data = http.send(h11.Response(status_code=503, headers=fields, reason="No"))
    head = ResponseHead.of(data.removesuffix(b"\r\n\r\n"))
    expected = [(b"content-length", b"3"), (b"x-a", b"b: c"), (b"x-a", b"")]
    assert (head.status, head.headers) == (503, expected)


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 99 x", b"ICY 200 OK", b"HTTP/1.1 200 OK\r\nx"])
def test_invalid_response_head_raises_error(data):
    with pytest.raises(UpstreamError, match="head of the response is invalid"):
        ResponseHead.of(data)
