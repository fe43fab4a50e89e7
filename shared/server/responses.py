"""Answers in OpenAI's form: whole ones and the events of a stream."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared.server.choice import Choice, Piece, Speculation
from shared.server.logprobs import TokenLogprob, TokenNames, for_chat, for_completion


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

    def logprobs(self, entries: list[TokenLogprob], names: TokenNames) -> dict[str, Any]:
        """The `logprobs` of a choice."""
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

    def logprobs(self, entries: list[TokenLogprob], names: TokenNames) -> dict[str, Any]:
        """Lists of equal length."""
        return for_completion(entries, names)


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

    def logprobs(self, entries: list[TokenLogprob], names: TokenNames) -> dict[str, Any]:
        """`content`, an object per token."""
        return for_chat(entries, names)


@dataclass
class Answer:
    """Writes one response.

    Attributes:
      form: Of the endpoint.
      model: Served name of the model.
      num_prompt_tokens: Of all prompts, each counted once.
      choices: Grow while the response is made.
      names: Writes the tokens of logprobs.
      shows_tokens: Each choice carries its `token_ids`.
      shows_logprobs: Each choice carries its `logprobs`.
    """

    form: Form
    model: str
    num_prompt_tokens: int
    choices: list[Choice]
    names: TokenNames
    shows_tokens: bool
    shows_logprobs: bool
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)

    @property
    def ended(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.finish_reason for choice in self.choices)

    def whole(self, texts: list[str]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        pieces = [
            Piece(text, choice.tokens, choice.logprobs, choice.finish_reason)
            for text, choice in zip(texts, self.choices, strict=True)
        ]
        choices = [
            self._choice(index, self.form.whole(piece.text), piece)
            for index, piece in enumerate(pieces)
        ]
        return {**self._head(self.form.whole_object), "choices": choices, **self.totals()}

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """An event of a stream: what one step added to one choice."""
        part = self.form.part(piece.text, index not in self._begun)
        self._begun.add(index)
        choice = self._choice(index, part, piece)
        return {**self._head(self.form.chunk_object), "choices": [choice]}

    def matters(self, index: int, piece: Piece) -> bool:
        """Whether a stream has to carry a piece: one without text is of use to few."""
        shows_more = self.shows_tokens or self.shows_logprobs or index not in self._begun
        return shows_more or bool(piece.text or piece.finish_reason)

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

    def _choice(self, index: int, text: dict[str, Any], piece: Piece) -> dict[str, Any]:
        found = self.form.logprobs(piece.logprobs, self.names) if self.shows_logprobs else None
        choice = {"index": index, **text, "logprobs": found, "finish_reason": piece.finish_reason}
        return {**choice, "token_ids": piece.tokens} if self.shows_tokens else choice


def sse(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, separators=(",", ":")).encode() + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
