"""Forwarding of requests to replicas, with one retry before the first byte of the response.

Response bytes are forwarded as they arrive. The next bytes are read after the client's connection
has accepted the previous ones, so at most `upstream.READ_BYTES` of a response wait in this process,
besides the buffers of the two connections. When the client disconnects, the connection to the
server is closed at once.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from starlette.datastructures import Headers as HttpHeaders
from starlette.types import Receive, Scope, Send

from shared.process.logs import log
from shared.router.policy import prefix_keys
from shared.router.replicas import Replica, Replicas, ReplicaState, error_code
from shared.router.upstream import ConnectError, Connection, Headers, ResponseHead, UpstreamError
from shared.server.completions.serializer import StreamEvent
from shared.server.engine_link.body_thread import BodyParsingThread
from shared.server.protocol.errors import ApiError, is_anthropic
from shared.server.protocol.response_types import STREAM_END

MAX_TRIES = 2
RETRY_AFTER_S = 1
RETRIED_CODES = ("draining", "engine_lost")
"""Codes of responses with status 503 from a server that ends."""

EVENT_END = b"\n\n"
_SSE = b"text/event-stream"
_OF_CONNECTION = (b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade")
_NOT_SENT = {*_OF_CONNECTION, b"transfer-encoding", b"host", b"content-length", b"expect"}
_NOT_SENT |= {b"origin"}  # the router has the allowed origins
_NOT_RETURNED = {*_OF_CONNECTION, b"transfer-encoding", b"date", b"server"}


@dataclass
class Counters:
    """Counters of forwarded requests.

    Attributes:
      retries: Requests that were sent to a second replica.
      failures: Requests that ended with an error of the router, by the code of the error.
      disconnects: Requests aborted because the client disconnected.
    """

    retries: int = 0
    disconnects: int = 0
    failures: dict[str, int] = field(default_factory=dict)

    def fail(self, code: str) -> None:
        """Counts a request that ended with an error of the router."""
        self.failures[code] = self.failures.get(code, 0) + 1


class Forwarder:
    """Forwards requests to replicas.

    Attributes:
      counters: Counts of all requests.
    """

    def __init__(self, replicas: Replicas) -> None:
        self.counters = Counters()
        self._replicas, self._work = replicas, BodyParsingThread()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forwards a request.

        Raises:
          ApiError: No replica can serve it, and nothing was sent to the client.
        """
        body = await _whole_body(receive)
        if body is None:
            return
        keys = await self._work.do(len(body), _keys, body) if body else []
        exchange = _Exchange(scope, body, send)
        watch = asyncio.create_task(exchange.watch_client(receive))
        try:
            await self._forward(exchange, keys)
        except ApiError as error:
            self.counters.fail(error.code or "")
            raise
        finally:
            watch.cancel()
        self.counters.disconnects += exchange.has_left

    async def _forward(self, exchange: _Exchange, keys: Sequence[bytes]) -> None:
        tried: list[Replica] = []
        reason = "none is ready"
        while len(tried) < MAX_TRIES:
            replica = self._replicas.choose(keys, tried)
            if replica is None:
                break
            self.counters.retries += bool(tried)
            tried.append(replica)
            replica.num_open += 1
            replica.num_requests += 1
            try:
                is_last = len(tried) == MAX_TRIES or len(self._replicas.ready) == 1
                await exchange.run(replica, is_last)
                return
            except UpstreamError as error:
                if exchange.has_left:
                    return
                reason = str(error)
                if isinstance(error, ConnectError):
                    self._replicas.mark_down(replica, reason)
                log.warning("replica %s failed a request: %s", replica.name, reason)
                if exchange.has_begun:
                    self.counters.fail("replica_lost")
                    await exchange.end_with_error()
                    return
            finally:
                replica.num_open -= 1
        if tried:
            message = f"the replica failed before its response began ({reason}); send it again"
            raise ApiError(502, message, code="replica_lost", retry_after_s=RETRY_AFTER_S)
        message = "no replica is ready; try again later"
        raise ApiError(503, message, code="no_replica", retry_after_s=RETRY_AFTER_S)


