"""The HTTP server's process: OpenAI's routes over the engine's socket."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from shared.options import capabilities
from shared.process.frames import ModelFacts
from shared.server.admin import AdminRoutes, load_start_corpus
from shared.server.bodies import Body, parse
from shared.server.connection import TimedConnection
from shared.server.delta import Delta
from shared.server.engine_client import ClientLeft, EngineClient, EngineLost
from shared.server.errors import ApiError
from shared.server.gates import MAX_HEAD_BYTES, OPEN_PATH, HeadLimit, HostCheck, KeyCheck
from shared.server.generation import Generation, Generator
from shared.server.openai_types import ChatRequest, CompletionRequest
from shared.server.prompts import PromptReader, check_model
from shared.server.rendering import Renderer
from shared.server.responses import SSE_DONE, ChatForm, CompletionForm, Form, sse
from shared.server.server_metrics import ServerMetrics
from shared.server.tokens import TokenRoutes
from shared.server.transport import BodyLimit, EventStream, read_json, watch_client
from shared.text.tokenizer import Tokenizer

GRACE_S = 1  # for open answers to say their error, once the engine is gone
HARD_END_S = 3.0  # then the process ends whatever still hangs
EXIT_FAILED = 1
EXIT_REFUSED = 2


class Routes:
    """The handlers of the routes."""

    def __init__(self, generator: Generator, metrics: ServerMetrics) -> None:
        self._generator = generator
        self._client = generator.client
        self._metrics = metrics

    async def completions(self, request: Request) -> Response:
        """POST /v1/completions."""
        return await self._answer(request, CompletionRequest, CompletionForm())

    async def chat(self, request: Request) -> Response:
        """POST /v1/chat/completions."""
        return await self._answer(request, ChatRequest, ChatForm())

    async def models(self) -> Response:
        """GET /v1/models."""
        return _json({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """GET /v1/models/NAME."""
        check_model(name, self._client.facts.model_name)
        return _json(self._model())

    async def capabilities(self) -> Response:
        """GET /capabilities: the drafters, and what is refused."""
        return _json(capabilities.to_json())

    async def health(self) -> Response:
        """GET /health and /live: 200 while the engine lives."""
        return Response(status_code=200 if self._client.alive else 503)

    async def metrics(self) -> Response:
        """GET /metrics, for Prometheus."""
        page = self._metrics.render(await self._client.metrics())
        return Response(page, media_type=CONTENT_TYPE_LATEST)

    def _model(self) -> dict[str, Any]:
        facts = self._client.facts
        card = {"id": facts.model_name, "object": "model", "created": 0, "owned_by": "tandem"}
        return {**card, "max_model_len": facts.limits.context_length}

    async def _answer(self, request: Request, kind: type[Body], form: Form) -> Response:
        body = parse(await read_json(request), kind)
        generation = await self._generator.start(body, form)
        usage_last = bool(body.stream_options and body.stream_options.include_usage)
        try:
            with watch_client(generation, request.receive):
                if not body.stream:
                    return _json(await _whole(generation))
                events = _events(generation, usage_last)
                first = await anext(events)
        except BaseException:
            generation.close()
            raise
        return EventStream(generation, _put_back(first, events))


async def _whole(generation: Generation) -> dict[str, Any]:
    messages = [Delta()] * len(generation.answer.choices)
    async for index, piece in generation.pieces():
        messages[index] += piece.delta
    return generation.answer.whole(messages)


async def _events(generation: Generation, usage_last: bool) -> AsyncIterator[bytes]:
    """The stream's events; an error after the first one is an event as well."""
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


def _json(content: dict[str, Any], status: int = 200) -> Response:
    return Response(json.dumps(content), status, media_type="application/json")


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    response = _json(error.to_json(), error.status)
    if error.status == 413:  # the rest of the body is still to come
        response.headers["connection"] = "close"
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _json(ApiError(error.status_code, str(error.detail)).to_json(), error.status_code)


async def _on_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_fault(request: Request, error: Exception) -> Response:
    return _json(ApiError(500, "the server failed, its log says why").to_json(), 500)


