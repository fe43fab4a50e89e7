"""Result types of the Python API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shared.server.completions.logprobs import ScoredToken
from shared.text.parsing.delta import ToolCallDelta


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One output of a prompt.

    Attributes:
      index: Index among the outputs of the prompt.
      text: Generated text; without reasoning and tool calls if their parsers are on.
      reasoning: Reasoning found by `reasoning_parser`.
      tool_calls: Tool calls found by `tool_call_parser`.
      token_ids: All generated tokens, including the stop token.
      finish_reason: "stop", "length" or "tool_calls".
      logprobs: Logprobs of each token, before penalties, bias and filters; empty unless requested.
      accept_length: Mean number of tokens per verify step, including the bonus token.
      accept_length_histogram: Entry i counts the steps that accepted i drafts.
      steps: Trace of every step, as in `/v1/requests/ID/trace`; empty unless requested.
    """

    index: int
    text: str
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]
    token_ids: list[int]
    finish_reason: str
    logprobs: list[ScoredToken]
    accept_length: float
    accept_length_histogram: list[int]
    steps: list[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """Prompt and its outputs.

    Attributes:
      prompt: Text of the prompt; "" if the prompt was passed as token ids.
      prompt_token_ids: Tokens of the prompt.
      prompt_logprobs: Logprobs of each prompt token; empty unless requested.
      cached_tokens: Number of prompt tokens found in the prefix cache.
      outputs: Outputs, one for each of `SamplingParams.n`.
    """

    prompt: str
    prompt_token_ids: list[int]
    prompt_logprobs: list[ScoredToken]
    cached_tokens: int
    outputs: list[CompletionOutput]

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text


@dataclass(frozen=True, kw_only=True)
class StreamChunk:
    """Increment of a streamed output, one for each step.

    Attributes:
      index: Index of the output.
      text, reasoning, tool_calls: New text, which may lag the tokens.
      token_ids: New tokens.
      logprobs: Logprobs of the new tokens; empty unless requested.
      step: Trace of the step; None unless requested.
      finish_reason: Finish reason, set in the last part of an output.
    """

    index: int
    text: str
    reasoning: str
    tool_calls: tuple[ToolCallDelta, ...]
    token_ids: list[int]
    logprobs: list[ScoredToken]
    step: dict[str, Any] | None
    finish_reason: str | None
