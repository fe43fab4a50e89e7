"""ASGI middleware before all routes: allowed hosts, API key and header size.

The check of hosts prevents DNS rebinding: a site may resolve its own name to 127.0.0.1, and the
browser then treats the site's pages as pages of this server. The browser sends the name as Host.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.process.address import is_local
from shared.server.api.error_responses import error_response
from shared.server.protocol.errors import ApiError

MAX_HEAD_BYTES = 1 << 14
"""Maximum bytes of the request line and the headers."""

_KEY_HEADERS = ("x-api-key", "api-key")

_BASIC = 'Basic realm="Tandem", charset="UTF-8"'

LIVE_PATH = "/live"
HEALTH_PATHS = ("/health", "/ping")  # /ping: SageMaker
OPEN_PATHS = (LIVE_PATH, *HEALTH_PATHS)
"""Routes without a key, for probes; launchers of agents poll them before they have one."""


class HostMiddleware:
    """Rejects requests whose Host header is not allowed.

    A request without a Host passes: no browser sends one.

    Args:
      app: Application that receives the other requests.
      names: Allowed names besides the machine's own names.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application, or sends an error response."""
        name = _name(Headers(scope=scope).get("host", "localhost"))
        if is_local(name) or name in self._names:
            await self._app(scope, receive, send)
            return
        message = f"host {name!r:.100} is not allowed; add it to --allowed-hosts"
        await refuse(ApiError(403, message, code="host_not_allowed"), scope, receive, send)


class ApiKeyMiddleware:
    """Rejects requests without a valid API key.

    Args:
      app: Application that receives the other requests.
      keys: Valid keys. Routes may check for a particular key on their own.
    """

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application, or sends an error response."""
        headers = Headers(scope=scope)
        given = sent_keys(headers)
        if browsers := password(headers.get("authorization", "")):
            given.append(browsers)
        if matches_any_key(given, self._keys) or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        message = "the API key is missing or invalid; send it as a bearer token"
        # Browsers prompt for the key as a password.
        challenge = _BASIC if "text/html" in headers.get("accept", "") else "Bearer"
        error = ApiError(401, message, code="invalid_api_key")
        await refuse(error, scope, receive, send, challenge)


class HeaderSizeLimit:
    """Rejects requests whose headers are too large."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application, or sends an error response."""
        target = len(scope["raw_path"]) + len(scope["query_string"])
        if (
            target + sum(len(name) + len(value) for name, value in scope["headers"])
            > MAX_HEAD_BYTES
        ):
            await refuse(headers_too_large(), scope, receive, send)
            return
        await self._app(scope, receive, send)


def headers_too_large() -> ApiError:
    """Returns the error for headers that are too large."""
    message = f"the request headers exceed {MAX_HEAD_BYTES} bytes"
    return ApiError(431, message, code="request_head_too_large")


def sent_keys(headers: Headers) -> list[bytes]:
    """Returns the keys of the headers: bearer token, `x-api-key` (Anthropic), `api-key` (Azure)."""
    scheme, space, token = headers.get("authorization", "").partition(" ")
    bearer = token if scheme.lower() == "bearer" else f"{scheme}{space}{token}"
    # Starlette reads a header as latin-1; clients send a key as UTF-8.
    return [key.encode("latin-1") for key in (bearer, *map(headers.get, _KEY_HEADERS)) if key]


def matches_any_key(given: Collection[bytes], keys: Collection[str]) -> bool:
    """Returns True if one of the values is a key; compares in constant time."""
    matches = [hmac.compare_digest(each, key.encode()) for each in given for key in keys]
    return any(matches)


def password(authorization: str) -> bytes:
    """Returns the password of Basic authentication, with any user name; empty without one."""
    scheme, _, encoded = authorization.partition(" ")
    if scheme.lower() != "basic":
        return b""
    try:
        return base64.b64decode(encoded, validate=True).partition(b":")[2]
    except ValueError:
        return b""


async def refuse(
    error: ApiError, scope: Scope, receive: Receive, send: Send, challenge: str | None = None
) -> None:
    """Sends an error response; `challenge` is the value of WWW-Authenticate."""
    answer = error_response(error, scope)
    answer.headers["connection"] = "close"  # the client may still be sending a body
    if challenge is not None:
        answer.headers["www-authenticate"] = challenge
    await answer(scope, receive, send)


def _name(host: str) -> str:
    """Returns the name or address in a Host header, without the port."""
    address, bracket, _ = host.removeprefix("[").partition("]")
    name = address if bracket else host.partition(":")[0]
    return name.lower().removesuffix(".")
