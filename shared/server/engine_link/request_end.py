"""Summary of a finished request, for log, metrics and traces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pydantic import BaseModel


@dataclass(frozen=True, kw_only=True)
class RequestSummary:
    """A request that the engine was given, once its answer has ended.

    Attributes:
      request_id: As the answer names it.
      endpoint: "completions" or "chat".
      model: Served name of the model.
      prompt_tokens, cached_tokens, image_tokens, output_tokens: Of all prompts and choices.
      verify_steps, accept_length: What speculation did, as the answer tells it.
      finish_reasons: Of the choices; "abort" of those that had not ended when the client left,
        "error" of those that the engine could not serve.
      began_ns: When it arrived, nanoseconds since 1970.
      first_token_s, total_s: Seconds from then to its first token, if there was one, and its end.
      headers: Those of the HTTP request that name the caller's trace.
      asked: The request's body.
      outputs: Tokens of each choice.
      ignored: Fields of the request that had no effect.
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
    asked: BaseModel
    outputs: Sequence[Sequence[int]]
    ignored: tuple[str, ...]


class RequestObserver(Protocol):
    """Observer of finished requests."""

    def on_request_end(self, end: RequestSummary) -> None:
        """A request has ended."""
        ...


class ClosableWatcher(RequestObserver, Protocol):
    """One that keeps something for later."""

    def close(self) -> None:
        """Nothing ends any more."""
        ...
