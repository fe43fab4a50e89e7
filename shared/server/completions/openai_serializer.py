"""Serializers of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from shared.server.completions.choice import ChoiceUpdate
from shared.server.completions.logprobs import (
    ScoredToken,
    TokenNames,
    cut,
    for_chat,
    for_completion,
    for_prompt,
)
from shared.server.completions.output import GenerationOutput
from shared.server.completions.serializer import StreamEvent
from shared.server.protocol.errors import ApiError
from shared.server.protocol.generation_request import GenerationRequest
from shared.server.protocol.response_types import STREAM_END
from shared.text.parsing.delta import Delta, ToolCallDelta


class ChoiceFormat(Protocol):
    """Format of an endpoint's choices.

    Attributes:
      whole_object: Field `object` of a response.
      chunk_object: Field `object` of a stream event.
      has_one_prompt: Prompt logprobs are a field of the response, not of each choice.
    """

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


class OpenAISerializer:
    """Serializer of one response.

    Args:
      form: Format of the endpoint.
      request: Validated request.
      output: Output of the request.
    """

    keep_alive: StreamEvent | None = None

    def __init__(
        self,
        form: ChoiceFormat,
        request: GenerationRequest,
        output: GenerationOutput,
    ) -> None:
        self._form, self._request, self._output = form, request, output
        self._shows_logprobs = request.sampling.logprobs is not None
        self._sends_all = request.returns_token_ids or self._shows_logprobs or request.returns_trace
        self._begun: set[int] = set()

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
            for message, choice in zip(messages, self._output.choices, strict=True)
        ]
        choices = [
            self._choice(index, self._form.whole(piece.delta), piece)
            for index, piece in enumerate(pieces)
        ]
        head = self._head(self._form.whole_object)
        beside = {**self._beside(0, pieces[0]), **self._ignored()}
        return {**head, **beside, "choices": choices, **self._totals()}

    def begin(self) -> Sequence[StreamEvent]:
        """Returns no events: a stream begins with the first update."""
        return ()

    def update(self, index: int, piece: ChoiceUpdate) -> Sequence[StreamEvent]:
        """Returns the event of an update; empty updates are sent only with details.

        The first event of the stream has `ignored`.
        """
        if not self._matters(index, piece):
            return ()
        ignored = {} if self._begun else self._ignored()
        part = self._form.part(piece.delta, index not in self._begun)
        self._begun.add(index)
        choice = self._choice(index, part, piece)
        head = self._head(self._form.chunk_object)
        chunk = {**head, **self._beside(index, piece), **ignored, "choices": [choice]}
        if self._output.ended and not self._request.includes_usage:
            chunk |= self._totals()
        return (StreamEvent(chunk),)

    def end(self) -> Sequence[StreamEvent]:
        """Returns the usage with `stream_options.include_usage`, and the end marker."""
        if not self._request.includes_usage:
            return (_END,)
        usage = {**self._head(self._form.chunk_object), "choices": [], **self._totals()}
        return (StreamEvent(usage), _END)

    def fail(self, error: ApiError) -> Sequence[StreamEvent]:
        """Returns the error and the end marker."""
        return (StreamEvent(error.to_json()), _END)

    def _matters(self, index: int, piece: ChoiceUpdate) -> bool:
        is_new = index not in self._begun
        return self._sends_all or is_new or bool(piece.delta or piece.finish_reason)

    def _totals(self) -> dict[str, Any]:
        """Returns `usage` and `speculative`, summed over the choices."""
        output, completion = self._output, self._output.num_output_tokens
        usage = {
            "prompt_tokens": output.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": output.num_prompt_tokens + completion,
            "prompt_tokens_details": {
                "cached_tokens": output.num_cached_tokens,
                "image_tokens": output.num_image_tokens,
            },
        }
        return {"usage": usage, "speculative": output.speculation.to_json()}

    def _head(self, kind: str) -> dict[str, Any]:
        output = self._output
        return {"id": output.name, "object": kind, "created": output.created, "model": output.model}

    def _ignored(self) -> dict[str, Any]:
        return {"ignored": list(self._output.ignored)} if self._output.ignored else {}

    def _beside(self, index: int, piece: ChoiceUpdate) -> dict[str, Any]:
        """Returns the response fields that the first choice sets."""
        return self._of_prompt(piece) if self._form.has_one_prompt and index == 0 else {}

    def _of_prompt(self, piece: ChoiceUpdate) -> dict[str, Any]:
        count = self._request.returned_prompt_logprobs
        if count is None or not piece.prompt:
            return {}
        return {"prompt_logprobs": for_prompt(cut(piece.prompt, count), self._output.names)}

    def _choice(self, index: int, message: dict[str, Any], piece: ChoiceUpdate) -> dict[str, Any]:
        logprobs = None
        if self._shows_logprobs:
            num_echoed = self._request.echoed_logprobs
            echoed = [] if num_echoed is None else cut(piece.prompt, num_echoed)
            logprobs = self._form.logprobs([*echoed, *piece.logprobs], self._output.names)
        choice = {
            "index": index,
            **message,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
        }
        if not self._form.has_one_prompt:
            choice |= self._of_prompt(piece)
        if self._request.returns_trace and piece.step is not None:
            choice["trace"] = piece.step
        return {**choice, "token_ids": piece.tokens} if self._request.returns_token_ids else choice


_END = StreamEvent(STREAM_END)
