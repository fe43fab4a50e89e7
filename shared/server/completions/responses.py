"""Responses in OpenAI's format: whole, and as stream events."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from shared.engine.request import Event
from shared.server.completions.choice import Choice, ChoiceUpdate, Speculation
from shared.server.completions.logprobs import (
    ScoredToken,
    TokenNames,
    cut,
    for_chat,
    for_completion,
    for_prompt,
)
from shared.server.completions.traces import TraceRecorder, Traces, step_json
from shared.server.parsing.delta import Delta, ToolCallDelta
from shared.server.protocol.response_types import STREAM_END


class ChoiceFormat(Protocol):
    """Format of an endpoint's choices.

    Attributes:
      prefix: Start of response ids.
      whole_object: Field `object` of a response.
      chunk_object: Field `object` of a stream event.
      has_one_prompt: Prompt logprobs are a field of the response, not of each choice.
    """

    prefix: str
    whole_object: str
    chunk_object: str
    has_one_prompt: bool

    def whole(self, message: Delta) -> dict[str, Any]:
        """Returns the message fields of a complete choice."""
        ...

    def part(self, delta: Delta, is_first: bool) -> dict[str, Any]:
        """Returns the message fields of a choice in a stream event."""
        ...

    def logprobs(self, entries: list[ScoredToken], names: TokenNames) -> dict[str, Any]:
        """Returns the `logprobs` field of a choice."""
        ...


class CompletionForm:
    """Choice format of /v1/completions."""

    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    has_one_prompt = False

    def whole(self, message: Delta) -> dict[str, Any]:
        """Returns `text`."""
        return {"text": message.text}

    def part(self, delta: Delta, is_first: bool) -> dict[str, Any]:
        """Returns the increment of `text`."""
        return {"text": delta.text}

    def logprobs(self, entries: list[ScoredToken], names: TokenNames) -> dict[str, Any]:
        """Returns lists of equal length."""
        return for_completion(entries, names)


class ChatForm:
    """Choice format of /v1/chat/completions."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    has_one_prompt = True

    def whole(self, message: Delta) -> dict[str, Any]:
        """Returns `message`."""
        calls = [_call(call) for call in message.tool_calls]
        return {"message": {"role": "assistant", **_message_fields(message, calls)}}

    def part(self, delta: Delta, is_first: bool) -> dict[str, Any]:
        """Returns `delta`, with the role in the first event of a choice."""
        role = {"role": "assistant"} if is_first else {}
        calls = [{"index": call.index, **_call(call)} for call in delta.tool_calls]
        return {"delta": {**role, **_message_fields(delta, calls)}}

    def logprobs(self, entries: list[ScoredToken], names: TokenNames) -> dict[str, Any]:
        """Returns `content`, an object per token."""
        return for_chat(entries, names)


