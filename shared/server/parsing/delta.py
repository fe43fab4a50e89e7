"""Increments of a choice: content, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True)
class ToolCallDelta:
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
    """Increment of a choice; the sum of all increments is its message."""

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()

    def __bool__(self) -> bool:
        """Returns True if it says anything."""
        return bool(self.text or self.reasoning or self.tool_calls)

    def __add__(self, later: Delta) -> Delta:
        """Both, in this order."""
        calls = {call.index: call for call in self.tool_calls}
        for part in later.tool_calls:
            begun = calls.get(part.index)
            calls[part.index] = _joined(begun, part) if begun else part
        text, reasoning = self.text + later.text, self.reasoning + later.reasoning
        return Delta(text, reasoning, tuple(calls.values()))


def _joined(begun: ToolCallDelta, part: ToolCallDelta) -> ToolCallDelta:
    return replace(begun, arguments=begun.arguments + part.arguments)


class OutputParser(Protocol):
    """Tells what the text of a choice is: one parser follows one choice."""

    @property
    def has_whole_calls(self) -> bool:
        """True if it has called, and no call has broken off within its arguments."""
        ...

    def push(self, text: str) -> Delta:
        """Returns the parsed increment and holds back ambiguous text."""
        ...

    def flush(self, was_cut: bool) -> Delta:
        """Returns the text that was held back, at the end of the output."""
        ...


class PassthroughParser:
    """The parser of a model whose whole output is text."""

    has_whole_calls = False

    def push(self, text: str) -> Delta:
        """The text as it is."""
        return Delta(text)

    def flush(self, was_cut: bool) -> Delta:
        """Nothing: no text is held back."""
        return Delta()