def make_app(
    client: EngineClient, tokenizer: Tokenizer | None, renderer: Renderer | None
) -> ASGIApp:
    """The application over a connected engine."""
    metrics = ServerMetrics()
    reader = PromptReader(tokenizer, renderer, client.facts.limits)
    routes = Routes(Generator(client, reader, tokenizer, metrics), metrics)
    tokens = TokenRoutes(client.facts, reader, tokenizer)
    admin = AdminRoutes(client, tokenizer)
    app = FastAPI(title="Tandem", openapi_url=None)
    for path, handler, method in (
        ("/v1/completions", routes.completions, "POST"),
        ("/v1/chat/completions", routes.chat, "POST"),
        ("/tokenize", tokens.tokenize, "POST"),
        ("/detokenize", tokens.detokenize, "POST"),
        ("/v1/models", routes.models, "GET"),
        ("/v1/models/{name:path}", routes.model, "GET"),
        ("/capabilities", routes.capabilities, "GET"),
        ("/health", routes.health, "GET"),
        (OPEN_PATH, routes.health, "GET"),
        ("/metrics", routes.metrics, "GET"),
        ("/add_external_corpus", admin.add_corpus, "POST"),
        ("/remove_external_corpus", admin.remove_corpus, "POST"),
        ("/list_external_corpora", admin.list_corpora, "GET"),
    ):
        app.add_api_route(path, handler, methods=[method], response_model=None)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientLeft, _on_client_left)
    app.add_exception_handler(ClientDisconnect, _on_client_left)
    app.add_exception_handler(Exception, _on_fault)
    return _gated(BodyLimit(app), client.facts)


def _gated(app: ASGIApp, facts: ModelFacts) -> ASGIApp:
    """The application behind all that is checked before a route is found."""
    if facts.api_key is not None:
        app = KeyCheck(app, [key for key in (facts.api_key, facts.admin_api_key) if key])
    if facts.host_names is not None:
        app = HostCheck(app, facts.host_names)
    return HeadLimit(app)


def http_config(app: ASGIApp) -> uvicorn.Config:
    """How the application is served."""
    return uvicorn.Config(
        app,
        http=TimedConnection,
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        log_level="warning",
        access_log=False,
        ws="none",
        lifespan="off",
        timeout_graceful_shutdown=GRACE_S,
    )


class _HttpServer(uvicorn.Server):
    """Leaves signals to the engine's process, and says where it listens."""

    def __init__(self, config: uvicorn.Config, greeting: str) -> None:
        super().__init__(config)
        self._greeting = greeting

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        print(self._greeting, flush=True)


async def serve(connection: socket.socket, listeners: list[socket.socket]) -> int:
    """Serves until the engine ends or SIGTERM; returns the exit code."""
    try:
        client = await EngineClient.connect(connection)
        tokenizer = Tokenizer.from_folder(client.facts.model_folder)
        await load_start_corpus(client, tokenizer)
    except (EngineLost, ValueError) as error:
        print(error, file=sys.stderr, flush=True)
        return EXIT_REFUSED if isinstance(error, ValueError) else EXIT_FAILED
    template = tokenizer.template if tokenizer else None
    renderer = Renderer(template) if template else None
    config = http_config(make_app(client, tokenizer, renderer))
    server = _HttpServer(config, _greeting(client.facts.model_name, listeners))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, setattr, server, "should_exit", True)
    client.ended.add_done_callback(lambda _: _shut_down(server))
    if renderer:
        client.ended.add_done_callback(lambda _: renderer.end())
    await server.serve(listeners)
    if renderer:
        await renderer.close()
    if client.alive:
        return 0
    end = client.ended.result()
    if end.failed:
        print(f"the HTTP server ends: {end.reason}", file=sys.stderr, flush=True)
    return EXIT_FAILED if end.failed else 0


def _shut_down(server: uvicorn.Server) -> None:
    server.should_exit = True
    timer = threading.Timer(HARD_END_S, os._exit, [EXIT_FAILED])
    timer.daemon = True
    timer.start()


def _greeting(model: str, listeners: Sequence[socket.socket]) -> str:
    shown = []
    for listener in listeners:
        host, port = listener.getsockname()[:2]
        shown.append(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")
    return f"{model} is served at {' and '.join(shown)}"


def main() -> int:
    """Entry of `python -m shared.server.app`, which the engine's process starts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine-fd", type=int, required=True, help="socket to the engine")
    parser.add_argument(
        "--listen-fds", type=int, nargs="+", required=True, help="listening TCP sockets"
    )
    flags = parser.parse_args()
    # Ctrl-C reaches both processes; the engine's ends this one in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    connection = socket.socket(fileno=flags.engine_fd)
    listeners = [socket.socket(fileno=number) for number in flags.listen_fds]
    return asyncio.run(serve(connection, listeners))


if __name__ == "__main__":
    raise SystemExit(main())
