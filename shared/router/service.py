"""Process of the router: listeners, replicas, stop signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Collection, Coroutine
from typing import Any, Protocol

from shared.options.options import Options
from shared.process import descriptors, gc_freeze, logs
from shared.process.address import Listeners, admin_host, host_names
from shared.process.logs import log
from shared.process.signals import STOP_SIGNALS, stop_reason
from shared.router.aggregation import AggregateRoutes
from shared.router.app import router_apps
from shared.router.forwarding import Forwarder
from shared.router.local_replicas import EXIT_REFUSED, RefusedError
from shared.router.policy import RoutingPolicy
from shared.router.replicas import Replicas
from shared.server.api.app import gated
from shared.server.api.service import DRAIN_LOOK_S, HttpServer, connection_limits, urls_of

GRACE_S = 1
EXIT_FAILED = 1


class ReplicaSource(Protocol):
    """Origin of the replicas of a router."""

    async def run(self, replicas: Replicas, routes: AggregateRoutes) -> None:
        """Sets the replicas, and keeps them running or their addresses current."""
        ...

    async def stop(self, at_once: bool) -> None:
        """Ends what `run` has started."""
        ...


class RunningServers:
    """Servers that others have started (`--servers`)."""

    def __init__(self, urls: Collection[str]) -> None:
        self._urls = urls

    async def run(self, replicas: Replicas, routes: AggregateRoutes) -> None:
        """See `ReplicaSource`."""
        replicas.set_urls(self._urls)
        await asyncio.Event().wait()

    async def stop(self, at_once: bool) -> None:
        """See `ReplicaSource`; the servers continue."""


class Router:
    """HTTP server of the router, with its replicas.

    Args:
      options: Options of the router.
      listeners: Its sockets.
      source: Origin of its replicas.
    """

    def __init__(self, options: Options, listeners: Listeners, source: ReplicaSource) -> None:
        self._options, self._listeners, self._source = options, listeners, source
        given, server = options.router, options.server
        self._replicas = Replicas(
            RoutingPolicy(given.routing_policy),
            server.api_key,
            given.health_check_interval,
            given.health_check_timeout,
        )
        forwarder = Forwarder(self._replicas)
        self._routes = AggregateRoutes(self._replicas, forwarder)
        self._signals: asyncio.Queue[int] = asyncio.Queue()
        self._servers = self._http_servers(forwarder)

    async def run(self) -> int:
        """Routes until the router is stopped; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in STOP_SIGNALS:
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        source = asyncio.create_task(self._source.run(self._replicas, self._routes))
        sockets = (self._listeners.clients, self._listeners.admin)
        serving = asyncio.gather(
            *(each.serve(given) for each, given in zip(self._servers, sockets, strict=False))
        )
        stopping = asyncio.create_task(self._drained())
        await asyncio.wait((source, stopping, serving), return_when=asyncio.FIRST_COMPLETED)
        code = _exit_code(source)
        drained = stopping.done() and stopping.result()
        await self._end(source, stopping, at_once=not drained)
        for each in self._servers:
            each.should_exit = True
        await serving
        return code

    async def _end(
        self, source: asyncio.Task[None], stopping: asyncio.Task[bool], at_once: bool
    ) -> None:
        """Ends the replicas; a further signal ends them at once."""
        for task in (source, stopping):
            task.cancel()
        await asyncio.wait((source, stopping))
        ending = asyncio.create_task(self._source.stop(at_once))
        if not at_once:
            signalled = asyncio.create_task(self._signals.get())
            await asyncio.wait((ending, signalled), return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                await self._source.stop(at_once=True)
            signalled.cancel()
        await ending
        self._replicas.close()

    async def _drained(self) -> bool:
        """Returns after a stop signal: True if all requests have ended, False to end at once."""
        number = await self._signals.get()
        log.info("the router shuts down: %s", stop_reason(number))
        if number != signal.SIGTERM:
            return False
        self._routes.drains = True
        logs.info("draining: new requests are rejected")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._options.server.graceful_shutdown_timeout):
                return await _first(self._idle(), self._second_signal())
        return False

    async def _idle(self) -> bool:
        while any(each.server_state.tasks for each in self._servers):
            await asyncio.sleep(DRAIN_LOOK_S)
        return True

    async def _second_signal(self) -> bool:
        await self._signals.get()
        return False

    def _http_servers(self, forwarder: Forwarder) -> list[HttpServer]:
        server, listeners = self._options.server, self._listeners
        clients, admin = router_apps(self._routes, forwarder, bool(listeners.admin))
        keys = (server.api_key, server.admin_api_key) if server.api_key else ()
        names = host_names(server, server.host, listeners.clients)
        admin_names = host_names(server, admin_host(server), listeners.admin)
        apps = [gated(clients, keys, names, server.origins)]
        apps += [gated(admin, keys, admin_names, ())] if admin else []
        rooms = connection_limits(listeners)
        return [
            HttpServer(app, room, GRACE_S, self._greet)
            for app, room in zip(apps, rooms, strict=False)
        ]

    def _greet(self) -> None:
        if all(each.started for each in self._servers):
            found = urls_of(self._listeners.clients)
            logs.log_always(f"the router is served at {' and '.join(found)}")


async def _first(*waits: Coroutine[Any, Any, bool]) -> bool:
    """Returns the result of the first coroutine that ends, and cancels the others."""
    tasks = [asyncio.create_task(each) for each in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


def _exit_code(source: asyncio.Task[None]) -> int:
    """Returns the exit code of the router by the end of its source, which runs until a failure."""
    error = source.exception() if source.done() else None
    if error is None:
        return 0
    reasons = error.exceptions if isinstance(error, BaseExceptionGroup) else (error,)
    log.error("the router ends: %s", reasons[0])
    return EXIT_REFUSED if isinstance(reasons[0], RefusedError) else EXIT_FAILED


def run(options: Options, listeners: Listeners, source: ReplicaSource) -> int:
    """Runs a router until it is stopped; returns the exit code."""
    descriptors.raise_limit()
    logging.captureWarnings(True)
    gc_freeze.freeze_gc()
    return asyncio.run(Router(options, listeners, source).run())
