"""What a choice says to its client: text, reasoning and calls of tools, part by part."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True)
class ToolCall:
    """A part of a call.

    Attributes:
      index: Which call of the choice; parts of one index are one call.
      call_id, name: Set in the first part of a call, "" in the others.
      arguments: JSON text, which grows part by part.
    """

    index: int
    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Delta:
    """What a choice says anew. Sums of deltas are deltas: all of a choice's make its message."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()

    def __bool__(self) -> bool:
        """Whether it says anything."""
        return bool(self.text or self.reasoning or self.tool_calls)

    def __add__(self, later: Delta) -> Delta:
        """Both, in this order."""
        calls = {call.index: call for call in self.tool_calls}
        for part in later.tool_calls:
            begun = calls.get(part.index)
            calls[part.index] = _joined(begun, part) if begun else part
        text, reasoning = self.text + later.text, self.reasoning + later.reasoning
        return Delta(text, reasoning, tuple(calls.values()))


def _joined(begun: ToolCall, part: ToolCall) -> ToolCall:
    return replace(begun, arguments=begun.arguments + part.arguments)


class OutputParser(Protocol):
    """Tells what the text of a choice is: one parser follows one choice."""

    @property
    def has_whole_calls(self) -> bool:
        """Whether it has called, and no call has broken off within its arguments."""
        ...

    def push(self, text: str) -> Delta:
        """What is certain with this text; what is not yet is held back."""
        ...

    def flush(self, was_cut: bool) -> Delta:
        """What was held back: the text has ended, or was cut since it may have no more tokens."""
        ...


class PlainText:
    """The parser of a model whose whole output is text."""

    has_whole_calls = False

    def push(self, text: str) -> Delta:
        """The text as it is."""
        return Delta(text)

    def flush(self, was_cut: bool) -> Delta:
        """Nothing: no text is held back."""
        return Delta()