def _message_fields(delta: Delta, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the fields of a message; reasoning and tool calls only if there are any."""
    text = delta.text or (None if calls or delta.reasoning else "")
    reasoning = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
    return {"content": text, **reasoning, **({"tool_calls": calls} if calls else {})}


def _call(call: ToolCallDelta) -> dict[str, Any]:
    """Returns the JSON of a tool call or of its increment."""
    if not call.call_id:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.call_id, "type": "function", "function": function}


@dataclass
class ResponseWriter:
    """Writer of one response.

    Attributes:
      form: Format of the endpoint.
      model: Served name of the model.
      num_prompt_tokens: Tokens of all prompts, each counted once.
      num_image_tokens: Image tokens among them.
      choices: All choices, prompt by prompt.
      choices_of_prompt: Number of choices per prompt.
      names: Text of single tokens in logprobs.
      shows_tokens: Choices have `token_ids`.
      shows_logprobs: Choices have `logprobs`.
      shows_trace: Stream events have `trace`.
      num_echoed: Top logprobs per token of an echoed prompt; None: no logprobs.
      num_of_prompt: Top logprobs per token in `prompt_logprobs`; None: no such field.
      ignored: Request fields without effect.
      trace: Step trace of the request; None if not requested.
    """

    form: ChoiceFormat
    model: str
    num_prompt_tokens: int
    num_image_tokens: int
    choices: list[Choice]
    choices_of_prompt: int
    names: TokenNames
    shows_tokens: bool
    shows_logprobs: bool
    shows_trace: bool
    num_echoed: int | None = None
    num_of_prompt: int | None = None
    ignored: tuple[str, ...] = ()
    trace: TraceRecorder | None = None
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)
    _num_ended: int = 0

    @property
    def name(self) -> str:
        """The `id` of the response."""
        return self.form.prefix + self._id

    @property
    def ended(self) -> bool:
        """True if every choice has ended."""
        return self._num_ended == len(self.choices)

    def take(self, index: int, event: Event) -> ChoiceUpdate:
        """Adds an event to a choice that has not ended."""
        piece = self.choices[index].take(event)
        self._num_ended += piece.finish_reason is not None
        if self.trace is None or event.step is None:
            return piece
        step = step_json(event.step, piece.tokens, piece.texts, self.names)
        self.trace.add(index, step, piece.finish_reason)
        return replace(piece, step=step)

    def close(self, reason: str) -> None:
        """Sets the finish reason of unfinished choices in the trace."""
        if self.trace is not None:
            self.trace.end(reason)

    def follow(self, traces: Traces, drafter: str | None) -> None:
        """Starts the step trace of the request in the store."""
        head = {
            "created": self._created,
            "model": self.model,
            "speculative_algorithm": drafter,
        }
        self.trace = traces.open(self.name, head, len(self.choices))

    def whole(self, messages: list[Delta]) -> dict[str, Any]:
        """Returns the body of a response without streaming."""
        pieces = [
            ChoiceUpdate(
                message,
                choice.tokens,
                choice.logprobs,
                choice.finish_reason,
                prompt=choice.prompt,
            )
            for message, choice in zip(messages, self.choices, strict=True)
        ]
        choices = [
            self._choice(index, self.form.whole(piece.delta), piece)
            for index, piece in enumerate(pieces)
        ]
        head = self._head(self.form.whole_object)
        beside = {**self._beside(0, pieces[0]), **self._ignored()}
        return {**head, **beside, "choices": choices, **self.totals()}

    def chunk(self, index: int, piece: ChoiceUpdate) -> dict[str, Any]:
        """Returns the stream event of one update of a choice.

        The first event of the stream has `ignored`.
        """
        ignored = {} if self._begun else self._ignored()
        part = self.form.part(piece.delta, index not in self._begun)
        self._begun.add(index)
        choice = self._choice(index, part, piece)
        head = self._head(self.form.chunk_object)
        return {**head, **self._beside(index, piece), **ignored, "choices": [choice]}

    def matters(self, index: int, piece: ChoiceUpdate) -> bool:
        """Returns True if a stream sends an update; empty ones are sent only with details."""
        shows_more = self.shows_tokens or self.shows_logprobs or self.shows_trace
        return shows_more or index not in self._begun or bool(piece.delta or piece.finish_reason)

    def usage_chunk(self) -> dict[str, Any]:
        """Returns the last event with `stream_options.include_usage`."""
        return {**self._head(self.form.chunk_object), "choices": [], **self.totals()}

    @property
    def num_output_tokens(self) -> int:
        """Output tokens of all choices."""
        return sum(len(choice.tokens) for choice in self.choices)

    @property
    def speculation(self) -> Speculation:
        """Acceptance counts of all choices."""
        total = Speculation.empty(len(self.choices[0].speculation.histogram) - 1)
        for choice in self.choices:
            total.add(choice.speculation)
        return total

    def totals(self) -> dict[str, Any]:
        """Returns `usage` and `speculative`, summed over the choices."""
        completion = self.num_output_tokens
        usage = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt_tokens + completion,
            "prompt_tokens_details": {
                "cached_tokens": self.num_cached_tokens,
                "image_tokens": self.num_image_tokens,
            },
        }
        return {"usage": usage, "speculative": self.speculation.to_json()}

    @property
    def num_cached_tokens(self) -> int:
        """Cached tokens of all prompts; of a prompt with several choices, those of the first."""
        return sum(choice.cached_tokens for choice in self.choices[:: self.choices_of_prompt])

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.name, "object": kind, "created": self._created, "model": self.model}

    def _ignored(self) -> dict[str, Any]:
        return {"ignored": list(self.ignored)} if self.ignored else {}

    def _beside(self, index: int, piece: ChoiceUpdate) -> dict[str, Any]:
        """Returns the response fields that the first choice sets."""
        return self._of_prompt(piece) if self.form.has_one_prompt and index == 0 else {}

    def _of_prompt(self, piece: ChoiceUpdate) -> dict[str, Any]:
        if self.num_of_prompt is None or not piece.prompt:
            return {}
        return {"prompt_logprobs": for_prompt(cut(piece.prompt, self.num_of_prompt), self.names)}

    def _choice(self, index: int, message: dict[str, Any], piece: ChoiceUpdate) -> dict[str, Any]:
        logprobs = None
        if self.shows_logprobs:
            echoed = [] if self.num_echoed is None else cut(piece.prompt, self.num_echoed)
            logprobs = self.form.logprobs([*echoed, *piece.logprobs], self.names)
        choice = {
            "index": index,
            **message,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }
        if not self.form.has_one_prompt:
            choice |= self._of_prompt(piece)
        if self.shows_trace and piece.step is not None:
            choice["trace"] = piece.step
        return {**choice, "token_ids": piece.tokens} if self.shows_tokens else choice


def sse(data: dict[str, Any]) -> bytes:
    """Encodes a server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


SSE_DONE = f"data: {STREAM_END}\n\n".encode()
