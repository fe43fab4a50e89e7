"""ASGI applications of the two listeners: API routes and admin routes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Match
from starlette.routing import Route as StarletteRoute
from starlette.types import ASGIApp

from shared import VERSION
from shared.process.ipc_messages import ServerInfo
from shared.server.api import playground
from shared.server.api.access_middleware import (
    HEALTH_PATHS,
    LIVE_PATH,
    ApiKeyMiddleware,
    HeaderSizeLimit,
    HostMiddleware,
)
from shared.server.api.admin import (
    AdapterToLoad,
    AdapterToUnload,
    AddCorpus,
    AdminRoutes,
    RemoveCorpus,
)
from shared.server.api.error_responses import error_response
from shared.server.api.kv_transfer import KVTransferRequest, KVTransferRoutes
from shared.server.api.messages_routes import MessagesRoutes
from shared.server.api.openapi import Route, document
from shared.server.api.origins import Origins
from shared.server.api.request_log import RequestLog
from shared.server.api.responses_routes import ResponsesRoutes
from shared.server.api.routes import Routes
from shared.server.api.streaming import json_response
from shared.server.api.tokens import Detokenize, TokenizeChat, TokenizeText, TokenRoutes
from shared.server.api.transport import BodyLimit
from shared.server.completions.chat_renderer import Renderer
from shared.server.completions.generation import Generator
from shared.server.completions.grammars import GrammarChecks
from shared.server.completions.image_decoder_pool import ImageDecoderPool
from shared.server.completions.prompts import PromptReader
from shared.server.engine_link.body_thread import BodyParsingThread
from shared.server.engine_link.engine_client import EngineClient
from shared.server.engine_link.engine_errors import ClientLeft
from shared.server.engine_link.request_end import RequestObserver
from shared.server.engine_link.server_metrics import ServerMetrics
from shared.server.protocol import messages_response_types as anthropic
from shared.server.protocol import response_types as answers
from shared.server.protocol import responses_listing as listing
from shared.server.protocol import responses_response_types as responses
from shared.server.protocol.errors import MESSAGES_PATH, OVERLOADED, ApiError
from shared.server.protocol.http_normalization import HttpNormalization
from shared.server.protocol.messages_types import MessagesRequest, TokenCountRequest
from shared.server.protocol.openai_types import ChatRequest, CompletionRequest
from shared.server.protocol.responses_types import ResponsesRequest
from shared.text.tokenizer import Tokenizer

DOCUMENT_PATH = "/openapi.json"


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    response = error_response(error, request.scope)
    if error.status == 413:  # the client may still be sending the body
        response.headers["connection"] = "close"
    return response


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Responds to an unknown path or method; FastAPI raises nothing else here."""
    assert isinstance(error, HTTPException)
    target = f"{request.method} {request.url.path}"
    message = f"{target:.100} is not a route of this server; GET {DOCUMENT_PATH} lists the routes"
    response = error_response(ApiError(error.status_code, message), request.scope)
    if error.status_code == 405:
        response.headers["allow"] = ", ".join(_methods_of(request))
    return response


def _methods_of(request: Request) -> list[str]:
    """Returns the methods of all routes with the path of a request."""
    routes = [route for route in request.app.routes if isinstance(route, StarletteRoute)]
    here = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in here for method in route.methods or ()})


