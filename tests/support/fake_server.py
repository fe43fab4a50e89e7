"""A server without a model: streams numbered events at a given pace, with faults on request.

`python -m tests.support.fake_server FLAG ...` serves on `--port` of a server's command line, or
starts the router and servers of `--replicas`. Fields of a request choose its behaviour:
`max_tokens` events, `pace_s` seconds before each of them, `gate` the file that must exist before
the second one, `cut_at` the event before which the connection breaks, `exit_at` the one before
which the process ends, `status` of the response.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import h11

from shared.options.command_line import parse
from shared.process.launch import launch

MODEL = "fake"
DRAIN_LOOK_S = 0.02
FATAL = "exit 2"
"""Value of `--served-model-name` with which the server does not accept its configuration."""


class FakeServer:
    """The server.

    Attributes:
      url: Where it is served.
      bodies, headers: Bodies and headers of received requests.
      num_left: Requests aborted because the client closed the connection.
      num_open: Requests in progress.
      health: Status of `/health`; 0 for no response.
      drains: True if requests get the error "draining".
    """

    def __init__(self) -> None:
        self.url, self.health, self.drains = "", 200, False
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.num_left = self.num_open = 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves the requests of one connection."""
        http = h11.Connection(h11.SERVER)
        try:
            while True:
                request, body = await _request(http, reader)
                self.num_open += request.method == b"POST"
                try:
                    await self._answer(http, writer, request, body)
                except OSError:
                    self.num_left += 1
                    raise
                finally:
                    self.num_open -= request.method == b"POST"
                http.start_next_cycle()
        except (OSError, h11.ProtocolError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.transport.abort()

    async def _answer(
        self, http: h11.Connection, writer: asyncio.StreamWriter, request: h11.Request, body: bytes
    ) -> None:
        path = request.target.partition(b"?")[0]
        if request.method == b"POST":
            fields = json.loads(body)
            self.bodies.append(fields)
            self.headers.append(dict(request.headers))
            if self.drains:
                await _whole(http, writer, 503, {"error": {"code": "draining"}})
            elif fields.get("stream"):
                await self._stream(http, writer, fields)
            else:
                await asyncio.sleep(fields.get("pace_s", 0))
                await _whole(http, writer, fields.get("status", 200), {"echo": fields})
        elif path in (b"/health", b"/live"):
            while self.health == 0:
                await asyncio.sleep(DRAIN_LOOK_S)
            code = {"error": {"code": "draining" if self.drains else "engine_lost"}}
            await _whole(http, writer, 503 if self.drains else self.health, code)
        elif path == b"/metrics":
            text = "# HELP tandem:x_total x\n# TYPE tandem:x_total counter\ntandem:x_total 1.0\n"
            await _whole(http, writer, 200, text)
        elif path.startswith(b"/v1/requests/"):
            has = path.split(b"/")[3].decode() == self.url.rpartition(":")[2]
            await _whole(http, writer, 200 if has else 404, {"id": self.url})
        else:
            card = {"id": MODEL, "url": self.url}
            await _whole(http, writer, 200, {"data": [card], "port": self.url, "limits": {"n": 1}})

    async def _stream(
        self, http: h11.Connection, writer: asyncio.StreamWriter, fields: dict[str, Any]
    ) -> None:
        headers = [("content-type", "text/event-stream"), ("transfer-encoding", "chunked")]
        head = http.send(h11.Response(status_code=200, headers=headers)) or b""
        if not fields.get("pace_s"):
            writer.write(head)
        for number in range(fields.get("max_tokens", 4)):
            while number and "gate" in fields and not os.path.exists(fields["gate"]):
                await asyncio.sleep(DRAIN_LOOK_S)
            if number == fields.get("exit_at"):
                os._exit(9)
            if number == fields.get("cut_at"):
                writer.transport.abort()
            if pace := fields.get("pace_s", 0):
                await asyncio.sleep(pace)
                if not number:
                    writer.write(head)  # with the first event, as a server does
            if writer.is_closing():
                raise ConnectionError
            event = {"choices": [{"index": 0, "text": f"{number} " + "x" * fields.get("pad", 0)}]}
            data = f"data: {json.dumps(event)}\n\n".encode()
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))  # h11 would take most of the time
            await writer.drain()
        writer.write(http.send(h11.Data(b"data: [DONE]\n\n")) or b"")
        writer.write(http.send(h11.EndOfMessage()) or b"")
        await writer.drain()


async def _request(http: h11.Connection, reader: asyncio.StreamReader) -> tuple[h11.Request, bytes]:
    """Returns the next request of a connection with its body."""
    request, body = None, b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(1 << 16))
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            assert request is not None
            return request, body
        else:
            raise ConnectionError


async def _whole(
    http: h11.Connection, writer: asyncio.StreamWriter, status: int, content: Any
) -> None:
    body = (content if isinstance(content, str) else json.dumps(content)).encode()
    headers = [("content-type", "application/json"), ("content-length", str(len(body)))]
    out = http.send(h11.Response(status_code=status, headers=headers)) or b""
    out += http.send(h11.Data(body)) or b""
    writer.write(out + (http.send(h11.EndOfMessage()) or b""))
    await writer.drain()


@asynccontextmanager
async def fake_servers(count: int):
    """Serves several fake servers in this process."""
    servers, sockets = [FakeServer() for _ in range(count)], []
    for each in servers:
        listener = await asyncio.start_server(each.handle, "127.0.0.1", 0)
        each.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        sockets.append(listener)
    try:
        yield servers
    finally:
        for listener in sockets:
            listener.close()


async def serve(host: str, port: int) -> None:
    """Serves until SIGTERM, and then until no request is open; SIGINT ends at once."""
    fake, end = FakeServer(), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, end.set)
    listener = await asyncio.start_server(fake.handle, host, port)
    fake.url = f"http://{host}:{listener.sockets[0].getsockname()[1]}"
    print(f"{MODEL} is served at {fake.url}", flush=True)
    await end.wait()
    fake.drains = True
    while fake.num_open:
        await asyncio.sleep(DRAIN_LOOK_S)


def main(argv: Sequence[str]) -> int:
    """Serves on the port of a server's command line."""
    options = parse(argv)
    if options.router.replicas > 1:
        return launch(argv, dict, serve_module="tests.support.fake_server")
    if options.server.served_model_name == FATAL:
        return 2
    asyncio.run(serve(options.server.host, options.server.port))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
