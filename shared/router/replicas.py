"""Replicas behind the router: state by health checks, load, and choice for a request."""

from __future__ import annotations

import asyncio
import enum
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.process import logs
from shared.process.logs import log
from shared.router.policy import RoutingPolicy
from shared.router.upstream import ConnectError, Connection, ConnectionPool, Headers, UpstreamError

FAILURES = 2
"""Failed health checks in a row after which a replica is down."""


class ReplicaState(enum.Enum):
    """State of a replica."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(eq=False)
class Replica:
    """A server behind the router.

    Attributes:
      index: Small number that no other replica has.
      pool: Connections to it.
      state: State by the last health checks.
      num_open: Requests that were forwarded and have not ended.
      num_failures: Failed health checks in a row.
      num_requests: Requests that were forwarded.
    """

    index: int
    pool: ConnectionPool
    state: ReplicaState = ReplicaState.STARTING
    num_open: int = 0
    num_failures: int = 0
    num_requests: int = 0
    check: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """Host and port, as label of metrics."""
        return self.pool.host.decode()


class Replicas:
    """Set of replicas; health checks run in the background.

    Args:
      policy: Chooses among them.
      key: API key of the servers, or None.
      interval_s: Seconds between two health checks.
      timeout_s: Seconds until a health check fails.
    """

    def __init__(
        self, policy: RoutingPolicy, key: str | None, interval_s: float, timeout_s: float
    ) -> None:
        self.policy = policy
        self._headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
        self._interval_s, self._timeout_s = interval_s, timeout_s
        self._replicas: dict[str, Replica] = {}

    def __iter__(self) -> Iterator[Replica]:
        return iter([*self._replicas.values()])

    @property
    def ready(self) -> list[Replica]:
        """Replicas that accept requests."""
        return [each for each in self._replicas.values() if each.state is ReplicaState.READY]

    def set_urls(self, urls: Collection[str]) -> None:
        """Adds and removes replicas, so that these URLs remain; called in the event loop."""
        for url in self._replicas.keys() - urls:
            self._remove(self._replicas.pop(url))
        taken = {each.index for each in self}
        for url in urls:
            if url not in self._replicas:
                index = next(i for i in range(len(taken) + 1) if i not in taken)
                taken.add(index)
                replica = self._replicas[url] = Replica(index, ConnectionPool(url))
                replica.check = asyncio.create_task(self._check_often(replica))

    def choose(self, keys: Sequence[bytes], tried: Collection[Replica]) -> Replica | None:
        """Returns the replica for a request; None if none is ready besides those tried."""
        ready = {each.index: each for each in self.ready if each not in tried}
        if not ready:
            return None
        loads = {index: each.num_open for index, each in ready.items()}
        return ready[self.policy.choose(keys, loads)]

    def mark_down(self, replica: Replica, reason: str) -> None:
        """Takes a replica out of service; requests on it fail, and its cache counts as lost."""
        if replica.state is ReplicaState.DOWN:
            return
        log.warning("replica %s is down: %s", replica.name, reason)
        replica.state = ReplicaState.DOWN
        replica.pool.abort()
        self.policy.forget(replica.index)

    async def fetch(self, replica: Replica, target: str, headers: Headers = ()) -> ReplicaResponse:
        """Returns the response of a replica to a GET request.

        Raises:
          UpstreamError: The replica did not respond in time.
        """
        fields = [(b"host", replica.pool.host), *(headers or self._headers)]
        connection: Connection | None = None
        try:
            async with asyncio.timeout(self._timeout_s):
                connection = await replica.pool.take()
                connection.send(b"GET", target.encode(), fields, b"")
                head, body, is_last = await connection.response(), b"", False
                while not is_last:
                    part, is_last = await connection.data()
                    body += part
                return ReplicaResponse(head.status, body)
        except TimeoutError as error:
            raise UpstreamError(f"no response within {self._timeout_s:g} s") from error
        finally:
            if connection is not None:
                replica.pool.give_back(connection)

    async def fetch_all(
        self, target: str, headers: Headers
    ) -> list[tuple[Replica, ReplicaResponse]]:
        """Returns the successful responses of all ready replicas to a GET request."""
        ready = self.ready
        found = await asyncio.gather(
            *(self.fetch(each, target, headers) for each in ready), return_exceptions=True
        )
        return [
            (replica, each)
            for replica, each in zip(ready, found, strict=True)
            if isinstance(each, ReplicaResponse) and each.status == 200
        ]

    def close(self) -> None:
        """Removes all replicas."""
        self.set_urls(())

    def _remove(self, replica: Replica) -> None:
        assert replica.check is not None
        replica.check.cancel()
        replica.pool.abort()
        replica.state = ReplicaState.DOWN
        self.policy.forget(replica.index)

    async def _check_often(self, replica: Replica) -> None:
        while True:
            await self._check(replica)
            await asyncio.sleep(self._interval_s)

    async def _check(self, replica: Replica) -> None:
        try:
            found = await self.fetch(replica, "/health")
        except UpstreamError as error:
            replica.num_failures += 1
            is_sure = isinstance(error, ConnectError) or replica.num_failures >= FAILURES
            if replica.state is not ReplicaState.STARTING and is_sure:
                self.mark_down(replica, str(error))
            return
        replica.num_failures = 0
        before, replica.state = replica.state, found.state
        if replica.state is not before:
            logs.info(f"replica {replica.name} is {replica.state.value}")


@dataclass(frozen=True)
class ReplicaResponse:
    """Complete response of a replica."""

    status: int
    body: bytes

    @property
    def state(self) -> ReplicaState:
        """State of a replica with this response to `/health`."""
        if self.status == 200:
            return ReplicaState.READY
        return ReplicaState.DRAINING if self.code == "draining" else ReplicaState.DOWN

    @property
    def code(self) -> str | None:
        """Machine-readable code of an error; None without one."""
        return error_code(self.body)


def error_code(body: bytes) -> str | None:
    """Returns the code of an error response in OpenAI's format; None if it has none."""
    try:
        fields: Any = json.loads(body)
        return fields["error"]["code"]
    except (ValueError, LookupError, TypeError):
        return None
