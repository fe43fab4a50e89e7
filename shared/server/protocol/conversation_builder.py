"""Builder of a conversation from the items of other APIs than chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.server.protocol.content import FOR_TEMPLATE, ImagePart
from shared.server.protocol.errors import ApiError

Part = str | ImagePart
"""Text or image of a message."""


class ConversationBuilder:
    """Builds the messages that chat templates read, in the form of chat completions.

    Reasoning, text and calls of the assistant that follow one another become one message.

    Attributes:
      messages: Messages so far.
      images: Images, in the order of their placeholders.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.images: list[ImagePart] = []
        self._answer: dict[str, Any] | None = None
        self._called: set[str] = set()

    def add(self, role: str, parts: Sequence[Part]) -> None:
        """Adds a message of the system, the developer or the user."""
        self._answer = None
        self.messages.append({"role": role, "content": self._content(parts)})

    def add_instructions(self, parts: Sequence[Part]) -> None:
        """Adds a message at the start; system messages that follow it become part of it."""
        self.messages[:0] = [{"role": "system", "content": self._content(parts)}]
        while len(self.messages) > 1 and self.messages[1]["role"] in ("system", "developer"):
            first, second = (_parts(message["content"]) for message in self.messages[:2])
            self.messages[:2] = [{"role": "system", "content": [*first, *second]}]

    def begin_answer(self) -> None:
        """Begins a message of the assistant, which may stay empty."""
        self._answer = {"role": "assistant", "content": ""}
        self.messages.append(self._answer)

    def add_reasoning(self, text: str) -> None:
        """Adds reasoning of the assistant."""
        answer = self._open(("content", "tool_calls"))
        joined = (answer["reasoning_content"], text) if "reasoning_content" in answer else (text,)
        answer["reasoning_content"] = "\n\n".join(joined)

    def add_answer(self, text: str, *, joins: bool) -> None:
        """Adds text of the assistant; text after a call is part of the same message.

        Args:
          text: The text.
          joins: Text after other text is part of the same message too.
        """
        ends = () if joins or (self._answer and "tool_calls" in self._answer) else ("content",)
        self._open(ends)["content"] += text

    def add_call(self, call_id: str, name: str, arguments: dict[str, Any]) -> None:
        """Adds a tool call of the assistant."""
        self._called.add(call_id)
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._open().setdefault("tool_calls", []).append(call)

    def add_result(self, call_id: str, parts: Sequence[Part], place: str, kind: str) -> None:
        """Adds the result of a tool call.

        Args:
          call_id: Id of the call.
          parts: Content of the result.
          place: Path of the id in the request, for errors.
          kind: Name of a call in the API, for errors.

        Raises:
          ApiError: No earlier call has this id.
        """
        if call_id not in self._called:
            reason = f"{place} is {call_id!r:.80}, and no earlier {kind} has this id"
            raise ApiError(400, f"{reason}; send the {kind} before its result", place)
        self._answer = None
        content = self._content(parts)
        self.messages.append({"role": "tool", "content": content, "tool_call_id": call_id})

    def _open(self, ends: Sequence[str] = ()) -> dict[str, Any]:
        """Returns the assistant's open message; begins a new one after one of the fields `ends`."""
        if self._answer is None or any(self._answer.get(name) for name in ends):
            self.begin_answer()
        assert self._answer is not None
        return self._answer

    def _content(self, parts: Sequence[Part]) -> str | list[Any]:
        """Returns a content for templates; a single text is a string."""
        self.images += [part for part in parts if isinstance(part, ImagePart)]
        if all(isinstance(part, str) for part in parts) and len(parts) < 2:
            return str(parts[0]) if parts else ""
        return [
            {"type": "text", "text": part} if isinstance(part, str) else FOR_TEMPLATE
            for part in parts
        ]


def _parts(content: str | list[Any]) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content
