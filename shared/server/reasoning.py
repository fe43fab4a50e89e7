"""Reasoning: what a model thinks before it answers, told from its answer."""

from __future__ import annotations

from shared.server.delta import Delta, OutputParser
from shared.text.marks import THINK, THINK_END

ALWAYS_OPEN = "deepseek-r1"
"""The parser of models that think from the first token on, without an opening tag."""


class ReasoningParser:
    """Text up to `</think>` is reasoning; another parser tells what the rest is.

    Only the beginning of a text can be reasoning, so an answer may speak of the tags. The white
    space beside them belongs to them.

    Args:
      answer: Parser of the answer.
      is_open: The text begins within the reasoning; it may open it once more.
    """

    def __init__(self, answer: OutputParser, is_open: bool) -> None:
        self._answer = answer
        self._is_open = is_open
        self._held = ""
        self._read = self._read_beginning

    def push(self, text: str) -> Delta:
        """Reasoning, then what the parser of the answer says."""
        self._held += text
        return self._read()

    def flush(self) -> Delta:
        """What is held back is of the part in which the text ends."""
        held, self._held = self._held, ""
        if self._read == self._read_reasoning or (
            self._read == self._read_beginning and self._is_open
        ):
            return Delta(reasoning=held) + self._answer.flush()
        if self._read == self._read_gap:
            held = ""
        return self._answer.push(held) + self._answer.flush()

    def _read_beginning(self) -> Delta:
        begun = self._held.lstrip()
        if begun.startswith(THINK):
            self._held, self._is_open = begun.removeprefix(THINK), True
        elif THINK.startswith(begun):
            return Delta()
        self._read = self._read_margin if self._is_open else self._read_answer
        return self._read()

    def _read_margin(self) -> Delta:
        """The white space before the reasoning."""
        self._held = self._held.lstrip()
        if not self._held:
            return Delta()
        self._read = self._read_reasoning
        return self._read()

    def _read_reasoning(self) -> Delta:
        reasoning, tag, rest = self._held.partition(THINK_END)
        if tag:
            self._held, self._read = rest, self._read_gap
            return Delta(reasoning=reasoning.rstrip()) + self._read()
        certain = len(_without_beginning_of(THINK_END, self._held).rstrip())
        reasoning, self._held = self._held[:certain], self._held[certain:]
        return Delta(reasoning=reasoning)

    def _read_gap(self) -> Delta:
        """The white space before the answer."""
        self._held = self._held.lstrip()
        if not self._held:
            return Delta()
        self._read = self._read_answer
        return self._read()

    def _read_answer(self) -> Delta:
        text, self._held = self._held, ""
        return self._answer.push(text)


def is_open_after(prompt: str, name: str) -> bool:
    """Whether a text begins within its reasoning.

    Args:
      prompt: What the chat template wrote. Templates of models that think open the reasoning at
        its end, or close it there where the request asks for none.
      name: Of the reasoning parser.
    """
    end = prompt.rstrip()
    return end.endswith(THINK) or (name == ALWAYS_OPEN and not end.endswith(THINK_END))


def thinking_after(prompt: str, name: str) -> str | None:
    """Whether a text begins within its reasoning: "open", "maybe", or None where it has none.

    Args: as of `is_open_after`.
    """
    if is_open_after(prompt, name):
        return "open"
    return None if prompt.rstrip().endswith(THINK_END) else "maybe"


def _without_beginning_of(tag: str, text: str) -> str:
    """The text up to where its end may be the beginning of the tag."""
    longest = min(len(tag) - 1, len(text))
    sizes = (size for size in range(longest, 0, -1) if text.endswith(tag[:size]))
    return text[: len(text) - next(sizes, 0)]
