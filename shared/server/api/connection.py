"""Client connections: HTTP/1.1, connection limit and timeouts."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import httptools
import uvicorn
from starlette.types import ASGIApp

from shared.process.logs import log
from shared.server.api.access_middleware import MAX_HEAD_BYTES, headers_too_large
from shared.server.api.exchange import HttpExchange, encoded_error
from shared.server.protocol.errors import ApiError

LINGER_S = 1.0
MAX_BACKLOG, MAX_SPARE = 1024, 64
MAX_PIPELINED = 64
"""Maximum requests of a connection that wait for the response to another one."""

LENGTH_HEADERS = (b"content-length", b"transfer-encoding")

IDLE_S = 75
"""Seconds until an idle connection is closed.

Client libraries keep theirs for 5 s, and proxies for 60 s. A shorter time would close connections
on which requests arrive.
"""

READ_TIMEOUT_S = 60.0  # for headers and body of a request together
WRITE_TIMEOUT_S = 60.0  # for a client to read part of the pending output


@dataclass
class ConnectionLimit:
    """Connection limit of a listener: `most` are served, `spare` more get an error.

    Excess connections get HTTP 503 and time to read it; beyond `spare` they are closed right after
    the response. File descriptors are reserved for them, because a process without a free
    descriptor cannot accept a connection at all.

    Attributes:
      most: Connections that are served.
      spare: Further connections that get an error and time to read it.
      backlog: New connections of a socket that are accepted at once, before one can be rejected.
      num_refused: Open connections that are not served.
    """

    most: int
    spare: int
    backlog: int
    num_refused: int = 0

    @classmethod
    def of(cls, descriptors: int, num_sockets: int) -> ConnectionLimit:
        """Divides a listener's file descriptors between its sockets and connections."""
        part = max(1, descriptors // 8)
        backlog, spare = max(1, min(MAX_BACKLOG, part // num_sockets)), min(MAX_SPARE, part)
        return cls(max(1, descriptors - num_sockets * backlog - spare), spare, backlog)


class HttpConfig(uvicorn.Config):
    """Uvicorn configuration with the application and the connection limit."""

    def __init__(self, app: ASGIApp, room: ConnectionLimit, grace_s: int) -> None:
        self.served, self.room = app, room
        super().__init__(
            app,
            http=HttpConnection,
            log_config=None,  # `logs.set_up` configures logging
            log_level="warning",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            ws="none",
            lifespan="off",
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=grace_s,
            backlog=room.backlog,
        )


class Timer:
    """Timer that can be started again."""

    _handle: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """True from the start of the timer until its end or the call of `stop`."""
        return self._handle is not None

    def start(self, seconds: float, action: Callable[[], None]) -> None:
        """Starts the timer, from the beginning if it is running."""
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(seconds, self._end, action)

    def stop(self) -> None:
        """Stops the timer if it is running."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _end(self, action: Callable[[], None]) -> None:
        self._handle = None
        action()


class HttpConnection(asyncio.Protocol):
    """HTTP/1.1 connection of a client, with the parser of httptools.

    uvicorn creates one for each accepted connection. It is closed when a request does not arrive in
    time, when the next one does not begin in time, and when the client does not read a response.
    The time of a response is not limited.
    """

    transport: asyncio.Transport

    def __init__(
        self, config: HttpConfig, server_state: Any, app_state: object, _loop: object = None
    ) -> None:
        self._config, self._state = config, server_state
        self._parser = httptools.HttpRequestParser(self)
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        self._idle, self._arrival, self._stall = Timer(), Timer(), Timer()
        self._exchanges: deque[HttpExchange] = deque()  # the first one is in progress
        self._parsed: HttpExchange | None = None  # the last request
        self._num_unparsed = 0  # bytes of an incomplete head, chunk size or trailer
        self._is_ending = self._is_refused = self._is_repeated = False

    # Protocol of asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the read timeout of the first request, or rejects the connection."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._state.connections.add(self)
        if len(self._state.connections) > self._config.room.most:
            self._refuse()
        else:
            self._look()

    def data_received(self, data: bytes) -> None:
        """Passes received data on, and updates the read timeout."""
        if self._is_ending:
            return
        self._idle.stop()
        self._num_unparsed += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            is_long = self._num_unparsed > MAX_HEAD_BYTES
            error = headers_too_large() if is_long else ApiError(400, "invalid HTTP request")
            self._end_with(error)
            return
        if self._num_unparsed > MAX_HEAD_BYTES:
            self._end_with(headers_too_large())
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends all exchanges and timers."""
        self._state.connections.discard(self)
        for timer in (self._idle, self._arrival, self._stall):
            timer.stop()
        self._config.room.num_refused -= self._is_refused
        self._leave()
        self._is_writable.set()
        del self._parser, self._parsed  # they refer to this object

    def pause_writing(self) -> None:
        """Starts the write timeout when the transport's buffer is full."""
        self._is_writable.clear()
        self._stall.start(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops the write timeout."""
        self._is_writable.set()
        self._stall.stop()

    def shutdown(self) -> None:
        """Closes the connection, after the response in progress; called by uvicorn."""
        if not self._exchanges:
            self.transport.close()
        else:
            self._exchanges[-1].keeps_alive = False

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        """Begins a request."""
        self._target, self._headers = b"", []

    def on_url(self, part: bytes) -> None:
        """Receives a part of the target."""
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        """Receives a header, or a trailer field."""
        self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Starts the request, after those before it.

        Raises:
          ValueError: A header is missing or repeated, or too many requests wait for others.
        """
        self._num_unparsed = 0
        if self._is_repeated:
            self._is_repeated = False
            return
        fields, self._headers = self._headers, []  # the parser adds trailer fields
        version = self._parser.get_http_version()
        num_hosts = sum(name == b"host" for name, _ in fields)
        if num_hosts > 1 or (not num_hosts and version == "1.1"):
            raise ValueError("the request requires one Host header (RFC 9112, 3.2)")
        if len(self._exchanges) > MAX_PIPELINED:
            raise ValueError("the client sends too many requests ahead")
        path, _, query = self._target.partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": version,
            "method": self._parser.get_method().decode(),
            "scheme": "http",
            "path": unquote(path.decode()),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": fields,
        }
        exchange = self._parsed = HttpExchange(
            scope,
            self._state.default_headers,
            self.transport,
            self._is_writable,
            self._on_end,
        )
        exchange.keeps_alive = version == "1.1" and self._parser.should_keep_alive()
        exchange.expects_continue = b"100-continue" in [
            value.lower() for name, value in fields if name == b"expect"
        ]
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._start()
        else:
            self.transport.pause_reading()

    def on_body(self, part: bytes) -> None:
        """Receives a part of the body."""
        assert self._parsed is not None
        self._num_unparsed = 0
        self._parsed.add(part)

    def on_message_complete(self) -> None:
        """Receives the end of a request."""
        assert self._parsed is not None
        self._num_unparsed = 0
        if not self._parser.should_upgrade():
            self._parsed.complete()

    def _parse(self, data: bytes) -> None:
        """Passes data to the parser.

        An upgrade is declined by a usual response. The parser ends such a request after its head,
        so it receives another head with the length of the body.
        """
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                assert self._parsed is not None
                self._is_repeated = True
                lengths = [b"%b: %b" % x for x in self._parsed.headers if x[0] in LENGTH_HEADERS]
                head = b"\r\n".join([b"POST / HTTP/1.1", *lengths, b"\r\n"])
                data = head + data[upgrade.args[0] :]

    def _start(self) -> None:
        running = self._exchanges[0].run(self._config.served)
        task = asyncio.get_running_loop().create_task(running)
        self._state.tasks.add(task)
        task.add_done_callback(self._state.tasks.discard)

    def _on_end(self) -> None:
        """Starts the next request or waits for it, after the last byte of a response."""
        done = self._exchanges.popleft()
        if not done.keeps_alive:
            self.transport.close()
        if self.transport.is_closing():
            return
        self.transport.resume_reading()
        if self._exchanges:
            self._start()
            self._look()
        else:
            self._idle.start(self._config.timeout_keep_alive, self.transport.close)

    def _look(self) -> None:
        """Starts the read timeout if a request is expected, and stops it if one has arrived."""
        is_expected = not self._exchanges or (
            len(self._exchanges) == 1 and not self._exchanges[0].is_whole
        )
        if not is_expected or self._is_ending:
            self._arrival.stop()
        elif not self._arrival.is_running:
            self._arrival.start(READ_TIMEOUT_S, self._give_up)

    def _leave(self) -> None:
        for each in self._exchanges:
            each.leave()
        self._exchanges.clear()

    def _refuse(self) -> None:
        room = self._config.room
        self._state.connections.discard(self)  # the set contains served connections
        message = f"connection limit reached ({room.most}); close connections or try again later"
        log.warning(message)
        error = ApiError(503, message, code="too_many_connections")
        if room.num_refused == room.spare:
            self.transport.write(encoded_error(error))
            self.transport.close()
            return
        room.num_refused += 1
        self._is_refused = True
        self._end_with(error)

    def _give_up(self) -> None:
        message = f"the request did not arrive within {READ_TIMEOUT_S:g} s"
        self._end_with(ApiError(408, message, code="request_timeout"))

    def _end_with(self, error: ApiError) -> None:
        """Sends a last response, unless another one has begun or precedes it."""
        if self._is_ending or self.transport.is_closing():
            return
        self._is_ending = True
        if self._exchanges and self._exchanges[-1].is_whole:
            self._exchanges[-1].keeps_alive = False  # the error is in the request after it
            return
        if len(self._exchanges) == 1:
            is_next = not self._exchanges[0].has_begun
        else:
            is_next = not self._exchanges and (self._parsed is None or self._parsed.is_whole)
        if is_next:
            self.transport.write(encoded_error(error))
        self._leave()
        # Closing while the client still sends would discard the response (RFC 9112, 9.6), so
        # incoming data is read and dropped for `LINGER_S`.
        self.transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self.transport.close)
