"""Client connections: connection limit and read timeouts."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from shared.process.logs import log
from shared.server.api.access_middleware import MAX_HEAD_BYTES, headers_too_large
from shared.server.protocol.errors import ApiError

LINGER_S = 1.0
MAX_BACKLOG, MAX_SPARE = 1024, 64
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
    """Uvicorn configuration with the connection limit."""

    def __init__(self, app: ASGIApp, room: ConnectionLimit, grace_s: int) -> None:
        self.room = room
        super().__init__(
            app,
            http=TimeoutConnection,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            log_config=None,  # `logs.set_up` configures logging
            log_level="warning",
            access_log=False,
            server_header=False,  # h11 checks each header of a response three times
            ws="none",
            lifespan="off",
            timeout_graceful_shutdown=grace_s,
            backlog=room.backlog,
        )


class ResponseConnection(h11.Connection):
    """HTTP state of a connection, which returns the head of a response with its first data.

    Two writes would wake the client twice before the first event of a stream.
    """

    _head = b""

    def send(self, event: h11.Event) -> bytes | None:
        """Returns the bytes to send for an event; none for the head of a response."""
        data = super().send(event)
        if isinstance(event, h11.Response):
            self._head = data or b""
            return b""
        head, self._head = self._head, b""
        return head + data if head and data is not None else data


class TimeoutConnection(H11Protocol):
    """HTTP connection that closes when a request does not arrive in time.

    uvicorn limits only the time between two requests (`timeout_keep_alive`): a client that sends
    nothing or half of a request would hold its connection forever. The time of a response is not
    limited, but a client that does not read it loses its connection.
    """

    _end: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _is_ending = _is_refused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Starts the read timeout of the first request, or rejects the connection."""
        assert isinstance(transport, asyncio.Transport)
        super().connection_made(transport)
        self.conn = ResponseConnection(h11.SERVER, MAX_HEAD_BYTES)
        if len(self.connections) > self._room.most:
            self._refuse()
        else:
            self._look()

    def data_received(self, data: bytes) -> None:
        """Passes received data on, and updates the read timeout."""
        if not self._is_ending:
            super().data_received(data)
            self._look()

    def on_response_complete(self) -> None:
        """Starts the read timeout of the next request."""
        super().on_response_complete()
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops all timers."""
        self._stop()
        self._end_stall()
        self._room.num_refused -= self._is_refused
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Starts the write timeout when the transport's buffer is full."""
        super().pause_writing()
        self._end_stall()
        self._stall = self.loop.call_later(WRITE_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        """Stops the write timeout."""
        super().resume_writing()
        self._end_stall()

    def _end_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        self._stall = None

    def _look(self) -> None:
        """Starts the read timeout if a request is expected, and stops it if one has arrived."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop()
        elif self._end is None:
            self._end = self.loop.call_later(READ_TIMEOUT_S, self._give_up)

    def _stop(self) -> None:
        if self._end is not None:
            self._end.cancel()
        self._end = None

    @property
    def _room(self) -> ConnectionLimit:
        assert isinstance(self.config, HttpConfig)
        return self.config.room

    def _refuse(self) -> None:
        self.connections.discard(self)  # the set contains served connections
        message = (
            f"connection limit reached ({self._room.most}); close connections or try again later"
        )
        log.warning(message)
        error = ApiError(503, message, code="too_many_connections")
        if self._room.num_refused == self._room.spare:
            self.transport.write(_written(error))
            self.transport.close()
            return
        self._room.num_refused += 1
        self._is_refused = True
        self._end_with(error)

    def _give_up(self) -> None:
        message = f"the request did not arrive within {READ_TIMEOUT_S:g} s"
        self._end_with(ApiError(408, message, code="request_timeout"))

    def send_400_response(self, msg: str) -> None:
        """Responds to an invalid request, for example with headers that are too long."""
        unread, _ = self.conn.trailing_data
        is_long = len(unread) > MAX_HEAD_BYTES
        self._end_with(headers_too_large() if is_long else ApiError(400, "invalid HTTP request"))

    def _end_with(self, error: ApiError) -> None:
        """Sends a last response unless one is being sent; h11 would not write it in every state."""
        if self._is_ending or self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.write(_written(error))
        # Closing while the client still sends would discard the response (RFC 9112, 9.6), so
        # incoming data is read and dropped for `LINGER_S`.
        self._is_ending = True
        self.transport.write_eof()
        self.loop.call_later(LINGER_S, self.transport.close)


def _written(error: ApiError) -> bytes:
    body = json.dumps(error.to_json()).encode()
    fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
    return (
        f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n{fields}\r\n\r\n".encode()
        + body
    )
