"""API errors, in OpenAI's and Anthropic's format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

VERSION_HEADER = "anthropic-version"
"""Header of every request of Anthropic's clients."""

MESSAGES_PATH = "/v1/messages"

OVERLOADED = 529
"""Status of Anthropic's API if the queue is full."""

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED: "overloaded_error",
}
"""Types by status; others are `invalid_request_error`, from 500 on `api_error`."""


_ANTHROPIC_CODES = ("thread_unsupported_request",)
"""Codes of Anthropic's API; its clients read them."""


class ApiError(Exception):
    """Error response.

    Attributes:
      status: HTTP status.
      message: One sentence.
      param: The invalid field, or None.
      code: Machine-readable code, or None.
      retry_after_s: Value of the Retry-After header in seconds, or None.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def to_json(self) -> dict[str, Any]:
        """Returns the body of the response in OpenAI's format."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def anthropic_status(self) -> int:
        """HTTP status of the error in Anthropic's API."""
        return OVERLOADED if self.code == "queue_full" else self.status

    def to_anthropic_json(self) -> dict[str, Any]:
        """Returns the body of the response in Anthropic's format.

        The message begins with the path of the invalid field, as in Anthropic's API.
        """
        status = self.anthropic_status
        other = "api_error" if status >= 500 else "invalid_request_error"
        message = self.message
        if self.param is not None:
            path = self.param.replace("[]", "").replace("[", ".").replace("]", "")
            message = f"{path}: {message.removeprefix(self.param).lstrip(' :')}"
        error: dict[str, Any] = {"type": _ANTHROPIC_TYPES.get(status, other), "message": message}
        if self.code in _ANTHROPIC_CODES:
            error["details"] = {"error_code": self.code}
        return {"type": "error", "error": error}


def is_anthropic(path: str, headers: Mapping[str, str]) -> bool:
    """Returns True if a request is one of Anthropic's API.

    Args:
      path: Path of the request.
      headers: Headers of the request, with names in lower case.
    """
    is_messages = path == MESSAGES_PATH or path.startswith(MESSAGES_PATH + "/")
    return is_messages or VERSION_HEADER in headers