async def _on_query_error(request: Request, error: Exception) -> Response:
    """Responds to an invalid query; bodies are validated by the handlers."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    name = str(first["loc"][-1])
    reason = f"{name}: {first['msg']}, got {str(first['input'])!r:.60}"
    return error_response(ApiError(400, reason, name), request.scope)


async def _on_client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # for logs; the client is gone


async def _on_fault(request: Request, error: Exception) -> Response:
    reason = "internal server error; the server log has the reason"
    return error_response(ApiError(500, reason), request.scope)


_ON_ERRORS = {
    ApiError: _on_api_error,
    HTTPException: _on_http_error,
    RequestValidationError: _on_query_error,
    ClientLeft: _on_client_left,
    ClientDisconnect: _on_client_left,
    Exception: _on_fault,
}


@dataclass(frozen=True)
class Apps:
    """Application of each listener.

    Attributes:
      clients: API routes; all routes if there is no admin listener.
      admin: Metrics and admin routes; None if `clients` has them.
    """

    clients: ASGIApp
    admin: ASGIApp | None


def make_apps(
    client: EngineClient,
    tokenizer: Tokenizer | None,
    renderer: Renderer | None,
    opener: ImageDecoderPool | None,
    grammars: GrammarChecks,
    tracing: Sequence[RequestObserver],
    has_admin_listener: bool,
) -> Apps:
    """Builds the applications for a connected engine.

    Args:
      client: Connection to the engine.
      tokenizer: Tokenizer; None if the checkpoint has none.
      renderer: Renderer of the chat template; None without one.
      opener: Decoder of images; None if the model does not support images.
      grammars: Compiler of grammars.
      tracing: Further observers of finished requests, besides log and metrics.
      has_admin_listener: Metrics and admin routes have a listener of their own.
    """
    facts = client.facts
    metrics = ServerMetrics(facts.model_name)
    watchers = (metrics, RequestLog(tokenizer, facts.observing.log_requests), *tracing)
    work = BodyParsingThread()
    reader = PromptReader(tokenizer, renderer, opener, facts.limits, facts.max_open_requests, work)
    generator = Generator(client, reader, grammars, tokenizer, metrics, watchers)
    routes = Routes(generator, metrics, opener, work)
    tokens = TokenRoutes(facts, reader, tokenizer, work)
    messages = MessagesRoutes(generator, reader, work)
    apis = (*_model_routes(routes, tokens), *_messages_routes(messages))
    apis = (*apis, *_responses_routes(ResponsesRoutes(generator, work)))
    model = (*apis, *_state_routes(routes), *_page_routes())
    if facts.serves_kv_transfer:
        model = (*model, _transfer_route(KVTransferRoutes(client, metrics, work)))
    admin = (*_metrics_routes(routes), *_admin_routes(AdminRoutes(client, tokenizer)))
    names, origins = facts.host_names, facts.allowed_origins
    if not has_admin_listener:
        return Apps(_app((*model, *admin), facts, names, origins), None)
    admin_routes = (*admin, *_health_routes(routes))
    clients = _app(model, facts, names, origins)
    return Apps(clients, _app(admin_routes, facts, facts.admin_host_names, origins=()))


def _app(
    served: Sequence[Route],
    facts: ServerInfo,
    names: Collection[str] | None,
    origins: Collection[str],
) -> ASGIApp:
    """Builds an application with routes, allowed host names and allowed origins."""
    app = _with_routes(served, facts.api_key is not None)
    for kind, handler in _ON_ERRORS.items():
        app.add_exception_handler(kind, handler)
    keys = (facts.api_key, facts.admin_api_key, facts.transfer_secret)
    keys = () if facts.api_key is None else keys
    return gated(BodyLimit(app), keys, names, origins)


def _with_routes(served: Sequence[Route], has_key: bool) -> FastAPI:
    """Builds an application with routes, and the route of `/openapi.json`."""
    app = FastAPI(title="Tandem", version=VERSION, openapi_url=None)
    schema: dict[str, Any] = {}

    async def openapi() -> Response:
        """GET /openapi.json."""
        return json_response(schema)

    page = Route(path=DOCUMENT_PATH, method="GET", handler=openapi, media_type="application/json")
    for route in (*served, page):
        route.add_to(app)
    schema |= document(app, served, has_key)
    return app


def _model_routes(routes: Routes, tokens: TokenRoutes) -> Iterator[Route]:
    """Routes of the OpenAI-compatible API."""
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
    yield Route(
        path="/v1/models",
        method="GET",
        handler=routes.models,
        answer=answers.Models,
        other_answer=anthropic.ModelPage,
    )
    yield Route(
        path="/v1/models/{name:path}",
        method="GET",
        handler=routes.model,
        answer=answers.ModelCard,
        other_answer=anthropic.ModelInfo,
        errors=(404,),
    )


def _messages_routes(routes: MessagesRoutes) -> Iterator[Route]:
    """Routes of Anthropic's Messages API."""
    yield Route(
        path=MESSAGES_PATH,
        method="POST",
        handler=routes.create,
        bodies=(MessagesRequest,),
        answer=anthropic.Message,
        event=anthropic.MessageEvent,
        error=anthropic.AnthropicError,
        errors=(404, 503, OVERLOADED),
    )
    yield Route(
        path="/v1/messages/count_tokens",
        method="POST",
        handler=routes.count_tokens,
        bodies=(TokenCountRequest,),
        answer=anthropic.TokenCount,
        error=anthropic.AnthropicError,
        errors=(404, 503),
    )


