"""Answers in OpenAI's form: whole ones and the events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.server.choice import Choice, Piece, Speculation


class Form(Protocol):
    """How an endpoint writes a choice."""

    prefix: str
    whole_object: str
    chunk_object: str

    def whole(self, text: str) -> dict[str, Any]:
        """The fields of a whole choice that hold its text."""
        ...

    def part(self, text: str, is_first: bool) -> dict[str, Any]:
        """The fields of a choice in a stream that hold its new text."""
        ...


class CompletionForm:
    """/v1/completions."""

    prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def whole(self, text: str) -> dict[str, Any]:
        """`text`."""
        return {"text": text}

    def part(self, text: str, is_first: bool) -> dict[str, Any]:
        """`text`, the new one."""
        return {"text": text}


class ChatForm:
    """/v1/chat/completions."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def whole(self, text: str) -> dict[str, Any]:
        """`message`."""
        return {"message": {"role": "assistant", "content": text}}

    def part(self, text: str, is_first: bool) -> dict[str, Any]:
        """`delta`; the first one says whose message it is."""
        role = {"role": "assistant"} if is_first else {}
        return {"delta": {**role, "content": text}}


@dataclass
class Answer:
    """Writes one response.

    Attributes:
      form: Of the endpoint.
      model: Served name of the model.
      num_prompt_tokens: Of all prompts, each counted once.
      choices: Grow while the response is made.
      shows_tokens: Each choice carries its `token_ids`.
    """

    form: Form
    model: str
    num_prompt_tokens: int
    choices: list[Choice]
    shows_tokens: bool
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason for choice in self.choices)

    def whole(self, texts: list[str]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        choices = [
            self._choice(index, self.form.whole(text), choice.finish_reason, choice.tokens)
            for index, (text, choice) in enumerate(zip(texts, self.choices, strict=True))
        ]
        return {**self._head(self.form.whole_object), "choices": choices, **self.totals()}

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """An event of a stream: what one step added to one choice."""
        part = self.form.part(piece.text, index not in self._begun)
        self._begun.add(index)
        choice = self._choice(index, part, piece.finish_reason, piece.tokens)
        return {**self._head(self.form.chunk_object), "choices": [choice]}

    def usage_chunk(self) -> dict[str, Any]:
        """The event that `stream_options.include_usage` asks for, after the last choice."""
        return {**self._head(self.form.chunk_object), "choices": [], **self.totals()}

    def totals(self) -> dict[str, Any]:
        """Usage and speculation, summed over the choices."""
        speculation = Speculation.empty(len(self.choices[0].speculation.histogram) - 1)
        for choice in self.choices:
            speculation.add(choice.speculation)
        completion = sum(len(choice.tokens) for choice in self.choices)
        usage = {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.num_prompt_tokens + completion,
        }
        return {"usage": usage, "speculative": speculation.to_json()}

    def _head(self, kind: str) -> dict[str, Any]:
        name = self.form.prefix + self._id
        return {"id": name, "object": kind, "created": self._created, "model": self.model}

    def _choice(
        self, index: int, text: dict[str, Any], finish_reason: str | None, tokens: list[int]
    ) -> dict[str, Any]:
        choice = {"index": index, **text, "logprobs": None, "finish_reason": finish_reason}
        return {**choice, "token_ids": tokens} if self.shows_tokens else choice


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
