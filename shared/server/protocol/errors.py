"""API errors in OpenAI's format."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """Error response with OpenAI's error object.

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
        """Returns the body of the response."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}
