"""Handlers of the API routes."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastapi import Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from shared import VERSION
from shared.options import capabilities
from shared.server.api.access_middleware import MAX_HEAD_BYTES
from shared.server.api.request_parsing import Body, parse
from shared.server.api.transport import MAX_BODY_BYTES, EventStream, read_json, watch_client
from shared.server.completions.generation import Generation, Generator
from shared.server.completions.image_decoder_pool import ImageDecoderPool
from shared.server.completions.prompts import check_model
from shared.server.completions.responses import (
    SSE_DONE,
    ChatForm,
    ChoiceFormat,
    CompletionForm,
    sse,
)
from shared.server.completions.traces import MAX_TRACES
from shared.server.engine_link.body_thread import BodyParsingThread
from shared.server.engine_link.server_metrics import ServerMetrics
from shared.server.parsing.delta import Delta
from shared.server.protocol.errors import ApiError
from shared.server.protocol.openai_types import ChatRequest, CompletionRequest


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
        return await self._answer(request, CompletionRequest, CompletionForm())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, ChatRequest, ChatForm())

    async def models(self) -> Response:
        """GET /v1/models."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/NAME."""
        check_model(name, self._client.facts.model_name)
        return json_response(self._model())

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

    def _model(self) -> dict[str, Any]:
        facts = self._client.facts
        card = {"id": facts.model_name, "object": "model", "owned_by": "tandem"}
        return {
            **card,
            "created": self._began,
            "max_model_len": facts.limits.context_length,
            "speculative_algorithm": facts.drafter,
            "tp_size": facts.ranks,
        }

    async def _answer(self, request: Request, kind: type[Body], form: ChoiceFormat) -> Response:
        sent = await read_json(request)
        body = await self._work.do(len(sent), parse, sent, kind)
        generation = await self._generator.start(body, form, request.headers, len(sent))
        usage_last = bool(body.stream_options and body.stream_options.include_usage)
        with contextlib.ExitStack() as ends:
            ends.callback(generation.close)
            with watch_client(generation, request.receive):
                if not body.stream:
                    return json_response(await _whole(generation))
                events = _events(generation, usage_last)
                first = await anext(events)
            ends.pop_all()  # the stream closes it
        return EventStream(generation, _put_back(first, events))


async def _whole(generation: Generation) -> dict[str, Any]:
    messages = [Delta()] * len(generation.answer.choices)
    async for index, piece in generation.pieces():
        messages[index] += piece.delta
    return generation.answer.whole(messages)


async def _events(generation: Generation, usage_last: bool) -> AsyncIterator[bytes]:
    """Yields the events of a stream; an error after the first event is sent as an event."""
    answer, begun = generation.answer, False
    try:
        async for index, piece in generation.pieces():
            if not answer.matters(index, piece):
                continue
            chunk = answer.chunk(index, piece)
            if answer.ended and not usage_last:
                chunk |= answer.totals()
            yield sse(chunk)
            begun = True
        if usage_last:
            yield sse(answer.usage_chunk())
    except ApiError as error:
        if not begun:
            raise
        yield sse(error.to_json())
    yield SSE_DONE


async def _put_back(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for event in rest:
        yield event


def json_response(content: dict[str, Any], status: int = 200) -> Response:
    """Returns a JSON response."""
    return Response(json.dumps(content), status, media_type="application/json")
