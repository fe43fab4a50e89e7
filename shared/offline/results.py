"""What an answer is in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.server.delta import ToolCall
from shared.server.logprobs import TokenLogprob


@dataclass(frozen=True, kw_only=True)
class Output:
    """One answer of a prompt.

    Attributes:
      index: Its number among the prompt's answers.
      text: What was said; without reasoning and calls where the start names a parser of them.
      reasoning: What `reasoning_parser` found.
      tool_calls: What `tool_call_parser` found.
      token_ids: All of its tokens, the one that ended it too.
      finish_reason: "stop", "length" or "tool_calls".
      logprobs: Of each token, before penalties, bias and filters; empty unless asked for.
      accept_length: Tokens of a verify step on average, with the bonus token.
      accepted_histogram: Entry i counts the steps that accepted i drafts.
      steps: Every step as `/v1/requests/ID/trace` tells it; empty unless asked for.
    """

    index: int
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprob]
    accept_length: float
    accepted_histogram: list[int]
    steps: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """A prompt and its answers.

    Attributes:
      prompt: Its text; "" of a prompt that was given as tokens.
      prompt_token_ids: Its tokens.
      prompt_logprobs: Of each of them; empty unless asked for.
      cached_tokens: How many of them the prefix cache had.
      outputs: One for each of `SamplingParams.n`.
    """

    prompt: str
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob]
    cached_tokens: int
    outputs: list[Output]

    @property
    def text(self) -> str:
        """Of the first answer."""
        return self.outputs[0].text


@dataclass(frozen=True, kw_only=True)
class Part:
    """What a step added to a stream.

    Attributes:
      index: Of the answer.
      text, reasoning, tool_calls: What is said anew; may lag behind the tokens.
      token_ids: New tokens.
      logprobs: Of these tokens; empty unless asked for.
      step: What the step did; None unless asked for.
      finish_reason: Set in the last part of an answer.
    """

    index: int
    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    token_ids: list[int]
    logprobs: list[TokenLogprob]
    step: dict[str, Any] | None
    finish_reason: str | None