class _Exchange:
    """A request, and its response to the client.

    Attributes:
      has_begun: True if a byte of the response was sent to the client.
      has_left: True if the client has disconnected.
    """

    def __init__(self, scope: Scope, body: bytes, send: Send) -> None:
        self._method, self._body, self._send = scope["method"].encode(), body, send
        query = scope["query_string"]
        self._target = scope["raw_path"] + (b"?" + query if query else b"")
        self._headers = [field for field in scope["headers"] if field[0] not in _NOT_SENT]
        if body or self._method == b"POST":
            self._headers.append((b"content-length", str(len(body)).encode()))
        self._connection: Connection | None = None
        self._scope = scope
        self._is_stream = self.has_begun = self.has_left = False

    async def watch_client(self, receive: Receive) -> None:
        """Closes the connection to the server when the client disconnects."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.has_left = True
        if self._connection is not None:
            self._connection.abort()

    async def run(self, replica: Replica, is_last: bool) -> None:
        """Sends the request to a replica and its response to the client.

        Args:
          replica: The replica.
          is_last: A response that the replica ends is sent to the client, too.

        Raises:
          UpstreamError: The replica failed.
        """
        connection, head = await self._response(replica)
        try:
            data, is_whole = await connection.data()
            if not is_last and head.status == 503 and error_code(data) in RETRIED_CODES:
                replica.state = ReplicaState.DRAINING
                raise UpstreamError("the server is shutting down")
            await self._start(head)
            rest = b""
            while not is_whole:
                data, rest = self._complete(rest + data)
                await self._send_body(data, True)
                data, is_whole = await connection.data()
            await self._send_body(rest + data, False)
        finally:
            self._connection = None
            replica.pool.give_back(connection)

    async def _response(self, replica: Replica) -> tuple[Connection, ResponseHead]:
        """Sends the request and returns the head of the response.

        A server may close an idle connection while a request is sent on it, so a reused connection
        that fails is replaced by a new one.
        """
        connection = await replica.pool.take()
        while True:
            self._connection = connection
            try:
                if self.has_left:
                    raise UpstreamError("the client disconnected")
                headers = [(b"host", replica.pool.host), *self._headers]
                connection.send(self._method, self._target, headers, self._body)
                return connection, await connection.response()
            except BaseException as error:
                self._connection = None
                replica.pool.give_back(connection)
                is_stale = isinstance(error, UpstreamError) and connection.is_reused
                if not is_stale or self.has_left or replica.state is ReplicaState.DOWN:
                    raise
            connection = await replica.pool.take(fresh=True)

    async def _start(self, head: ResponseHead) -> None:
        headers: Headers = [field for field in head.headers if field[0] not in _NOT_RETURNED]
        self._is_stream = any(
            name == b"content-type" and value.startswith(_SSE) for name, value in headers
        )
        self.has_begun = True
        await self._send({"type": "http.response.start", "status": head.status, "headers": headers})

    def _complete(self, data: bytes) -> tuple[bytes, bytes]:
        """Returns the bytes to send, and the beginning of an incomplete event of a stream.

        An error event can follow a complete event only.
        """
        if not self._is_stream or data.endswith(EVENT_END):
            return data, b""
        end = data.rfind(EVENT_END) + len(EVENT_END)
        return (data[:end], data[end:]) if end >= len(EVENT_END) else (b"", data)

    async def _send_body(self, data: bytes, more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def end_with_error(self) -> None:
        """Ends a begun response: a stream with an error event, any other by closing it.

        Raises:
          ApiError: The response is no stream; its connection is closed before the end of the body.
        """
        message = "the replica was lost during the response; send the request again"
        error = ApiError(502, message, code="replica_lost")
        if not self._is_stream:
            raise error
        if is_anthropic(self._scope["path"], HttpHeaders(scope=self._scope)):
            events = [StreamEvent(error.to_anthropic_json(), "error")]
        else:
            events = [StreamEvent(error.to_json()), StreamEvent(STREAM_END)]
        await self._send_body(b"".join(each.encode() for each in events), False)


async def _whole_body(receive: Receive) -> bytes | None:
    """Returns the body of a request; None if the client disconnected before its end."""
    parts = []
    while (message := await receive())["type"] == "http.request":
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)
    return None


def _keys(body: bytes) -> list[bytes]:
    """Returns the prefixes of a body; none if it is not a JSON object, which the server rejects."""
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return []
    return prefix_keys(fields) if isinstance(fields, dict) else []
