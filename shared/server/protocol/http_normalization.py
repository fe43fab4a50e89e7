"""ASGI middleware that normalises HEAD requests and absolute-form request targets."""

from __future__ import annotations

import re
from urllib.parse import unquote

from starlette.types import ASGIApp, Receive, Scope, Send

_ABSOLUTE = re.compile(rb"https?://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)


class HttpNormalization:
    """Middleware that normalises the method and the target of a request.

    HEAD is handled as GET, and the connection sends no body. The host of an absolute-form target
    replaces the Host header (RFC 9112, 3.2.2).
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application."""
        usual = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        if absolute := _ABSOLUTE.fullmatch(scope["raw_path"]):
            host, path = absolute[1], absolute[2] or b"/"
            others = [field for field in scope["headers"] if field[0] != b"host"]
            usual = {**usual, "raw_path": path, "path": unquote(path.decode("ascii"))}
            usual["headers"] = [(b"host", host), *others]
        await self._app(usual, receive, send)
