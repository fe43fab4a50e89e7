"""Error responses in the format of the API that was called."""

from __future__ import annotations

import json

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import Scope

from shared.server.protocol.errors import ApiError, is_anthropic


def error_response(error: ApiError, scope: Scope) -> Response:
    """Returns the response of an error, also of one before routing.

    Args:
      error: The error.
      scope: ASGI scope of the request.
    """
    if is_anthropic(scope["path"], Headers(scope=scope)):
        status, body = error.anthropic_status, error.to_anthropic_json()
    else:
        status, body = error.status, error.to_json()
    response = Response(json.dumps(body), status, media_type="application/json")
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(error.retry_after_s)
    return response
