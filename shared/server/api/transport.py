"""ASGI parts below the routes: body size limit, disconnects, server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.server.api.connection import LINGER_S
from shared.server.engine_link.engine_errors import ClientLeft
from shared.server.protocol.errors import ApiError

MAX_BODY_BYTES = 8 << 20
MAX_DROPPED = 2 * MAX_BODY_BYTES  # read and dropped after a body is rejected


class ClientWork(Protocol):
    """Work for one HTTP request."""

    def client_left(self) -> None:
        """Ends the work because the client disconnected."""
        ...


class StreamedWork(ClientWork, Protocol):
    """Work with a streamed response."""

    def close(self) -> None:
        """Ends the work with the response."""
        ...


async def read_json(request: Request) -> bytes:
    """Reads the body of a request with a JSON content type.

    Without the check any web page in a local browser could send requests: browsers send plain text
    and forms across origins, but JSON only after a permitted CORS preflight.

    Raises:
      ApiError: The content type is not JSON, or the body is compressed or too long.
    """
    if int(request.headers.get("content-length", "0")) > MAX_BODY_BYTES:
        raise too_large()
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        message = f"content-type must be application/json, got {media_type!r:.60}"
        raise ApiError(415, message, code="unsupported_media_type")
    coding = request.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        message = f"content-encoding {coding!r:.60} is not supported; send plain JSON"
        raise ApiError(415, message, code="unsupported_media_type")
    return await request.body()


class BodyLimit:
    """Rejects a body that is too long as soon as its length is known.

    Closing while the client still sends would discard the response (RFC 9112, 9.6), so the rest of
    the body is read and dropped for `LINGER_S`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application with a `receive` that counts bytes."""
        seen, is_whole, is_refused = 0, False, False

        async def counted() -> Message:
            nonlocal seen, is_whole
            message = await receive()
            seen, is_whole = seen + len(message.get("body", b"")), not message.get("more_body")
            if seen > MAX_BODY_BYTES:
                raise too_large()
            return message

        async def answered(message: Message) -> None:
            nonlocal is_refused
            if message["type"] == "http.response.start":
                is_refused = message["status"] == 413 and not is_whole
            elif is_refused and not message.get("more_body"):
                await send({**message, "more_body": True})
                await _drop_rest(receive)
                message = {"type": "http.response.body"}
            await send(message)

        await self._app(scope, counted, answered)


async def _drop_rest(receive: Receive) -> None:
    """Reads and drops the rest of a body, within limits of time and size."""
    remaining = MAX_DROPPED
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LINGER_S):
            while remaining > 0 and (message := await receive()).get("more_body"):
                remaining -= len(message["body"])


class EventStream(Response):
    """Events of some work, by default server-sent events of a generation; the first event is
    computed before the status is sent.
    """

    def __init__(
        self,
        work: StreamedWork,
        events: AsyncIterator[bytes],
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(media_type=media_type)
        del self.headers["content-length"]
        self.headers["cache-control"] = "no-cache"
        self._work, self._events = work, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends events until the work ends or the client disconnects."""
        try:
            with watch_client(self._work, receive), contextlib.suppress(ClientLeft):
                await self._send_all(send)
        finally:
            self._work.close()

    async def _send_all(self, send: Send) -> None:
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        await send(start)
        async for event in self._events:
            await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


@contextlib.contextmanager
def watch_client(generation: ClientWork, receive: Receive) -> Iterator[None]:
    """Ends the work of a request when the client disconnects; frameworks do so for streams only."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        generation.client_left()

    task = asyncio.create_task(watch())
    try:
        yield
    finally:
        task.cancel()


def too_large() -> ApiError:
    """Returns the error for a body that is too long."""
    message = f"the body exceeds {MAX_BODY_BYTES} bytes"
    return ApiError(413, message, code="request_too_large")
