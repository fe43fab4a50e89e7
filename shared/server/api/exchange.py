"""A request of a connection and its response, by the interface of ASGI."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from http import HTTPStatus

from starlette.types import ASGIApp, Message, Scope

from shared.process.logs import log
from shared.server.protocol.errors import ApiError

MAX_UNREAD_BYTES = 1 << 16
"""Bytes of a body that wait for the application; reading pauses beyond them."""

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_STATUS = {each.value: f"{each.value} {each.phrase}".encode() for each in HTTPStatus}
_INVALID = re.compile(rb"[\0-\x08\x0a-\x1f\x7f]")
_WITHOUT_BODY = (204, 304)

Headers = Sequence[tuple[bytes, bytes]]


class HttpExchange:
    """A request and its response.

    The head of a response is written with its first data: two writes would wake the client twice
    before the first event of a stream.

    Args:
      scope: Scope of the request.
      fields: Headers of every response.
      transport: Transport of the connection.
      is_writable: Set while the transport's buffer is not full.
      on_end: Called after the last byte of the response.

    Attributes:
      headers: Headers of the request.
      keeps_alive: False if the connection is closed after the response.
      expects_continue: True if the client waits for "100 Continue" before it sends the body.
      is_whole: True after the last byte of the request.
      has_begun: True if the application has begun the response.
      is_over: True after the last byte of the response, or if the client has disconnected.
    """

    def __init__(
        self,
        scope: Scope,
        fields: Headers,
        transport: asyncio.Transport,
        is_writable: asyncio.Event,
        on_end: Callable[[], None],
    ) -> None:
        self.keeps_alive, self.expects_continue = True, False
        self.is_whole = self.has_begun = self.is_over = False
        self.headers, self._scope, self._fields = scope["headers"], scope, fields
        self._transport, self._on_end = transport, on_end
        self._is_writable, self._changed = is_writable, asyncio.Event()
        self._unread, self._head = bytearray(), b""
        self._has_body = self._is_chunked = False
        self._left: int | None = None  # of a response with a known length

    async def run(self, app: ASGIApp) -> None:
        """Runs the application; closes the connection if it has not completed the response."""
        try:
            await app(self._scope, self.receive, self.send)
            if not self.is_over:
                log.error("the application has not completed a response")
        except (Exception, asyncio.CancelledError):
            log.exception("the application failed on a request")
        if not self.is_over:
            if not self.has_begun:
                self._transport.write(encoded_error(ApiError(500, "internal error")))
            self._transport.close()

    def add(self, body: bytes) -> None:
        """Receives a part of the body; the part is dropped after the response."""
        self.expects_continue = False
        if not self.is_over:
            self._unread += body
            if len(self._unread) > MAX_UNREAD_BYTES:
                self._transport.pause_reading()
            self._changed.set()

    def complete(self) -> None:
        """Receives the end of the request."""
        self.is_whole = True
        self._changed.set()

    def leave(self) -> None:
        """Ends the exchange because the client disconnected."""
        self.is_over = True
        self._changed.set()

    async def receive(self) -> Message:
        """Returns the next part of the body, or later the end of the exchange."""
        if self.expects_continue and not self.is_over:
            self._transport.write(CONTINUE)
            self.expects_continue = False
        if not self.is_over:
            self._transport.resume_reading()
            await self._changed.wait()
            self._changed.clear()
        if self.is_over:
            return {"type": "http.disconnect"}
        body, self._unread = bytes(self._unread), bytearray()
        return {"type": "http.request", "body": body, "more_body": not self.is_whole}

    async def send(self, message: Message) -> None:
        """Sends the next part of the response, when the client has read enough of the others."""
        if not self._is_writable.is_set():
            await self._is_writable.wait()
        if self.is_over:
            return
        if message["type"] == "http.response.start":
            self._start(message["status"], message.get("headers", ()))
        else:
            self._send_body(message.get("body", b""), message.get("more_body", False))

    def _start(self, status: int, headers: Headers) -> None:
        lines, names = [b"HTTP/1.1 " + _STATUS.get(status, b"%d " % status)], {}
        for name, value in (*self._fields, *headers):
            line = b"%b: %b" % (name, value)
            if _INVALID.search(line):
                raise ValueError(f"the header {name!r} is invalid")
            names[name.lower()] = value
            lines.append(line)
        if b"close" in names.get(b"connection", b"").lower():
            self.keeps_alive = False
        has_body = self._scope["method"] != "HEAD" and status not in _WITHOUT_BODY
        if has_body and b"content-length" in names:
            self._left = int(names[b"content-length"])
        elif has_body and self._scope["http_version"] == "1.1":
            self._is_chunked = True
            lines.append(b"transfer-encoding: chunked")
        if not self.keeps_alive and b"connection" not in names:
            lines.append(b"connection: close")
        self.has_begun, self.expects_continue = True, False
        self._has_body, self._head = has_body, b"\r\n".join(lines) + b"\r\n\r\n"

    def _send_body(self, data: bytes, more: bool) -> None:
        if not self._has_body:
            data = b""
        elif self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            data += b"" if more else b"0\r\n\r\n"
        elif self._left is not None:
            self._left -= len(data)
            if self._left < 0 or (self._left and not more):
                raise ValueError("a response differs from its content-length")
        if data or not more:
            self._transport.write(self._head + data)
            self._head = b""
        if not more:
            self.is_over = True
            self._changed.set()
            self._on_end()


def encoded_error(error: ApiError) -> bytes:
    """Returns a complete response with an error, after which the connection is closed."""
    body = json.dumps(error.to_json()).encode()
    fields = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close"
    return b"HTTP/1.1 %b\r\n%b\r\n\r\n%b" % (_STATUS[error.status], fields.encode(), body)
