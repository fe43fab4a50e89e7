"""A router in this process, in front of fake servers in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from shared.options.router import CACHE_AWARE
from shared.process.address import bind
from shared.router.aggregation import AggregateRoutes
from shared.router.app import router_apps
from shared.router.forwarding import Forwarder
from shared.router.policy import RoutingPolicy
from shared.router.replicas import Replicas, ReplicaState
from shared.server.api.app import gated
from shared.server.api.connection import ConnectionLimit
from shared.server.api.service import HttpServer, urls_of
from tests.support.fake_server import FakeServer, fake_servers

INTERVAL_S, WAIT_S = 0.05, 60.0
COMPLETIONS = "/v1/completions"


@dataclass
class Routed:
    """The router and its servers.

    Attributes:
      url: Address of the router.
      servers: The servers, in the order of their replicas.
      replicas: The router's view of them.
      routes: Routes that the router answers itself.
      forwarder: Forwards the other requests.
      client: HTTP client with the router as its base.
    """

    url: str
    servers: list[FakeServer]
    replicas: Replicas
    routes: AggregateRoutes
    forwarder: Forwarder
    client: httpx.AsyncClient

    async def post(self, **fields: Any) -> httpx.Response:
        """Sends a completion."""
        return await self.client.post(COMPLETIONS, json=fields)

    def served(self) -> list[int]:
        """Returns the number of requests that each server has received."""
        return [len(each.bodies) for each in self.servers]


async def until(is_true: Callable[[], bool]) -> None:
    """Waits until a condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not is_true():
            await asyncio.sleep(0.01)


@asynccontextmanager
async def routed(
    count: int, policy: str = CACHE_AWARE, key: str | None = None, timeout_s: float = WAIT_S
) -> AsyncIterator[Routed]:
    """Starts servers and a router with this limit of health checks, and waits until it is ready."""
    async with fake_servers(count) as servers:
        replicas = Replicas(RoutingPolicy(policy), key, INTERVAL_S, timeout_s)
        replicas.set_urls([each.url for each in servers])
        forwarder = Forwarder(replicas)
        routes = AggregateRoutes(replicas, forwarder)
        app, _ = router_apps(routes, forwarder, has_admin_listener=False)
        http = HttpServer(
            gated(app, [key] * bool(key), None, ()), ConnectionLimit(99, 9, 9), 1, int
        )
        sockets = bind("127.0.0.1", 0)
        serving = asyncio.create_task(http.serve(sockets))
        (url,) = urls_of(sockets)
        await until(lambda: http.started and len(replicas.ready) == count)
        try:
            async with httpx.AsyncClient(base_url=url, timeout=WAIT_S) as client:
                yield Routed(url, servers, replicas, routes, forwarder, client)
        finally:
            replicas.close()
            http.should_exit = True
            await serving


def run(scenario: Callable[[Routed], Awaitable[None]], count: int, **options: Any) -> None:
    """Runs a scenario with a router and this number of servers."""

    async def whole() -> None:
        async with asyncio.timeout(6 * WAIT_S), routed(count, **options) as found:
            await scenario(found)

    asyncio.run(whole())


def is_down(found: Routed, place: int) -> bool:
    """Returns True if a replica is down."""
    return [*found.replicas][place].state is ReplicaState.DOWN
