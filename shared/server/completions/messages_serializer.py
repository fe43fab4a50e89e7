"""Serializer of /v1/messages, in Anthropic's format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import from_json

from shared.server.completions.choice import Choice, ChoiceUpdate
from shared.server.completions.output import GenerationOutput
from shared.server.completions.serializer import StreamEvent
from shared.server.protocol.errors import ApiError
from shared.server.protocol.generation_request import GenerationRequest
from shared.server.protocol.sealed_text import SealedText
from shared.text.parsing.delta import Delta, ToolCallDelta

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
_STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use"}


class MessagesSerializer:
    """Serializer of one message; a stream has at most one open content block.

    Args:
      request: Validated request.
      output: Output of the request.
      sealed: Makes the signatures of reasoning.
      hides_thinking: The reasoning is returned in the signature only.
    """

    keep_alive: StreamEvent | None = StreamEvent({"type": "ping"}, "ping")

    def __init__(
        self,
        request: GenerationRequest,
        output: GenerationOutput,
        sealed: SealedText,
        hides_thinking: bool,
    ) -> None:
        self._request, self._output, self._sealed = request, output, sealed
        self._hides_thinking = hides_thinking
        self._index, self._open = -1, ""
        self._reasoning = ""

    def whole(self, messages: list[Delta]) -> dict[str, Any]:
        """Returns the message; its blocks are reasoning, text and calls, in this order."""
        (message,) = messages
        blocks: list[dict[str, Any]] = []
        if message.reasoning:
            shown = "" if self._hides_thinking else message.reasoning
            blocks.append(
                {"type": THINKING, "thinking": shown, "signature": self._sign(message.reasoning)}
            )
        if message.text:
            blocks.append({"type": TEXT, "text": message.text, "citations": None})
        blocks += [
            {**_call_head(call), "input": _arguments(call.arguments)} for call in message.tool_calls
        ]
        head = {**self._head(), "content": blocks, **self._stop()}
        return {**head, "usage": self._usage(), **self._details()}

    def begin(self) -> Sequence[StreamEvent]:
        """Returns `message_start`."""
        message = {**self._head(), "content": [], "stop_reason": None, "stop_sequence": None}
        ignored = {"ignored": list(self._output.ignored)} if self._output.ignored else {}
        message |= {"usage": self._usage(), **ignored}
        return (_event("message_start", message=message),)

    def update(self, index: int, piece: ChoiceUpdate) -> Sequence[StreamEvent]:
        """Returns the events of an update: increments of blocks, their starts and their ends."""
        return tuple(self._events(piece))

    def _events(self, piece: ChoiceUpdate) -> Iterator[StreamEvent]:
        delta = piece.delta
        calls = list(delta.tool_calls)
        if calls and not calls[0].call_id:  # of the open block; text may follow it
            yield self._delta(type="input_json_delta", partial_json=calls.pop(0).arguments)
        if delta.reasoning:
            yield from self._switch(THINKING, thinking="", signature="")
            self._reasoning += delta.reasoning
            if not self._hides_thinking:
                yield self._delta(type="thinking_delta", thinking=delta.reasoning)
        if delta.text:
            yield from self._switch(TEXT, text="", citations=None)
            yield self._delta(type="text_delta", text=delta.text)
        for call in calls:
            yield from self._begin_call(call)
        if piece.finish_reason:
            yield from self._close()

    def _begin_call(self, call: ToolCallDelta) -> Iterator[StreamEvent]:
        yield from self._close()
        yield from self._switch(TOOL_USE, **_call_head(call), input={})
        if call.arguments:
            yield self._delta(type="input_json_delta", partial_json=call.arguments)

    def end(self) -> Sequence[StreamEvent]:
        """Returns `message_delta` with the stop reason and the usage, and `message_stop`."""
        speculative = self._output.speculation.to_json()
        last = _event(
            "message_delta", delta=self._stop(), usage=self._usage(), speculative=speculative
        )
        return (last, _event("message_stop"))

    def fail(self, error: ApiError) -> Sequence[StreamEvent]:
        """Returns the event `error`."""
        return (StreamEvent(error.to_anthropic_json(), "error"),)

    def _switch(self, kind: str, **block: Any) -> Iterator[StreamEvent]:
        """Begins a block unless one of this kind is open."""
        if self._open == kind:
            return
        yield from self._close()
        self._index, self._open = self._index + 1, kind
        content = {**block, "type": kind}
        yield _event("content_block_start", index=self._index, content_block=content)

    def _close(self) -> Iterator[StreamEvent]:
        if self._open == THINKING:
            yield self._delta(type="signature_delta", signature=self._sign(self._reasoning))
        if self._open:
            yield _event("content_block_stop", index=self._index)
        self._open = ""

    def _delta(self, **delta: Any) -> StreamEvent:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _sign(self, reasoning: str) -> str:
        """Returns a signature; it contains the reasoning only if the block does not."""
        return self._sealed.seal(reasoning if self._hides_thinking else "")

    @property
    def _choice(self) -> Choice:
        return self._output.choices[0]

    def _head(self) -> dict[str, Any]:
        output = self._output
        return {"id": output.name, "type": "message", "role": "assistant", "model": output.model}

    def _details(self) -> dict[str, Any]:
        ignored = {"ignored": list(self._output.ignored)} if self._output.ignored else {}
        return {"speculative": self._output.speculation.to_json(), **ignored}

    def _stop(self) -> dict[str, Any]:
        """Returns the stop reason, and the stop sequence that ended the text."""
        choice, asked = self._choice, self._request.sampling.max_tokens
        reason = _STOP_REASONS.get(choice.finish_reason or "", "max_tokens")
        if reason == "max_tokens" and asked is not None and len(choice.tokens) < asked:
            reason = "model_context_window_exceeded"
        matched = choice.stop_string if reason == "end_turn" else None
        if matched is not None:
            reason = "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": matched}

    def _usage(self) -> dict[str, Any]:
        """Returns the tokens; `input_tokens` excludes those found in the prefix cache."""
        output, cached = self._output, self._output.num_cached_tokens
        return {
            "input_tokens": output.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": output.num_output_tokens,
            "output_tokens_details": {"thinking_tokens": self._choice.num_reasoning_tokens},
        }


def _event(kind: str, **fields: Any) -> StreamEvent:
    return StreamEvent({"type": kind, **fields}, kind)


def _call_head(call: ToolCallDelta) -> dict[str, Any]:
    return {"type": TOOL_USE, "id": call.call_id, "name": call.name}


def _arguments(text: str) -> dict[str, Any]:
    """Returns the arguments of a call; a call that was cut has those that are complete."""
    try:
        value = from_json(text or "{}", allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
