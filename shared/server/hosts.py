"""Which names a server answers to, so that a web page cannot make a browser speak to it.

A page of any site may let its site's name stand for 127.0.0.1; to the browser it then is a page of
the server on that machine. The name is what the browser writes into the request's Host.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from shared.process.address import is_local
from shared.server.errors import ApiError


class HostCheck:
    """Refuses requests whose Host is a name that the server does not answer to.

    A request without a Host passes: no browser sends one.

    Args:
      names: What the server answers to beside the machine's own names.
    """

    def __init__(self, app: ASGIApp, names: Collection[str]) -> None:
        self._app, self._names = app, names

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the application, or answers in its place."""
        name = _name(Headers(scope=scope).get("host", "localhost"))
        if is_local(name) or name in self._names:
            await self._app(scope, receive, send)
            return
        message = f"this server does not answer to {name!r:.100}; name it with --allowed-hosts"
        error = ApiError(403, message, code="host_not_allowed")
        refusal = Response(json.dumps(error.to_json()), 403, media_type="application/json")
        await refusal(scope, receive, send)


def _name(host: str) -> str:
    """The name or address in a Host, without its port."""
    address, bracket, _ = host.removeprefix("[").partition("]")
    name = address if bracket else host.partition(":")[0]
    return name.lower().removesuffix(".")
