"""Increments of a choice: content, reasoning and tool calls."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol


@dataclass(frozen=True)
class ToolCallDelta:
    """Increment of a tool call.

    Attributes:
      index: Number of the call within the choice; increments with one index form one call.
      call_id, name: Set in the first increment of a call, "" in later ones.
      arguments: Next part of the JSON text.
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
        """Returns True if the increment is not empty."""
        return bool(self.text or self.reasoning or self.tool_calls)

    def __add__(self, later: Delta) -> Delta:
        """Returns the concatenation of two increments."""
        calls = {call.index: call for call in self.tool_calls}
        for part in later.tool_calls:
            begun = calls.get(part.index)
            calls[part.index] = _joined(begun, part) if begun else part
        text, reasoning = self.text + later.text, self.reasoning + later.reasoning
        return Delta(text, reasoning, tuple(calls.values()))


def _joined(begun: ToolCallDelta, part: ToolCallDelta) -> ToolCallDelta:
    return replace(begun, arguments=begun.arguments + part.arguments)


class OutputParser(Protocol):
    """Output parser of one choice: splits its text into content, reasoning and tool calls."""

    @property
    def has_whole_calls(self) -> bool:
        """True if the output has a tool call and the arguments of every call are complete."""
        ...

    @property
    def num_malformed_calls(self) -> int:
        """Calls that began with a tag and were returned as text, in whole or in part."""
        ...

    def push(self, text: str) -> Delta:
        """Returns the parsed increment and holds back ambiguous text."""
        ...

    def flush(self, was_cut: bool) -> Delta:
        """Returns the text that was held back, at the end of the output.

        Args:
          was_cut: The output ended at `max_tokens`.
        """
        ...


class PassthroughParser:
    """Parser for models without reasoning and tool calls: the whole output is content."""

    has_whole_calls = False
    num_malformed_calls = 0

    def push(self, text: str) -> Delta:
        """Returns the text unchanged."""
        return Delta(text)

    def flush(self, was_cut: bool) -> Delta:
        """Returns an empty increment, because no text is held back."""
        return Delta()
