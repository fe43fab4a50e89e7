"""OpenTelemetry: one span per request, sent to a collector.

The packages are those of the extra `otel`, so this module is imported only if
`--otlp-traces-endpoint` is set. Names of spans and attributes are vLLM's, which follow
OpenTelemetry's conventions for generative AI.
"""

from __future__ import annotations

import threading
from typing import Any

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from shared.server.engine_link.request_end import RequestSummary

SPAN_NAME = "llm_request"
EXPORT_TIMEOUT_S = 5.0
LAST_EXPORT_S = 1.0  # maximum wait for the collector at shutdown
REQUEST_FIELDS = ("max_tokens", "temperature", "top_p", "n")
"""Request fields that are attributes of the span if they were given."""


class Tracing:
    """Observer that exports spans; a span belongs to the trace of the `traceparent` header."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({SERVICE_NAME: "tandem"}), shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tandem")
        self._propagator = TraceContextTextMapPropagator()

    @classmethod
    def to_collector(cls, endpoint: str) -> Tracing:
        """Exports spans to a collector in batches from a thread; failures are logged."""
        return cls(OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))

    def on_request_end(self, end: RequestSummary) -> None:
        """Exports the span of a finished request."""
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(end.headers),
            kind=SpanKind.SERVER,
            start_time=end.began_ns,
            attributes=_attributes(end),
        )
        if "error" in end.finish_reasons:
            span.set_status(Status(StatusCode.ERROR))
        span.end(end.began_ns + int(end.total_s * 1e9))

    def close(self) -> None:
        """Exports pending spans, for at most `LAST_EXPORT_S`."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(LAST_EXPORT_S)


def _attributes(end: RequestSummary) -> dict[str, Any]:
    body = end.request
    options = {f"gen_ai.request.{name}": getattr(body, name, None) for name in REQUEST_FIELDS}
    first = {"gen_ai.latency.time_to_first_token": end.first_token_s}
    given = {name: value for name, value in {**options, **first}.items() if value is not None}
    return {
        "gen_ai.request.id": end.request_id,
        "gen_ai.request.model": end.model,
        "gen_ai.response.model": end.model,
        "gen_ai.operation.name": "chat" if end.endpoint == "chat" else "text_completion",
        "gen_ai.response.finish_reasons": end.finish_reasons,
        "gen_ai.usage.prompt_tokens": end.prompt_tokens,
        "gen_ai.usage.completion_tokens": end.output_tokens,
        "gen_ai.usage.cached_tokens": end.cached_tokens,
        "gen_ai.usage.num_sequences": len(end.finish_reasons),
        "gen_ai.latency.e2e": end.total_s,
        "tandem.speculative.verify_steps": end.verify_steps,
        "tandem.speculative.accept_length": end.accept_length,
        **given,
    }
