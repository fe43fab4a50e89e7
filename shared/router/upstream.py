"""HTTP/1.1 client of the router over asyncio streams, with a pool of kept connections.

It has no parser of a library: with h11 a request takes 606 us of CPU time instead of 490, and an
event of a stream 80 us instead of 68 (two cores, `bench.serving.router_overhead`).
"""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

CONNECT_S = 5.0
READ_BYTES = 1 << 16
"""Maximum bytes that are read ahead of the client; more stay in the sockets."""

KEEP_S = 4.0
"""Seconds that an idle connection is kept; servers close theirs after 5 s."""

MAX_IDLE = 1024
MAX_HEAD_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 12  # of a chunk size, or of a trailer field
_HEAD_END = b"\r\n\r\n"
_STATUS = re.compile(rb"HTTP/1\.1 ([2-5]\d\d)(?: |$)")
_SIZE, _AFTER_DATA, _TRAILER = "size", "after data", "trailer"

Headers = Sequence[tuple[bytes, bytes]]


class UpstreamError(Exception):
    """The connection to a server failed; the message is the reason."""


class ConnectError(UpstreamError):
    """The server accepts no connection."""


@dataclass(frozen=True)
class ResponseHead:
    """Status and headers of a response; names are in lower case."""

    status: int
    headers: list[tuple[bytes, bytes]]

    @classmethod
    def of(cls, data: bytes) -> ResponseHead:
        """Parses the head of a response, without the blank line.

        Raises:
          UpstreamError: It is no head of HTTP/1.1.
        """
        first, *lines = data.split(b"\r\n")
        status = _STATUS.match(first)
        fields = [line.split(b":", 1) for line in lines]
        if status is None or any(len(field) != 2 for field in fields):
            raise UpstreamError("the head of the response is invalid")
        return cls(int(status[1]), [(name.lower(), value.strip()) for name, value in fields])


