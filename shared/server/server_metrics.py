"""/metrics: the engine's counters beside the server's own, as Prometheus text."""

from __future__ import annotations

import re
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "tandem_"
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 600)


class ServerMetrics:
    """Renders snapshots of the engine and times requests.

    Attributes:
      time_to_first_token: Seconds from handing a request to the engine to its first token.
      request_latency: The same, to its last token.
    """

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._engine = _EngineCollector()
        self._registry.register(self._engine)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds")
        self.request_latency = self._histogram("e2e_request_latency_seconds")

    def render(self, snapshot: dict[str, float]) -> bytes:
        """The page, with the engine's counters and gauges by name."""
        self._engine.snapshot = snapshot
        return generate_latest(self._registry)

    def _histogram(self, name: str) -> Histogram:
        text = name.replace("_", " ")
        return Histogram(PREFIX + name, text, buckets=_SECONDS, registry=self._registry)


class _EngineCollector(Collector):
    """Names that end in `_total` are counters; labels follow a name as Prometheus writes them."""

    def __init__(self) -> None:
        self.snapshot: dict[str, float] = {}

    def collect(self) -> Iterator[Metric]:
        """The families of the newest snapshot."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for key, value in self.snapshot.items():
            name, _, labels = key.partition("{")
            values = dict(_LABEL.findall(labels))
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            if name not in families:
                families[name] = kind(PREFIX + name, name.replace("_", " "), labels=list(values))
            families[name].add_metric(list(values.values()), value)
        yield from families.values()
