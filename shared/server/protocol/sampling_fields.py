"""Sampling fields of a request, the same for every API and for Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

SAME_NAMES = (
    *("temperature", "top_p", "top_k", "min_p"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("min_tokens", "stop_token_ids", "ignore_eos", "logit_bias"),
)
"""Fields with the same names in OpenAI-compatible requests and in Python."""


@dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """Sampling fields of a request; None: the model's default.

    Attributes:
      max_tokens: Maximum output tokens; None: `default_tokens`.
      default_tokens: Default of `max_tokens`; None: up to the context length.
      is_clamped: A `max_tokens` beyond the context length is reduced instead of rejected.
      logprobs: Number of top logprobs per output token; None: no logprobs.
      prompt_logprobs: Number of top logprobs per prompt token; None: no logprobs.
      max_drafts: Maximum draft tokens per step; None: no limit.
      returns_trace: The response includes a step trace.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    max_tokens: int | None = None
    default_tokens: int | None = None
    is_clamped: bool = False
    min_tokens: int | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    max_drafts: int | None = None
    returns_trace: bool = False
