"""CORS middleware (Fetch standard)."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.options.server import ANY
from shared.server.api.access_middleware import refuse
from shared.server.protocol.errors import ApiError

METHODS = "GET, HEAD, POST, DELETE"
KNOWN_FOR_S = "600"  # cache time of a preflight response


class Origins:
    """Allows pages of some origins to read responses, without credentials.

    A browser sends a preflight request before JSON or a key. It has no API key, so this middleware
    runs before the check of keys, and after the check of host names.

    Args:
      app: Application that receives all requests except preflight requests.
      allowed: Allowed origins (scheme, host and port), or `ANY`.
    """

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app, self._allowed = app, allowed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application, or responds to a preflight request."""
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        is_allowed = bool(origin) and (ANY in self._allowed or origin.lower() in self._allowed)

        async def with_permission(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = MutableHeaders(scope=message)
                given.add_vary_header("Origin")
                if is_allowed:
                    given["access-control-allow-origin"] = origin
                    given["access-control-expose-headers"] = "retry-after"
            await send(message)

        if scope["method"] != "OPTIONS" or "access-control-request-method" not in headers:
            await self._app(scope, receive, with_permission)
        elif is_allowed:
            requested = headers.get("access-control-request-headers", "")
            await Response(status_code=204, headers=_permission(requested))(
                scope, receive, with_permission
            )
        else:
            reason = f"origin {origin!r:.100} is not allowed; add it to --allowed-origins"
            error = ApiError(403, reason, code="origin_not_allowed")
            await refuse(error, scope, receive, with_permission)


def _permission(requested: str) -> dict[str, str]:
    """Returns the CORS headers of a preflight response; any requested header is allowed."""
    return {
        "access-control-allow-methods": METHODS,
        "access-control-allow-headers": requested,
        "access-control-max-age": KNOWN_FOR_S,
    }
