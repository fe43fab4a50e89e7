"""The HTTP server's process: OpenAI's routes over the engine's socket."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

from shared.process.frames import ModelFacts
from shared.server import answers, playground
from shared.server.admin import AddCorpus, AdminRoutes, RemoveCorpus, load_start_corpus
from shared.server.connection import TimedConnection
from shared.server.engine_client import ClientLeft, EngineClient, EngineLost
from shared.server.errors import ApiError
from shared.server.gates import MAX_HEAD_BYTES, OPEN_PATH, HeadLimit, HostCheck, KeyCheck
from shared.server.generation import Generator
from shared.server.grammars import Grammars
from shared.server.openai_types import ChatRequest, CompletionRequest
from shared.server.openapi import Route, document
from shared.server.prompts import PromptReader
from shared.server.rendering import Renderer
from shared.server.routes import Routes, json_response
from shared.server.server_metrics import ServerMetrics
from shared.server.tokens import Detokenize, TokenizeChat, TokenizeText, TokenRoutes
from shared.server.transport import BodyLimit
from shared.text.tokenizer import Tokenizer

GRACE_S = 1  # for open answers to say their error, once the engine is gone
HARD_END_S = 3.0  # then the process ends whatever still hangs
DOCUMENT_PATH = "/openapi.json"
EXIT_FAILED = 1
EXIT_REFUSED = 2


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    response = json_response(error.to_json(), error.status)
    if error.status == 413:  # the rest of the body is still to come
        response.headers["connection"] = "close"
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    """A path or a method that no route has; FastAPI raises nothing else here."""
    assert isinstance(error, HTTPException)
    asked = f"{request.method} {request.url.path}"
    message = f"{asked:.100} is not served; GET {DOCUMENT_PATH} tells what is"
    response = json_response(ApiError(error.status_code, message).to_json(), error.status_code)
    response.headers.update(error.headers or {})  # of 405: the methods that there are
    return response


async def _on_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _on_fault(request: Request, error: Exception) -> Response:
    return json_response(ApiError(500, "the server failed, its log says why").to_json(), 500)


_ON_ERRORS = {
    ApiError: _on_api_error,
    HTTPException: _on_http_error,
    ClientLeft: _on_client_left,
    ClientDisconnect: _on_client_left,
    Exception: _on_fault,
}


def make_app(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    renderer: Renderer | None,
    grammars: Grammars,
) -> ASGIApp:
    """The application over a connected engine."""
    metrics = ServerMetrics()
    facts = client.facts
    reader = PromptReader(tokenizer, renderer, facts.limits, facts.max_open_requests)
    generator = Generator(client, reader, grammars, tokenizer, metrics)
    routes = Routes(generator, metrics)
    tokens = TokenRoutes(facts, reader, tokenizer)
    admin = AdminRoutes(client, tokenizer)
    served = (
        *_model_routes(routes, tokens),
        *_state_routes(routes),
        *_admin_routes(admin),
        *_page_routes(),
    )
    app = _with_routes(served, client.facts.api_key is not None)
    for kind, handler in _ON_ERRORS.items():
        app.add_exception_handler(kind, handler)
    return _gated(BodyLimit(app), client.facts)


def _with_routes(served: Sequence[Route], has_key: bool) -> FastAPI:
    """An application with these routes, and one that tells of all."""
    app = FastAPI(title="Tandem", openapi_url=None)
    told: dict[str, Any] = {}

    async def openapi() -> Response:
        """GET /openapi.json."""
        return json_response(told)

    page = Route(path=DOCUMENT_PATH, method="GET", handler=openapi, media_type="application/json")
    for route in (*served, page):
        route.add_to(app)
    told |= document(app, served, has_key)
    return app


def _model_routes(routes: Routes, tokens: TokenRoutes) -> Iterator[Route]:
    """What clients of OpenAI's and vLLM's APIs ask for."""
    yield Route(
        path="/v1/completions",
        method="POST",
        handler=routes.completions,
        bodies=(CompletionRequest,),
        answer=answers.Completion,
        event=answers.Completion,
        errors=(404, 503),
    )
    yield Route(
        path="/v1/chat/completions",
        method="POST",
        handler=routes.chat,
        bodies=(ChatRequest,),
        answer=answers.Chat,
        event=answers.ChatEvent,
        errors=(404, 503),
    )
    yield Route(
        path="/tokenize",
        method="POST",
        handler=tokens.tokenize,
        bodies=(TokenizeText, TokenizeChat),
        answer=answers.Tokenized,
        errors=(404,),
    )
    yield Route(
        path="/detokenize",
        method="POST",
        handler=tokens.detokenize,
        bodies=(Detokenize,),
        answer=answers.Detokenized,
        errors=(404,),
    )
    yield Route(
        path="/v1/requests/{request_id}/trace",
        method="GET",
        handler=routes.trace,
        answer=answers.RequestTrace,
        errors=(404,),
    )
    yield Route(path="/v1/models", method="GET", handler=routes.models, answer=answers.Models)
    yield Route(
        path="/v1/models/{name:path}",
        method="GET",
        handler=routes.model,
        answer=answers.Model,
        errors=(404,),
    )


def _state_routes(routes: Routes) -> Iterator[Route]:
    """What watches the server."""
    yield Route(
        path="/capabilities",
        method="GET",
        handler=routes.capabilities,
        answer=answers.Capabilities,
    )
    for path in ("/health", OPEN_PATH):
        yield Route(path=path, method="GET", handler=routes.health, errors=(503,))
    page = CONTENT_TYPE_LATEST.partition(";")[0]
    yield Route(path="/metrics", method="GET", handler=routes.metrics, media_type=page)


def _admin_routes(admin: AdminRoutes) -> Iterator[Route]:
    """What changes the server."""
    for path, handler, body in (
        ("/add_external_corpus", admin.add_corpus, AddCorpus),
        ("/remove_external_corpus", admin.remove_corpus, RemoveCorpus),
    ):
        yield Route(
            path=path,
            method="POST",
            handler=handler,
            bodies=(body,),
            answer=answers.Corpora,
            errors=(503,),
        )
    yield Route(
        path="/list_external_corpora",
        method="GET",
        handler=admin.list_corpora,
        answer=answers.Corpora,
        errors=(503,),
    )


def _page_routes() -> Iterator[Route]:
    """The page for people."""
    yield Route(path="/", method="GET", handler=playground.page, media_type="text/html")
    yield Route(
        path="/playground/{name}",
        method="GET",
        handler=playground.part,
        media_type="text/*",
        errors=(404,),
    )


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
    grammars = Grammars(client.facts)
    workers = [grammars] if renderer is None else [grammars, renderer]
    config = http_config(make_app(client, tokenizer, renderer, grammars))
    server = _HttpServer(config, _greeting(client.facts.model_name, listeners))
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, setattr, server, "should_exit", True)
    client.ended.add_done_callback(lambda _: _shut_down(server))
    for each in workers:
        client.ended.add_done_callback(lambda _, each=each: each.end())
    await server.serve(listeners)
    for each in workers:
        await each.close()
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
