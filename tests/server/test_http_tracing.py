"""OpenTelemetry spans of requests, in the caller's trace, with vLLM's names."""

from __future__ import annotations

import gzip
import http.server
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from shared.options import observing
from shared.options.command_line import parse
from shared.options.flags import ConfigError
from shared.process.start import prepare
from shared.server.api.tracing import Tracing
from shared.server.engine_link.request_end import RequestSummary
from shared.server.protocol.openai_types import CompletionRequest
from tests.support.http_fixtures import COMPLETIONS, FAIL, save_tokenizer, serving
from tests.support.serve_reference import PLATFORM

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = {"traceparent": f"00-{TRACE}-{CALLER}-01"}
BEGAN_NS = 1_790_000_000_000_000_000


def end(**changed: Any) -> RequestSummary:
    request = CompletionRequest(prompt="a secret", temperature=0.5, max_tokens=9)
    fields: dict[str, Any] = {
        "request_id": "cmpl-1",
        "endpoint": "completions",
        "model": "it",
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "image_tokens": 0,
        "output_tokens": 7,
        "verify_steps": 3,
        "accept_length": 2.0,
        "finish_reasons": ("stop",),
        "began_ns": BEGAN_NS,
        "first_token_s": 0.25,
        "total_s": 1.5,
        "headers": PARENT,
        "request": request,
        "outputs": [[1] * 7],
        "ignored": (),
        "tool_call_format": None,
        "malformed_tool_calls": 0,
    }
    return RequestSummary(**{**fields, **changed})


def span_of(summary: RequestSummary) -> Any:
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    tracing.on_request_end(summary)
    tracing.close()
    (span,) = exporter.get_finished_spans()
    return span


def test_span_has_request_attributes_without_prompt_text():
    span = span_of(end())
    assert (span.name, span.kind) == ("llm_request", SpanKind.SERVER)
    assert (span.start_time, span.end_time) == (BEGAN_NS, BEGAN_NS + 1_500_000_000)
    assert f"{span.context.trace_id:032x}" == TRACE
    assert f"{span.parent.span_id:016x}" == CALLER
    assert dict(span.attributes) == {
        "gen_ai.request.id": "cmpl-1",
        "gen_ai.request.model": "it",
        "gen_ai.response.model": "it",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.prompt_tokens": 5,
        "gen_ai.usage.completion_tokens": 7,
        "gen_ai.usage.cached_tokens": 2,
        "gen_ai.usage.num_sequences": 1,
        "gen_ai.latency.time_to_first_token": 0.25,
        "gen_ai.latency.e2e": 1.5,
        "tandem.speculative.verify_steps": 3,
        "tandem.speculative.accept_length": 2.0,
    }
    assert span.status.status_code is StatusCode.UNSET


def test_span_without_traceparent_has_no_parent_reports_error():
    span = span_of(end(headers={}, finish_reasons=("stop", "error"), first_token_s=None))
    assert span.parent is None
    assert span.status.status_code is StatusCode.ERROR
    assert "gen_ai.latency.time_to_first_token" not in span.attributes


def test_unsampled_traceparent_exports_no_span():
    exporter = InMemorySpanExporter()
    tracing = Tracing(exporter)
    tracing.on_request_end(end(headers={"traceparent": f"00-{TRACE}-{CALLER}-00"}))
    tracing.close()
    assert not exporter.get_finished_spans()


class Collector(http.server.BaseHTTPRequestHandler):
    """OTLP collector that stores the received spans."""

    spans: list[Any]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            body = gzip.decompress(body)
        request = ExportTraceServiceRequest.FromString(body)
        scopes = (scope for each in request.resource_spans for scope in each.scope_spans)
        self.spans += [span for scope in scopes for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def collector() -> Iterator[tuple[str, list[Any]]]:
    kind = type("Kept", (Collector,), {"spans": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{listening.server_port}/v1/traces", kind.spans
        listening.shutdown()


def test_server_exports_spans_to_otlp_collector(tmp_path, collector):
    endpoint, spans = collector
    save_tokenizer(tmp_path)
    command = ["-m", "tests.support.http_fixtures", str(tmp_path)]
    with serving([*command, "--otlp-traces-endpoint", endpoint]) as server:
        body = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(server.url + COMPLETIONS, json=body, headers=PARENT).json()
        assert server.post(COMPLETIONS, prompt=[FAIL, 97]).status_code == 500
    first, failed = spans
    assert (first.trace_id.hex(), first.parent_span_id.hex()) == (TRACE, CALLER)
    summary = {attribute.key: attribute.value for attribute in first.attributes}
    assert summary["gen_ai.request.id"].string_value == answer["id"]
    assert summary["gen_ai.usage.completion_tokens"].int_value == 8
    assert 0 < first.end_time_unix_nano - first.start_time_unix_nano < 60e9
    assert failed.status.code == 2
    assert not failed.parent_span_id


@pytest.mark.matrix
def test_unreachable_otlp_collector_does_not_block(tmp_path):
    save_tokenizer(tmp_path)
    command = ["-m", "tests.support.http_fixtures", str(tmp_path), "--otlp-traces-endpoint"]
    with serving([*command, "http://127.0.0.1:9/v1/traces"]) as server:
        assert server.complete("abc", max_tokens=3)["usage"]["completion_tokens"] == 3
    assert server.process.returncode == 0


def test_otlp_traces_endpoint_requires_otel_extra(monkeypatch):
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    options = parse(["--otlp-traces-endpoint", "http://127.0.0.1:4318/v1/traces"])
    for find in (missing, lambda name: None):
        monkeypatch.setattr(observing, "find_spec", find)
        with pytest.raises(ConfigError, match="^--otlp-traces-endpoint requires.*the extra otel"):
            prepare(options, PLATFORM)
