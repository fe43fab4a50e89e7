"""Serializer of /v1/responses."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from shared.server.completions.choice import Choice, ChoiceUpdate
from shared.server.completions.logprobs import for_chat
from shared.server.completions.output import GenerationOutput
from shared.server.completions.serializer import StreamEvent
from shared.server.protocol.errors import ApiError
from shared.server.protocol.generation_request import GenerationRequest
from shared.server.protocol.responses_echo import echo_of
from shared.server.protocol.responses_types import ENCRYPTED, ResponsesRequest
from shared.server.protocol.sealed_text import SealedText
from shared.text.parsing.delta import Delta, ToolCallDelta
from shared.text.parsing.input_decoder import InputDecoder

MESSAGE, REASONING = "message", "reasoning"
CALL, CUSTOM_CALL = "function_call", "custom_tool_call"
CANCELLED = "cancelled"
_PREFIXES = {MESSAGE: "msg_", REASONING: "rs_", CALL: "fc_", CUSTOM_CALL: "ctc_"}


class ResponsesSerializer:
    """Serializer of one response; a stream has at most one open output item.

    Args:
      request: Validated request.
      body: Its request model; the response repeats fields of it.
      output: Output of the request.
      sealed: Makes `encrypted_content`.
      save: Called with the response when its status changes.
    """

    keep_alive: StreamEvent | None = StreamEvent("keep-alive", is_comment=True)

    def __init__(
        self,
        request: GenerationRequest,
        body: ResponsesRequest,
        output: GenerationOutput,
        sealed: SealedText,
        save: Callable[[dict[str, Any]], None],
    ) -> None:
        self._request, self._body, self._output = request, body, output
        self._sealed, self._save = sealed, save
        self._namespaces, self._custom_names = body.namespaces, body.custom_names
        self._input = InputDecoder()  # of the open call of a custom tool
        self._items: list[dict[str, Any]] = []
        self._item: dict[str, Any] | None = None  # the open item, the last of `_items`
        self._num_events, self._num_scored = 0, 0
        self.has_ended = False

    def whole(self, messages: list[Delta]) -> dict[str, Any]:
        """Returns the response; its items are reasoning, message and calls, in this order."""
        (message,) = messages
        choice = self._choice
        self.update(0, ChoiceUpdate(message, choice.tokens, choice.logprobs, choice.finish_reason))
        return self._ended(self._status)

    def begin(self) -> Sequence[StreamEvent]:
        """Returns `response.created` and `response.in_progress`."""
        response = self._response("in_progress")
        self._save(response)
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=response) for kind in kinds]

    def update(self, index: int, piece: ChoiceUpdate) -> Sequence[StreamEvent]:
        """Returns the events of an update: increments of items, their starts and their ends."""
        return tuple(self._events(piece))

    def end(self) -> Sequence[StreamEvent]:
        """Returns `response.completed` or `response.incomplete`."""
        response = self._ended(self._status)
        return (self._event(f"response.{response['status']}", response=response),)

    def fail(self, error: ApiError) -> Sequence[StreamEvent]:
        """Returns `response.failed`."""
        status = CANCELLED if error.code == CANCELLED else "failed"
        return (self._event("response.failed", response=self._ended(status, error)),)

    def abandon(self) -> None:
        """Saves the response of a client that disconnected."""
        if not self.has_ended:
            self._ended(CANCELLED)

    # Events

    def _events(self, piece: ChoiceUpdate) -> Iterator[StreamEvent]:
        delta = piece.delta
        calls = list(delta.tool_calls)
        if calls and not calls[0].call_id:  # of the open item; text may follow it
            yield from self._add_arguments(calls.pop(0).arguments)
        if delta.reasoning:
            yield from self._switch(REASONING, summary=[], content=[], encrypted_content=None)
            yield self._add_text("reasoning_text", delta.reasoning)
        if delta.text:
            yield from self._switch(MESSAGE, role="assistant", content=[])
            scores = self._scores()
            self._part["logprobs"] += scores
            yield self._add_text("output_text", delta.text, logprobs=scores)
        for call in calls:
            yield from self._begin_call(call)
        if piece.finish_reason:
            is_cut = piece.finish_reason == "length"
            yield from self._close("incomplete" if is_cut else "completed")

    def _begin_call(self, call: ToolCallDelta) -> Iterator[StreamEvent]:
        yield from self._close()
        fields = {"call_id": call.call_id, **self._names(call.name)}
        if call.name in self._custom_names:
            self._input = InputDecoder()
            yield from self._switch(CUSTOM_CALL, **fields, input="")
        else:
            yield from self._switch(CALL, **fields, arguments="")
        yield from self._add_arguments(call.arguments)

    def _names(self, name: str) -> dict[str, str]:
        """Returns the name of a called tool, with its namespace if it has one."""
        space, own = self._namespaces.get(name, ("", name))
        return {"name": own, "namespace": space} if space else {"name": own}

    def _switch(self, kind: str, **fields: Any) -> Iterator[StreamEvent]:
        """Begins an item with its first part, unless one of this kind is open."""
        if self._item is not None and self._item["type"] == kind:
            return
        yield from self._close()
        name = _PREFIXES[kind] + uuid.uuid4().hex
        self._item = {"id": name, "type": kind, "status": "in_progress", **fields}
        self._items.append(self._item)
        yield self._of_item("response.output_item.added", item=dict(self._item))
        if kind not in (MESSAGE, REASONING):
            return
        part = _REASONING_PART if kind == REASONING else _TEXT_PART
        self._item["content"] = [_copy(part)]
        yield self._of_part("response.content_part.added", part=_copy(part))

    def _add_text(self, kind: str, text: str, **fields: Any) -> StreamEvent:
        self._part["text"] += text
        return self._of_part(f"response.{kind}.delta", delta=text, **fields)

    def _add_arguments(self, text: str) -> Iterator[StreamEvent]:
        if self._opened["type"] == CUSTOM_CALL:
            yield from self._add_to_call("input", self._input.push(text))
        else:
            yield from self._add_to_call("arguments", text)

    def _add_to_call(self, field: str, text: str) -> Iterator[StreamEvent]:
        if text:
            item = self._opened
            item[field] += text
            yield self._of_item(f"{_CALL_EVENTS[field]}.delta", item_id=item["id"], delta=text)

    def _close(self, status: str = "completed") -> Iterator[StreamEvent]:
        """Ends the open item."""
        if self._item is None:
            return
        item = self._item
        item["status"] = status
        if item["type"] == CALL:
            yield self._call_done("arguments", name=item["name"])
        elif item["type"] == CUSTOM_CALL:
            yield from self._add_to_call("input", self._input.flush())
            yield self._call_done("input")
        else:
            yield from self._close_part()
        if item["type"] == REASONING and self._body.includes(ENCRYPTED):
            item["encrypted_content"] = self._sealed.seal(self._part["text"])
        yield self._of_item("response.output_item.done", item=dict(item))
        self._item = None

    def _call_done(self, field: str, **fields: Any) -> StreamEvent:
        item = self._opened
        fields |= {"item_id": item["id"], field: item[field]}
        return self._of_item(f"{_CALL_EVENTS[field]}.done", **fields)

    def _close_part(self) -> Iterator[StreamEvent]:
        part = self._part
        scores = {"logprobs": part["logprobs"]} if part["type"] == "output_text" else {}
        yield self._of_part(f"response.{part['type']}.done", text=part["text"], **scores)
        yield self._of_part("response.content_part.done", part=dict(part))

    @property
    def _opened(self) -> dict[str, Any]:
        assert self._item is not None, "an item is open"
        return self._item

    @property
    def _part(self) -> dict[str, Any]:
        return self._opened["content"][0]

    def _of_part(self, kind: str, **fields: Any) -> StreamEvent:
        return self._of_item(kind, item_id=self._opened["id"], content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> StreamEvent:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> StreamEvent:
        number, self._num_events = self._num_events, self._num_events + 1
        return StreamEvent({"type": kind, "sequence_number": number, **fields}, kind)

    def _scores(self) -> list[dict[str, Any]]:
        """Returns the logprobs of the tokens since the last text, without the reasoning."""
        if self._request.sampling.logprobs is None:
            return []
        choice = self._choice
        begin = max(self._num_scored, choice.num_reasoning_tokens)
        self._num_scored = len(choice.tokens)
        scores = for_chat(choice.logprobs[begin:], self._output.names)["content"]
        tops = [top for score in scores for top in score["top_logprobs"]]
        for score in (*scores, *tops):
            score["bytes"] = score["bytes"] or []  # of a model without tokenizer
        return scores

    # The response

    @property
    def _choice(self) -> Choice:
        return self._output.choices[0]

    @property
    def _status(self) -> str:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def _ended(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        if self._item is not None:
            self._item["status"], self._item = "incomplete", None
        response = self._response(status, error)
        self.has_ended = True
        self._save(response)
        return response

    def _response(self, status: str, error: ApiError | None = None) -> dict[str, Any]:
        output, is_cut = self._output, status == "incomplete"
        head = {
            "id": output.name,
            "object": "response",
            "created_at": output.created,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error and _error(error),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "model": output.model,
            "output": [dict(item) for item in self._items],
            **echo_of(self._body),
            "usage": None if status == "in_progress" else self._usage(),
        }
        if status != "in_progress":
            head["speculative"] = output.speculation.to_json()
        return {**head, "ignored": list(output.ignored)} if output.ignored else head

    def _usage(self) -> dict[str, Any]:
        output = self._output
        prompt, completion = output.num_prompt_tokens, output.num_output_tokens
        cached = {"cached_tokens": output.num_cached_tokens, "cache_write_tokens": 0}
        return {
            "input_tokens": prompt,
            "input_tokens_details": cached,
            "output_tokens": completion,
            "output_tokens_details": {"reasoning_tokens": self._choice.num_reasoning_tokens},
            "total_tokens": prompt + completion,
        }


_CALL_EVENTS = {
    "arguments": "response.function_call_arguments",
    "input": "response.custom_tool_call_input",
}
_REASONING_PART = {"type": "reasoning_text", "text": ""}
_TEXT_PART = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _copy(part: dict[str, Any]) -> dict[str, Any]:
    return {name: [] if isinstance(value, list) else value for name, value in part.items()}


def _error(error: ApiError) -> dict[str, Any]:
    """Returns the `error` of a response; OpenAI's codes distinguish few kinds."""
    code = "server_error" if error.status >= 500 or error.code == CANCELLED else "invalid_prompt"
    return {"code": code, "message": error.message}