class Connection:
    """Connection to a server, with one request at a time.

    Attributes:
      is_reused: True if an earlier request was sent on it.
      idle_since: Time at which it became idle, by `time.monotonic`.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._body: ChunkedBody | SizedBody | None = None
        self._keeps = False
        self.is_reused, self.idle_since = False, 0.0

    async def send(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> None:
        """Sends a request with a complete body.

        Raises:
          UpstreamError: The connection is closed.
        """
        self._body = None
        lines = [b"%b %b HTTP/1.1" % (method, target), *(b"%b: %b" % field for field in headers)]
        try:
            self._writer.write(b"\r\n".join(lines) + _HEAD_END + body)
            await self._writer.drain()
        except OSError as error:
            raise UpstreamError(str(error)) from error

    async def response(self) -> ResponseHead:
        """Returns the head of the response.

        Raises:
          UpstreamError: The connection was closed before, or the response is invalid.
        """
        data = b""
        while (end := data.find(_HEAD_END)) < 0:
            if len(data) > MAX_HEAD_BYTES:
                raise UpstreamError("the head of the response is too long")
            data += await self._read()
        head = ResponseHead.of(data[:end])
        fields = dict(head.headers)
        self._keeps = fields.get(b"connection", b"").lower() != b"close"
        if fields.get(b"transfer-encoding", b"").lower() == b"chunked":
            self._body = ChunkedBody()
        else:
            self._body = SizedBody(int(fields.get(b"content-length", 0)))
        self._ahead = data[end + len(_HEAD_END) :]
        return head

    async def data(self) -> tuple[bytes, bool]:
        """Returns all body bytes that have arrived, and True after the last ones.

        Raises:
          UpstreamError: The connection was closed before the end of the body.
        """
        assert self._body is not None
        data = self._body.take(self._ahead)
        while not data and not self._body.is_whole:
            data = self._body.take(await self._read())
        self._ahead = b""
        return data, self._body.is_whole

    async def _read(self) -> bytes:
        try:
            data = await self._reader.read(READ_BYTES)
        except OSError as error:
            raise UpstreamError(str(error)) from error
        if not data:
            raise UpstreamError("the server closed the connection")
        return data

    def start_next(self) -> bool:
        """Prepares the next request; returns False if the connection cannot be reused."""
        is_whole = self._body is not None and self._body.is_whole
        self.is_reused, self.idle_since = True, time.monotonic()
        return is_whole and self._keeps

    def is_usable(self) -> bool:
        """Returns True if an idle connection can take a request."""
        is_open = not (self._reader.at_eof() or self._writer.is_closing())
        return is_open and time.monotonic() - self.idle_since < KEEP_S

    def abort(self) -> None:
        """Closes the connection at once; a pending read fails."""
        self._writer.transport.abort()


class SizedBody:
    """Reader of a body with a known length.

    Attributes:
      is_whole: True after the last byte.
    """

    def __init__(self, num_bytes: int) -> None:
        self._left, self.is_whole = num_bytes, not num_bytes

    def take(self, data: bytes) -> bytes:
        """Returns the body bytes in received data."""
        self._left -= len(data)
        self.is_whole = self._left <= 0
        return data


class ChunkedBody:
    """Reader of a body with chunked transfer coding (RFC 9112, 7.1).

    Attributes:
      is_whole: True after the last chunk and the trailer.
    """

    def __init__(self) -> None:
        self._rest, self._left, self._line, self.is_whole = b"", 0, _SIZE, False

    def take(self, data: bytes) -> bytes:
        """Returns the body bytes in received data.

        Raises:
          UpstreamError: The data is no chunk.
        """
        data, at, parts = self._rest + data, 0, []
        while not self.is_whole:
            if self._left:
                part = data[at : at + self._left]
                parts.append(part)
                at, self._left = at + len(part), self._left - len(part)
                if self._left:
                    break
            end = data.find(b"\r\n", at)
            if end < 0:
                break
            self._take_line(data[at:end])
            at = end + 2
        self._rest = data[at:]
        if len(self._rest) > MAX_LINE_BYTES:
            raise UpstreamError("the response has an invalid chunk")
        return b"".join(parts)

    def _take_line(self, line: bytes) -> None:
        """Reads a line between the data of chunks."""
        if self._line is _SIZE:
            try:
                self._left = int(line.partition(b";")[0], 16)
            except ValueError:
                self._left = -1
            self._line = _AFTER_DATA if self._left else _TRAILER
        elif self._line is _TRAILER:
            self.is_whole = not line
        else:
            self._left, self._line = -1 if line else 0, _SIZE
        if self._left < 0:
            raise UpstreamError("the response has an invalid chunk")


class ConnectionPool:
    """Connections to one server.

    Attributes:
      url: URL of the server without a path.
      host: Value of the Host header.
    """

    def __init__(self, url: str) -> None:
        self.url, parts = url, urlsplit(url)
        self.host = parts.netloc.rpartition("@")[2].encode()
        self._name, is_tls = parts.hostname or "", parts.scheme == "https"
        self._port = parts.port or (443 if is_tls else 80)
        self._tls = ssl.create_default_context() if is_tls else None
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()

    async def take(self, fresh: bool = False) -> Connection:
        """Returns an idle connection, or a new one.

        Args:
          fresh: Open a new one in any case.

        Raises:
          ConnectError: The server cannot be reached.
        """
        connection = None if fresh else self._kept()
        if connection is None:
            try:
                async with asyncio.timeout(CONNECT_S):
                    reader, writer = await asyncio.open_connection(
                        self._name, self._port, ssl=self._tls, limit=READ_BYTES
                    )
            except (OSError, TimeoutError) as error:
                raise ConnectError(str(error) or "no connection in time") from error
            connection = Connection(reader, writer)
        self._busy.add(connection)
        return connection

    def give_back(self, connection: Connection) -> None:
        """Keeps a connection after a complete response, and closes any other one."""
        self._busy.discard(connection)
        if len(self._idle) < MAX_IDLE and connection.start_next():
            self._idle.append(connection)
        else:
            connection.abort()

    def abort(self) -> None:
        """Closes all connections at once; requests on them fail."""
        for connection in (*self._busy, *self._idle):
            connection.abort()
        self._idle.clear()

    def _kept(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()  # the last one used, so that others expire
            if connection.is_usable():
                return connection
            connection.abort()
        return None
