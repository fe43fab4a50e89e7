"""ASGI application of the router: own routes, forwarded routes, errors."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.process.logs import log
from shared.router.aggregation import AggregateRoutes
from shared.router.forwarding import Forwarder
from shared.server.api.error_responses import error_response
from shared.server.api.transport import BodyLimit
from shared.server.protocol.errors import ApiError

FORWARDED = ("/v1/", "/playground/")
"""Beginnings of paths that are forwarded."""

FORWARDED_PATHS = ("/", "/tokenize", "/detokenize", "/openapi.json", "/version")

TRACE = re.compile(r"/v1/requests/[^/]+/trace")

Handler = Callable[[Request], Awaitable[Response]]


class RouterApp:
    """Application of one listener.

    Args:
      routes: Handlers of the router's own GET routes, by path.
      aggregate: Their state.
      forwarder: Receives other requests; None if this listener forwards nothing.
    """

    def __init__(
        self, routes: Mapping[str, Handler], aggregate: AggregateRoutes, forwarder: Forwarder | None
    ) -> None:
        self._routes, self._aggregate, self._forwarder = routes, aggregate, forwarder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers or forwards a request; an error before the response is one in OpenAI's format."""
        has_begun = False

        async def noted(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._answer(scope, receive, noted)
        except ApiError as error:
            if has_begun:
                return  # the connection is closed before the end of the body
            await error_response(error, scope)(scope, receive, send)
        except Exception:
            log.exception("the router failed on a request")
            if not has_begun:
                error = ApiError(500, "internal error of the router; its log has the reason")
                await error_response(error, scope)(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        handler = self._aggregate.trace if TRACE.fullmatch(path) else self._routes.get(path)
        if handler is not None and method == "GET":
            response = await handler(Request(scope, receive))
            await response(scope, receive, send)
        elif self._forwarder is not None and (
            path in FORWARDED_PATHS or path.startswith(FORWARDED)
        ):
            self._aggregate.check_accepts()
            await self._forwarder(scope, receive, send)
        else:
            message = f"{method} {path:.100} is not forwarded; send it to the address of a server"
            raise ApiError(404, message, code="not_forwarded")


def router_apps(
    aggregate: AggregateRoutes, forwarder: Forwarder, has_admin_listener: bool
) -> tuple[ASGIApp, ASGIApp | None]:
    """Returns the applications of the client listener and of any admin listener."""
    of_health: dict[str, Handler] = {
        "/live": aggregate.live,
        "/health": aggregate.health,
        "/ping": aggregate.health,
    }
    of_admin = {"/metrics": aggregate.metrics}
    of_clients: dict[str, Handler] = {
        "/v1/models": aggregate.models,
        "/capabilities": aggregate.capabilities,
        **of_health,
    }
    if not has_admin_listener:
        return BodyLimit(RouterApp({**of_clients, **of_admin}, aggregate, forwarder)), None
    admin = RouterApp({**of_admin, **of_health}, aggregate, None)
    return BodyLimit(RouterApp(of_clients, aggregate, forwarder)), admin
