"""Slow readers: limits of memory and time, without effect on other clients.

The test simulates the engine and sends tokens as fast as the server reads them. The client is a
real socket that stops reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
import uvicorn

from shared.engine.checks import RequestLimits
from shared.engine.request import Event
from shared.process.ipc_messages import FrameReader, event_to_row, pack
from shared.server.api import connection
from shared.server.api.app import make_apps
from shared.server.api.connection import ConnectionLimit, HttpConfig
from shared.server.completions.grammars import GrammarChecks
from shared.server.engine_link import submission
from shared.server.engine_link.engine_client import EngineClient
from tests.support.engine_info import facts_of
from tests.support.http_fixtures import COMPLETIONS, post_head

MOST_UNREAD = 64
STALL_S = 0.5
BUFFER = 4096  # socket buffers, which the kernel doubles
FLOOD = 6000  # steps: 1.5 MB of events
LIMITS = RequestLimits(
    context_length=1 << 20,
    max_request_tokens=1 << 20,
    vocab_size=1000,
    max_stop_token_ids=4,
    max_logit_bias_entries=4,
    max_logprobs=5,
)
FACTS = facts_of(LIMITS, model_name="flood")


@dataclass
class Engine:
    """Simulated engine: its end of the socket, and the received messages."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    added: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    _has_added: asyncio.Event = field(default_factory=asyncio.Event)

    async def listen(self) -> None:
        frames = FrameReader()
        while received := await self.reader.read(1 << 16):
            for kind, *fields in frames.feed(received):
                if kind == "add":
                    self.added += [request for request, _ in fields[2]]
                    self._has_added.set()
                elif kind == "abort":
                    self.aborted.append(fields[0])

    async def flood(self, steps: int, pause_s: float = 0.0) -> None:
        """Sends one token a step to every open request."""
        await self._has_added.wait()
        for step in range(steps):
            open_ones = [request for request in self.added if request not in self.aborted]
            if not open_ones:
                return
            rows = [event_to_row(Event(r, [step % 900], 0, None, None, None)) for r in open_ones]
            self.writer.write(pack(["step", rows]))
            await self.writer.drain()
            await asyncio.sleep(pause_s)


@dataclass
class Served:
    """Server in this process with a simulated engine."""

    engine: Engine
    client: EngineClient
    server: uvicorn.Server
    address: tuple[str, int]


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[Served]:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    writer.write(pack(FACTS.to_message()))
    engine = Engine(reader, writer)
    client = await EngineClient.connect(theirs)
    app = make_apps(
        client, None, None, None, GrammarChecks(FACTS), (), has_admin_listener=False
    ).clients
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        running = uvicorn.Server(HttpConfig(app, ConnectionLimit.of(500, 1), 1))
        tasks = [asyncio.create_task(running.serve([listener]))]
        tasks.append(asyncio.create_task(engine.listen()))
        while not running.started:
            await asyncio.sleep(0.01)
        try:
            yield Served(engine, client, running, listener.getsockname()[:2])
        finally:
            running.should_exit = True
            await tasks[0]
            tasks[1].cancel()
            writer.close()


def ask(address: tuple[str, int], **fields: object) -> socket.socket:
    """Requests a stream and returns its socket, which has a small receive buffer."""
    asking = socket.socket()
    asking.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    asking.connect(address)
    body = {"prompt": [1, 2], "max_tokens": 1 << 18, "stream": True, "return_token_ids": True}
    sent = json.dumps({**body, **fields}).encode()
    asking.sendall(post_head(COMPLETIONS, len(sent)) + sent)
    asking.setblocking(False)
    return asking


async def read_to_end(asking: socket.socket) -> bytes:
    loop, got = asyncio.get_running_loop(), b""
    with contextlib.suppress(ConnectionResetError):
        while part := await asyncio.wait_for(loop.sock_recv(asking, 1 << 16), 60):
            got += part
    return got


@pytest.fixture(autouse=True)
def small_bounds(monkeypatch):
    monkeypatch.setattr(submission, "MAX_UNREAD_EVENTS", MOST_UNREAD)
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", STALL_S)


@pytest.mark.parametrize("choices", [1, 3])
def test_stalled_client_is_aborted_within_unread_limit(choices):
    asyncio.run(_does_not_read(choices))


async def _does_not_read(choices: int) -> None:
    async with served() as here:
        with ask(here.address, n=choices) as asking:
            unread: list[int] = []
            flood = asyncio.create_task(here.engine.flood(FLOOD))
            while not flood.done():
                await asyncio.sleep(0.001)
                unread += [s._queue.qsize() for s in set(here.client._submissions.values())]
            await flood
            assert max(unread) <= MOST_UNREAD * choices
            assert sorted(here.engine.aborted) == here.engine.added
            assert here.client.is_idle
            # Transport and socket buffers fill up, then the connection is closed.
            began = time.monotonic()
            while here.server.server_state.connections:
                assert time.monotonic() - began < 60
                await asyncio.sleep(0.05)
            got = await read_to_end(asking)
            assert len(got) < (1 << 16) + 16 * BUFFER + (1 << 15)
            assert b"[DONE]" not in got


def test_slow_reader_that_catches_up_receives_all(monkeypatch):
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 60)
    asyncio.run(_catches_up())


async def _catches_up() -> None:
    async with served() as here:
        with ask(here.address, max_tokens=400) as asking:
            flood = asyncio.create_task(here.engine.flood(400, pause_s=0.002))
            got, loop = b"", asyncio.get_running_loop()
            while got.count(b'"token_ids":[') < 400:
                got += await asyncio.wait_for(loop.sock_recv(asking, 2048), 60)
                await asyncio.sleep(0.002)
            await flood
            assert not here.engine.aborted
            assert b"slow_reader" not in got


def test_slow_client_receives_error_after_abort(monkeypatch):
    monkeypatch.setattr(connection, "WRITE_TIMEOUT_S", 60)
    got = asyncio.run(_reads_too_late())
    assert b'"code":"slow_reader"' in got
    assert got.rstrip().endswith((b"[DONE]", b"0"))


async def _reads_too_late() -> bytes:
    async with served() as here:
        with ask(here.address, max_tokens=FLOOD) as asking:
            await here.engine.flood(FLOOD)
            assert here.engine.aborted
            reading = asyncio.create_task(read_to_end(asking))
            await asyncio.sleep(0.5)
            asking.shutdown(socket.SHUT_WR)
            return await reading


def test_stalled_client_does_not_block_other_requests():
    asyncio.run(_beside())


async def _beside() -> None:
    async with served() as here:
        with ask(here.address) as silent:
            flood = asyncio.create_task(here.engine.flood(FLOOD))
            reader, writer = await asyncio.open_connection(*here.address)
            writer.write(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            answer = await asyncio.wait_for(reader.read(), 60)
            assert answer.startswith(b"HTTP/1.1 200 ")
            writer.close()
            await flood
            assert silent.fileno() != -1
