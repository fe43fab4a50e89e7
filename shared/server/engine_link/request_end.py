"""Summary of a finished request, for log, metrics and traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel


@dataclass(frozen=True, kw_only=True)
class RequestSummary:
    """Summary of a request that the engine has received, made when its response ends.

    Attributes:
      request_id: The `id` of the response.
      endpoint: "completions" or "chat".
      model: Served name of the model.
      prompt_tokens, cached_tokens, image_tokens, output_tokens: Totals of all prompts and choices.
      verify_steps, accept_length: Acceptance statistics, same as in the response.
      finish_reasons: Finish reason of each choice; "abort" if it was unfinished when the client
        disconnected, "error" if the engine failed on it.
      began_ns: Arrival in nanoseconds since 1970.
      first_token_s, total_s: Seconds from the arrival to the first token, if any, and to the end.
      headers: HTTP headers with the caller's trace.
      request: Body of the request.
      outputs: Tokens of each choice.
      ignored: Request fields without effect.
      tool_call_format: Format in which calls are parsed; None: no parser.
      malformed_tool_calls: Calls of all choices that were returned as text, in whole or in part.
    """

    request_id: str
    endpoint: str
    model: str
    prompt_tokens: int
    cached_tokens: int
    image_tokens: int
    output_tokens: int
    verify_steps: int
    accept_length: float
    finish_reasons: tuple[str, ...]
    began_ns: int
    first_token_s: float | None
    total_s: float
    headers: Mapping[str, str]
    request: BaseModel
    outputs: Sequence[Sequence[int]]
    ignored: tuple[str, ...]
    tool_call_format: str | None
    malformed_tool_calls: int


class RequestObserver(Protocol):
    """Observer of finished requests."""

    def on_request_end(self, end: RequestSummary) -> None:
        """Handles the end of a request."""
        ...


class ClosableWatcher(RequestObserver, Protocol):
    """Observer with pending work that `close` completes."""

    def close(self) -> None:
        """Completes pending work at shutdown."""
        ...
