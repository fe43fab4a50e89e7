"""HTTP/1.1 client of the router, with a pool of kept connections."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import httptools

CONNECT_S = 5.0
READ_BYTES = 1 << 16
"""Maximum bytes that are read ahead of the client; more stay in the sockets."""

KEEP_S = 60.0
"""Seconds that an idle connection is kept; servers close theirs after 75 s."""

MAX_IDLE = 1024
MAX_HEAD_BYTES = 1 << 16

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


class Connection(asyncio.Protocol):
    """Connection to a server, with one request at a time.

    Attributes:
      is_reused: True if an earlier request was sent on it.
      idle_since: Time at which it became idle, by `time.monotonic`.
    """

    _transport: asyncio.Transport

    def __init__(self) -> None:
        self.is_reused, self.idle_since = False, 0.0
        self._parser = httptools.HttpResponseParser(self)
        self._changed: asyncio.Future[None] | None = None
        self._failure = ""
        self._head: ResponseHead | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._parts: list[bytes] = []
        self._num_unparsed = self._num_unread = 0
        self._is_whole, self._keeps = True, False

    def send(self, method: bytes, target: bytes, headers: Headers, body: bytes) -> None:
        """Sends a request with a complete body."""
        self._head, self._headers, self._is_whole, self._num_unparsed = None, [], False, 0
        lines = [b"%b %b HTTP/1.1" % (method, target), *(b"%b: %b" % field for field in headers)]
        self._transport.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)

    async def response(self) -> ResponseHead:
        """Returns the head of the response.

        Raises:
          UpstreamError: The connection was closed before, or the response is invalid.
        """
        while self._head is None:
            await self._change()
        return self._head

    async def data(self) -> tuple[bytes, bool]:
        """Returns all body bytes that have arrived, and True after the last ones.

        Raises:
          UpstreamError: The connection was closed before the end of the body.
        """
        while not self._parts and not self._is_whole:
            await self._change()
        data, self._num_unread = b"".join(self._parts), 0
        self._parts.clear()
        self._transport.resume_reading()
        return data, self._is_whole

    async def _change(self) -> None:
        """Waits for the next part of the response."""
        if self._failure:
            raise UpstreamError(self._failure)
        self._changed = asyncio.get_running_loop().create_future()
        await self._changed

    def start_next(self) -> bool:
        """Prepares the next request; returns False if the connection cannot be reused."""
        self.is_reused, self.idle_since = True, time.monotonic()
        return self._is_whole and self._keeps and not self._failure

    def is_usable(self) -> bool:
        """Returns True if an idle connection can take a request."""
        return not self._failure and time.monotonic() - self.idle_since < KEEP_S

    def abort(self) -> None:
        """Closes the connection at once; a pending read fails."""
        self._transport.abort()

    # Protocol of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keeps the transport."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Parses received data; an invalid response closes the connection."""
        self._num_unparsed += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the response is invalid: {error.__context__ or error}")
        if self._num_unparsed > MAX_HEAD_BYTES:
            self._fail("the head of the response or of a chunk is too long")
        if self._num_unread > READ_BYTES:
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fails the request of the connection."""
        self._fail(str(exc or "the server closed the connection"))
        self._wake()
        del self._parser  # it refers to this object

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._transport.abort()

    def _wake(self) -> None:
        if self._changed is not None and not self._changed.done():
            self._changed.set_result(None)

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        """Begins a response.

        Raises:
          ValueError: No request precedes it.
        """
        if self._is_whole:
            raise ValueError("it has no request")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receives a header, or a trailer field."""
        self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Completes the head.

        Raises:
          ValueError: The status is not final.
        """
        status = self._parser.get_status_code()
        if status < 200:
            raise ValueError(f"its status is {status}")
        self._num_unparsed, self._keeps = 0, self._parser.should_keep_alive()
        self._head, self._headers = ResponseHead(status, self._headers), []

    def on_body(self, part: bytes) -> None:
        """Receives a part of the body."""
        self._num_unparsed = 0
        self._num_unread += len(part)
        self._parts.append(part)

    def on_message_complete(self) -> None:
        """Receives the end of the response."""
        self._num_unparsed, self._is_whole = 0, True


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
                    loop = asyncio.get_running_loop()
                    _, connection = await loop.create_connection(
                        Connection, self._name, self._port, ssl=self._tls
                    )
            except (OSError, TimeoutError) as error:
                raise ConnectError(str(error) or "no connection in time") from error
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