def _responses_routes(routes: ResponsesRoutes) -> Iterator[Route]:
    """Routes of the Responses API."""
    yield Route(
        path="/v1/responses",
        method="POST",
        handler=routes.create,
        bodies=(ResponsesRequest,),
        answer=responses.ResponseObject,
        event=responses.ResponseEvent,
        errors=(404, 409, 503),
    )
    stored = "/v1/responses/{response_id}"
    for path, method, handler, answer in (
        (stored, "GET", routes.retrieve, responses.ResponseObject),
        (
            "/v1/responses/{response_id}/input_items",
            "GET",
            routes.input_items,
            listing.InputItemPage,
        ),
        (stored, "DELETE", routes.delete, responses.DeletedResponse),
        ("/v1/responses/{response_id}/cancel", "POST", routes.cancel, responses.ResponseObject),
    ):
        yield Route(path=path, method=method, handler=handler, answer=answer, errors=(400, 404))


def _state_routes(routes: Routes) -> Iterator[Route]:
    """Routes about the server and the model."""
    yield Route(
        path="/capabilities",
        method="GET",
        handler=routes.capabilities,
        answer=answers.Capabilities,
    )
    yield Route(path="/version", method="GET", handler=routes.version, answer=answers.ServerVersion)
    yield from _health_routes(routes)


def _health_routes(routes: Routes) -> Iterator[Route]:
    """Health routes of a listener."""
    for path in HEALTH_PATHS:
        yield Route(path=path, method="GET", handler=routes.health, errors=(503,))
    yield Route(path=LIVE_PATH, method="GET", handler=routes.live, errors=(503,))


def _metrics_routes(routes: Routes) -> Iterator[Route]:
    """Metrics route."""
    page = CONTENT_TYPE_LATEST.partition(";")[0]
    yield Route(path="/metrics", method="GET", handler=routes.metrics, media_type=page)


def _admin_routes(admin: AdminRoutes) -> Iterator[Route]:
    """Admin routes."""
    corpora, adapters = answers.CorpusList, answers.AdapterList
    for path, handler, body, answer in (
        ("/add_external_corpus", admin.add_corpus, AddCorpus, corpora),
        ("/remove_external_corpus", admin.remove_corpus, RemoveCorpus, corpora),
        ("/load_lora_adapter", admin.load_adapter, AdapterToLoad, adapters),
        ("/unload_lora_adapter", admin.unload_adapter, AdapterToUnload, adapters),
    ):
        yield Route(
            path=path,
            method="POST",
            handler=handler,
            bodies=(body,),
            answer=answer,
            errors=(503,),
        )
    yield Route(
        path="/list_external_corpora",
        method="GET",
        handler=admin.list_corpora,
        answer=corpora,
        errors=(503,),
    )


def _transfer_route(routes: KVTransferRoutes) -> Route:
    """Route of disaggregated prefill."""
    return Route(
        path="/kv_transfer",
        method="POST",
        handler=routes.transfer,
        bodies=(KVTransferRequest,),
        answer=answers.KVTicket,
        errors=(404, 503),
    )


def _page_routes() -> Iterator[Route]:
    """Routes of the playground."""
    yield Route(path="/", method="GET", handler=playground.page, media_type="text/html")
    yield Route(
        path="/playground/{name}",
        method="GET",
        handler=playground.part,
        media_type="text/*",
        errors=(404,),
    )


def gated(
    app: ASGIApp,
    keys: Collection[str | None],
    names: Collection[str] | None,
    origins: Collection[str],
) -> ASGIApp:
    """Wraps an application with the middleware that runs before routing.

    Args:
      app: The application.
      keys: Valid API keys, without those that are None; empty if no key is required.
      names: Allowed host names; None for any.
      origins: Allowed origins.
    """
    if keys:
        app = ApiKeyMiddleware(app, [key for key in keys if key])
    if origins:
        app = Origins(app, origins)
    if names is not None:
        app = HostMiddleware(app, names)
    return HeaderSizeLimit(HttpNormalization(app))
