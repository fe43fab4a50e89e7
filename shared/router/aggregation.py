"""Routes of the router's own: state, metrics and capabilities of all replicas."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from shared.router.forwarding import Forwarder
from shared.router.replicas import Replica, Replicas, ReplicaState
from shared.server.api.streaming import json_response
from shared.server.engine_link.server_metrics import PREFIX
from shared.server.protocol.errors import ApiError

REPLICA_LABEL = "replica"
HELP = {
    "router_replica_up": "Replicas that accept requests (1) or do not (0)",
    "router_replica_open_requests": "Forwarded requests that have not ended, by replica",
    "router_requests": "Requests forwarded, by replica",
    "router_prefix_routed_requests": "Requests with a replica selected by a known prefix",
    "router_retries": "Requests that were sent to a second replica",
    "router_failed_requests": "Requests that ended with an error of the router, by code",
    "router_client_disconnects": "Requests aborted because the client disconnected",
    "router_replica_restarts": "Replicas that ended and were started again",
}
"""Help texts of the router's metrics."""


class AggregateRoutes:
    """Handlers of routes that the router answers itself.

    Attributes:
      drains: True if new requests are rejected.
      num_restarts: Replicas that were started again.
    """

    def __init__(self, replicas: Replicas, forwarder: Forwarder) -> None:
        self.drains, self.num_restarts = False, 0
        self._replicas, self._forwarder = replicas, forwarder

    async def live(self, request: Request) -> Response:
        """GET /live: 200 while the router runs."""
        return Response()

    async def health(self, request: Request) -> Response:
        """GET /health: 200 while the router accepts requests and a replica is ready."""
        self.check_accepts()
        if not self._replicas.ready:
            raise ApiError(503, "no replica is ready; try again later", code="no_replica")
        return Response()

    async def models(self, request: Request) -> Response:
        """GET /v1/models: models of all replicas; one model of several replicas appears once."""
        cards: dict[str, Any] = {}
        found = [fields for _, fields in await self._fetched(request)]
        for card in chain.from_iterable(fields["data"] for fields in found):
            cards.setdefault(card["id"], card)
        return json_response({**found[0], "data": [*cards.values()]})

    async def capabilities(self, request: Request) -> Response:
        """GET /capabilities: the fields that all replicas share, and a list of the replicas.

        The entry of a replica has its state, and the fields in which replicas differ.
        """
        found = {replica.index: fields for replica, fields in await self._fetched(request)}
        shared, own = _split([*found.values()])
        of_each = dict(zip(found, own, strict=True))
        replicas = [
            {"url": each.pool.url, "state": each.state.value, **of_each.get(each.index, {})}
            for each in self._replicas
        ]
        return json_response({**shared, "replicas": replicas})

    async def trace(self, request: Request) -> Response:
        """GET /v1/requests/ID/trace: the step trace, from the replica that has it."""
        found = await self._replicas.fetch_all(request.url.path, _keys_of(request))
        if not found:
            raise ApiError(404, "no replica has a trace of this request", code="trace_not_found")
        return Response(found[0][1].body, media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        """GET /metrics: metrics of the router, and those of all replicas with the label replica."""
        pages = await self._replicas.fetch_all("/metrics", _keys_of(request))
        registry = CollectorRegistry()
        registry.register(_Families([*self._own(), *_merged(pages)]))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    def check_accepts(self) -> None:
        """Checks that new requests are accepted.

        Raises:
          ApiError: The router drains.
        """
        if self.drains:
            raise ApiError(503, "the server is shutting down", code="draining")

    async def _fetched(self, request: Request) -> list[tuple[Replica, Any]]:
        """Returns the JSON of all ready replicas for the target of a request."""
        self.check_accepts()
        found = await self._replicas.fetch_all(request.url.path, _keys_of(request))
        if not found:
            raise ApiError(503, "no replica is ready; try again later", code="no_replica")
        return [(replica, json.loads(each.body)) for replica, each in found]

    def _own(self) -> Iterator[Metric]:
        counters, label = self._forwarder.counters, (REPLICA_LABEL,)
        replicas = [*self._replicas]
        up = {each.name: each.state is ReplicaState.READY for each in replicas}
        yield _family("router_replica_up", up, label, GaugeMetricFamily)
        num_open = {each.name: each.num_open for each in replicas}
        yield _family("router_replica_open_requests", num_open, label, GaugeMetricFamily)
        yield _family("router_requests", {each.name: each.num_requests for each in replicas}, label)
        yield _family("router_failed_requests", counters.failures, ("code",))
        for name, value in (
            ("router_prefix_routed_requests", self._replicas.policy.num_by_prefix),
            ("router_retries", counters.retries),
            ("router_client_disconnects", counters.disconnects),
            ("router_replica_restarts", self.num_restarts),
        ):
            yield _family(name, {"": value}, ())


class _Families(Collector):
    """Collector of given metric families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Returns the families."""
        return self._families


def _family(
    name: str,
    values: dict[str, Any],
    labels: tuple[str, ...],
    kind: type[CounterMetricFamily | GaugeMetricFamily] = CounterMetricFamily,
) -> Metric:
    family = kind(PREFIX + name, HELP[name], labels=labels)
    for label, value in values.items():
        family.add_metric([label] * len(labels), float(value))
    return family


def _merged(pages: Iterable[tuple[Replica, Any]]) -> list[Metric]:
    """Returns the families of all pages, with the replica as a further label."""
    families: dict[str, Metric] = {}
    for replica, page in pages:
        for read in text_string_to_metric_families(page.body.decode()):
            family = families.setdefault(
                read.name, Metric(read.name, read.documentation, read.type)
            )
            for name, labels, value, *_ in read.samples:
                family.add_sample(name, {**labels, REPLICA_LABEL: replica.name}, value)
    return [*families.values()]


def _split(found: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the fields that are equal in all objects, and the other fields of each object."""
    counts = Counter((name, json.dumps(value)) for each in found for name, value in each.items())
    shared = {name: json.loads(text) for (name, text), n in counts.items() if n == len(found)}
    return shared, [{k: v for k, v in each.items() if k not in shared} for each in found]


def _keys_of(request: Request) -> list[tuple[bytes, bytes]]:
    """Returns the headers of a request that select an API or may contain its key."""
    names = (b"authorization", b"x-api-key", b"api-key", b"anthropic-version")
    return [field for field in request.headers.raw if field[0] in names]
