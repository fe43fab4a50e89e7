"""Handlers of the API routes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from shared import VERSION
from shared.options import capabilities
from shared.server.api.access_middleware import MAX_HEAD_BYTES
from shared.server.api.request_parsing import Body, parse_request
from shared.server.api.streaming import json_response, respond
from shared.server.api.transport import MAX_BODY_BYTES, read_json
from shared.server.completions.generation import Generator
from shared.server.completions.image_decoder_pool import ImageDecoderPool
from shared.server.completions.openai_serializer import ChatForm, CompletionForm, OpenAISerializer
from shared.server.completions.output import GenerationOutput
from shared.server.completions.prompts import adapter_of
from shared.server.completions.serializer import Serializer
from shared.server.completions.traces import MAX_TRACES
from shared.server.engine_link.body_thread import BodyParsingThread
from shared.server.engine_link.server_metrics import ServerMetrics
from shared.server.protocol.errors import VERSION_HEADER, ApiError
from shared.server.protocol.generation_request import GenerationRequest
from shared.server.protocol.openai_types import ChatRequest, CompletionRequest

NewSerializer = Callable[[GenerationRequest, GenerationOutput], Serializer]


def _of_completions(request: GenerationRequest, output: GenerationOutput) -> Serializer:
    return OpenAISerializer(CompletionForm(), request, output)


def _of_chat(request: GenerationRequest, output: GenerationOutput) -> Serializer:
    return OpenAISerializer(ChatForm(), request, output)


class Routes:
    """Handlers of the API routes."""

    def __init__(
        self,
        generator: Generator,
        metrics: ServerMetrics,
        opener: ImageDecoderPool | None,
        work: BodyParsingThread,
    ) -> None:
        self._generator, self._opener, self._work = generator, opener, work
        self._client = generator.client
        self._metrics, self._began = metrics, int(time.time())

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, CompletionRequest, _of_completions)

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, ChatRequest, _of_chat)

    async def models(self, request: Request) -> Response:
        """GET /v1/models; in Anthropic's format if `anthropic-version` is sent."""
        if VERSION_HEADER not in request.headers:
            cards = [self._model(name) for name in self._names()]
            return json_response({"object": "list", "data": cards})
        names = self._names()
        cards = [self._anthropic_model(name) for name in names]
        page = {"data": cards, "has_more": False, "first_id": names[0], "last_id": names[-1]}
        return json_response(page)

    async def model(self, name: str, request: Request) -> Response:
        """GET /v1/models/NAME; in Anthropic's format if `anthropic-version` is sent."""
        served = adapter_of(name, self._client.facts) or self._client.facts.model_name
        is_anthropic = VERSION_HEADER in request.headers
        return json_response((self._anthropic_model if is_anthropic else self._model)(served))

    async def trace(self, request_id: str) -> Response:
        """GET /v1/requests/ID/trace: step trace of a running or finished request."""
        trace = self._generator.traces.find(request_id)
        if trace is None:
            message = (
                f"no trace of request {request_id!r:.100}: traces require the field trace,"
                f" and the last {MAX_TRACES} are kept"
            )
            raise ApiError(404, message, code="trace_not_found")
        return Response(trace.to_json(), media_type="application/json")

    async def capabilities(self) -> Response:
        """GET /capabilities: drafters, unsupported combinations, ranks, parsers and limits."""
        facts = self._client.facts
        of_server = {
            "tp_size": facts.ranks,
            "tool_call_parser": facts.tool_call_parser,
            "reasoning_parser": facts.reasoning_parser,
            "chat_template": facts.chat_template,
            "structured_outputs": facts.limits.structured_outputs,
            "limits": self._limits(),
            "images": self._opener and self._opener.bounds,
        }
        return json_response({**capabilities.to_json(facts.strict_fields), **of_server})

    async def live(self) -> Response:
        """GET /live: 200 while the engine process runs and its steps finish."""
        self._check_alive()
        return Response()

    async def health(self) -> Response:
        """GET /health: 200 while requests are accepted."""
        self._check_alive()
        if self._client.drains.is_set():
            raise ApiError(503, "the server is shutting down", code="draining")
        return Response()

    async def version(self) -> Response:
        """GET /version."""
        return json_response({"version": VERSION})

    async def metrics(self) -> Response:
        """GET /metrics, for Prometheus."""
        page = self._metrics.render(await self._client.metrics())
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    def _check_alive(self) -> None:
        if not self._client.alive:
            raise ApiError(503, self._client.ended.result().reason, code="engine_lost")

    def _limits(self) -> dict[str, Any]:
        facts = self._client.facts
        of_server = {
            "max_open_requests": facts.max_open_requests,
            "max_draft_depth": facts.max_draft_depth,
            "max_body_bytes": MAX_BODY_BYTES,
            "max_header_bytes": MAX_HEAD_BYTES,
        }
        limits = asdict(facts.limits)
        del limits["structured_outputs"]  # a field of its own
        return {**limits, **of_server}

    def _names(self) -> tuple[str, ...]:
        """Returns the names of the model and of its adapters."""
        facts = self._client.facts
        return (facts.model_name, *facts.adapters)

    def _model(self, name: str) -> dict[str, Any]:
        facts = self._client.facts
        card = {"id": name, "object": "model", "owned_by": "tandem"}
        parent = {} if name == facts.model_name else {"parent": facts.model_name}
        return {
            **card,
            **parent,
            "created": self._began,
            "max_model_len": facts.limits.context_length,
            "speculative_algorithm": facts.drafter,
            "tp_size": facts.ranks,
        }

    def _anthropic_model(self, name: str) -> dict[str, Any]:
        facts = self._client.facts
        began = datetime.fromtimestamp(self._began, UTC).isoformat().replace("+00:00", "Z")
        return {
            "type": "model",
            "id": name,
            "display_name": name,
            "created_at": began,
            "lifecycle": "active",
            "max_input_tokens": facts.limits.context_length,
            "max_tokens": facts.limits.max_request_tokens,
        }

    async def _answer(
        self, request: Request, kind: type[Body], new_serializer: NewSerializer
    ) -> Response:
        sent = await read_json(request)
        asked = await self._work.do(len(sent), parse_request, sent, kind)
        generation = await self._generator.start(asked, request.headers, len(sent))
        serializer = new_serializer(asked, generation.output)
        return await respond(request, generation, serializer, asked.stream)
