"""HTTP server process: listeners, startup and shutdown."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module

import uvicorn
from starlette.types import ASGIApp

from shared.process import descriptors, gc_freeze, logs
from shared.process.address import Listeners
from shared.process.logs import log
from shared.server.api.admin import load_start_corpus
from shared.server.api.app import make_apps
from shared.server.api.connection import ConnectionLimit, HttpConfig
from shared.server.completions.chat_renderer import Renderer
from shared.server.completions.grammars import GrammarChecks
from shared.server.completions.image_decoder_pool import ImageDecoderPool
from shared.server.engine_link.engine_client import End, EngineClient
from shared.server.engine_link.engine_errors import EngineLost
from shared.server.engine_link.request_end import ClosableWatcher
from shared.text.tokenizer import Tokenizer

GRACE_S = 1  # for open responses to send an error after the engine has exited
ADMIN_SHARE = 8  # 1 / ADMIN_SHARE of the connections is reserved for the admin listener
MAX_WAITING = 2048  # listen backlog of the kernel
DRAIN_LOOK_S = 0.05
HARD_END_S = 3.0  # after which the process exits even if a thread hangs
EXIT_FAILED = 1
EXIT_REFUSED = 2


class HttpServer(uvicorn.Server):
    """Uvicorn server without signal handlers, with a callback when it listens."""

    def __init__(
        self, app: ASGIApp, room: ConnectionLimit, grace_s: int, on_start: Callable[[], None]
    ) -> None:
        super().__init__(HttpConfig(app, room, grace_s))
        self._on_start = on_start

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signal handlers as they are."""
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, and calls `on_start`."""
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(MAX_WAITING)  # asyncio's backlog also limits accepts per wake-up
        self._on_start()


class Service:
    """HTTP server with its listeners and workers, for one engine."""

    def __init__(
        self, client: EngineClient, tokenizer: Tokenizer | None, listeners: Listeners
    ) -> None:
        facts, templates = client.facts, tokenizer.templates if tokenizer else None
        self._client, self._listeners = client, listeners
        grammars, renderer = GrammarChecks(facts), Renderer(templates) if templates else None
        opener = ImageDecoderPool(facts.images) if facts.images else None
        self._workers = [each for each in (grammars, renderer, opener) if each is not None]
        self._tracing = _tracing(facts.observing.otlp_traces_endpoint)
        watchers = (self._tracing,) if self._tracing else ()
        has_admin = bool(listeners.admin)
        apps = make_apps(client, tokenizer, renderer, opener, grammars, watchers, has_admin)
        rooms = connection_limits(listeners)
        self._servers = [
            HttpServer(app, room, GRACE_S, self._greet)
            for app, room in zip((apps.clients, apps.admin), rooms, strict=True)
            if app is not None
        ]

    async def run(self) -> None:
        """Serves until the engine has ended."""
        self._client.ended.add_done_callback(lambda _: self._shut_down())
        drain = asyncio.create_task(self._drain())
        sockets = (self._listeners.clients, self._listeners.admin)
        await asyncio.gather(
            *(
                server.serve(listening)
                for server, listening in zip(self._servers, sockets, strict=False)
            )
        )
        drain.cancel()
        for each in self._workers:
            await each.close()
        if self._tracing:
            self._tracing.close()

    async def _drain(self) -> None:
        """Reports to the engine when no request is open after a drain has started."""
        await self._client.drains.wait()
        logs.info("draining: new requests are rejected")
        while not self._client.is_idle or any(each.server_state.tasks for each in self._servers):
            await asyncio.sleep(DRAIN_LOOK_S)
        self._client.drained()

    def _shut_down(self) -> None:
        for server in self._servers:
            server.should_exit = True
        for each in self._workers:
            each.end()
        timer = threading.Timer(HARD_END_S, os._exit, [EXIT_FAILED])
        timer.daemon = True
        timer.start()

    def _greet(self) -> None:
        if not all(server.started for server in self._servers):
            return
        model = self._client.facts.model_name
        clients, admin = map(urls_of, (self._listeners.clients, self._listeners.admin))
        message = f"{model} is served at {' and '.join(clients)}"
        if admin:
            message += f", metrics and admin routes at {' and '.join(admin)}"
        logs.log_always(message)


def connection_limits(listeners: Listeners) -> tuple[ConnectionLimit, ConnectionLimit]:
    """Returns the connection limits; the admin listener stays reachable when clients use theirs."""
    num_free, clients, admin = descriptors.num_free(), len(listeners.clients), len(listeners.admin)
    admins = num_free // ADMIN_SHARE if admin else 0
    return ConnectionLimit.of(num_free - admins, clients), ConnectionLimit.of(admins, max(1, admin))


def _tracing(endpoint: str | None) -> ClosableWatcher | None:
    if endpoint is None:
        return None
    # The packages are an optional extra; startup has checked that they are installed.
    return import_module("shared.server.api.tracing").Tracing.to_collector(endpoint)


def urls_of(listeners: Sequence[socket.socket]) -> list[str]:
    """Returns the URL of each listening socket."""
    names = (listener.getsockname()[:2] for listener in listeners)
    return [f"http://[{h}]:{p}" if ":" in h else f"http://{h}:{p}" for h, p in names]


async def serve(
    connection: socket.socket, last_word: socket.socket, listeners: Listeners, engine_pid: int
) -> int:
    """Serves until the engine ends; returns the exit code."""
    try:
        client = await EngineClient.connect(connection, last_word)
        logs.set_up(client.facts.observing)
        tokenizer = client.facts.tokenizer()
        await load_start_corpus(client, tokenizer)
    except (EngineLost, ValueError) as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_REFUSED if isinstance(error, ValueError) else EXIT_FAILED
    client.ended.add_done_callback(lambda ended: _end_frozen(ended.result(), engine_pid))
    service = Service(client, tokenizer, listeners)
    gc_freeze.freeze_gc()
    await service.run()
    end = client.ended.result()
    log.log(
        logging.ERROR if end.failed else logging.INFO,
        "the HTTP server is shutting down: %s",
        end.reason,
    )
    return EXIT_FAILED if end.failed else 0


def _end_frozen(end: End, engine_pid: int) -> None:
    """Kills a frozen engine process."""
    if end.is_frozen and os.getppid() == engine_pid:
        log.error("%s; killing it", end.reason)
        os.kill(engine_pid, signal.SIGKILL)


def main() -> int:
    """Entry of `python -m shared.server.api.service`, which the engine's process starts."""
    engine_pid = os.getppid()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-fd", type=int, required=True, help="socket to the engine")
    parser.add_argument("--last-word-fd", type=int, required=True, help="see `StopSignals`")
    for name in ("--listen-fds", "--admin-fds"):
        parser.add_argument(name, type=int, nargs="*", default=[], help="listening TCP sockets")
    flags = parser.parse_args()
    descriptors.open_standard_streams()
    descriptors.raise_limit()
    connection = socket.socket(fileno=flags.engine_fd)
    last_word = socket.socket(fileno=flags.last_word_fd)
    clients, admin = (
        [socket.socket(fileno=number) for number in numbers]
        for numbers in (flags.listen_fds, flags.admin_fds)
    )
    return asyncio.run(serve(connection, last_word, Listeners(clients, admin), engine_pid))


if __name__ == "__main__":
    raise SystemExit(main())
