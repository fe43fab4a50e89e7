"""Prometheus text of /metrics: counters of the engine and of the server.

Names are vLLM's with another prefix; each metric has vLLM's label `model_name`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from shared.server.engine_link.metric_texts import HELP
from shared.server.engine_link.request_end import RequestSummary

PREFIX = "tandem:"
MODEL_LABEL = "model_name"
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 120, 600)
_STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 60)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))


class ServerMetrics:
    """Metrics of the engine and of request times.

    Attributes:
      time_to_first_token: Seconds from a request's arrival to its first token.
      inter_token_latency: Seconds between two steps that produced tokens of one choice.
    """

    def __init__(self, model_name: str) -> None:
        self._registry, self._model_name = CollectorRegistry(), model_name
        self._engine = _EngineCollector(model_name)
        self._registry.register(self._engine)
        self.time_to_first_token = self._histogram("time_to_first_token_seconds", _SECONDS)
        self.inter_token_latency = self._histogram("inter_token_latency_seconds", _STEP_SECONDS)
        self._latency = self._histogram("e2e_request_latency_seconds", _SECONDS)
        self._prompt_tokens = self._histogram("request_prompt_tokens", _TOKENS)
        self._output_tokens = self._histogram("request_generation_tokens", _TOKENS)
        self._image_tokens = self._counter("prompt_image_tokens").labels(model_name)
        self._malformed_calls = self._counter("malformed_tool_calls", "format")

    def on_request_end(self, end: RequestSummary) -> None:
        """Counts the end of a request; aborted and failed requests do not count in histograms."""
        self._image_tokens.inc(end.image_tokens)
        if end.tool_call_format is not None:
            calls = self._malformed_calls.labels(self._model_name, end.tool_call_format)
            calls.inc(end.malformed_tool_calls)
        if not {"abort", "error"} & set(end.finish_reasons):
            self._latency.observe(end.total_s)
            self._prompt_tokens.observe(end.prompt_tokens)
            self._output_tokens.observe(end.output_tokens)

    def render(self, snapshot: dict[str, float]) -> bytes:
        """Returns the text of /metrics, with the engine's counters and gauges by name."""
        self._engine.snapshot = snapshot
        return generate_latest(self._registry)

    def _counter(self, name: str, *labels: str) -> Counter:
        text = HELP[f"{name}_total"]
        return Counter(PREFIX + name, text, [MODEL_LABEL, *labels], registry=self._registry)

    def _histogram(self, name: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(
            PREFIX + name, HELP[name], [MODEL_LABEL], buckets=buckets, registry=self._registry
        )
        return made.labels(self._model_name)


class TokenTimes:
    """Arrival times of a request's tokens from the engine.

    Attributes:
      began: Arrival of the request, by `time.monotonic`.
      first_token_s: Seconds from the arrival to the first token; None before it.
    """

    def __init__(self, metrics: ServerMetrics) -> None:
        self._metrics = metrics
        self.began = time.monotonic()
        self.first_token_s: float | None = None
        self._last: dict[int, float] = {}

    def came(self, choice: int) -> None:
        """Records the arrival of tokens of a choice."""
        now = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now - self.began
            self._metrics.time_to_first_token.observe(self.first_token_s)
        if choice in self._last:
            self._metrics.inter_token_latency.observe(now - self._last[choice])
        self._last[choice] = now


class _EngineCollector(Collector):
    """Collector of the engine's snapshot; names that end in `_total` are counters, others gauges.

    Labels follow a name in Prometheus' syntax. Each name has a text in `HELP`:
    `tests/server/test_metric_texts.py` checks all names.
    """

    def __init__(self, model_name: str) -> None:
        self.snapshot: dict[str, float] = {}
        self._model_name = model_name

    def collect(self) -> Iterator[Metric]:
        """Yields the metric families of the newest snapshot."""
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for key, value in self.snapshot.items():
            name, _, labels = key.partition("{")
            values = {MODEL_LABEL: self._model_name, **dict(_LABEL.findall(labels))}
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            if name not in families:
                families[name] = kind(PREFIX + name, HELP[name], labels=list(values))
            families[name].add_metric(list(values.values()), value)
        yield from families.values()
