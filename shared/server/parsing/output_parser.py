"""Incremental output parser: splits generated text into content, reasoning and tool calls."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shared.server.parsing.delta import Delta, ToolCallDelta

Result = TypeVar("Result")
ParserStep = Generator[None, str, Result]
"""A part of a text being read: it is sent a character at a time, and "" at the end of the text."""

MAX_HELD = 256  # characters of white space that may stand before a mark and belong to it


@dataclass
class _Call:
    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Said:
    """Builder of the output since the last call.

    Attributes:
      tools: The schema of the parameters of each function that may be called.
      are_calls_held: A grammar holds the calls to their schemas: only what it begins is one.
      num_calls: Calls that have begun.
      num_whole: Those of them whose arguments are whole.
      is_thinking: What is said is reasoning, until a call begins.
      was_cut: The text ended since it may have no more tokens.
    """

    def __init__(
        self, tools: Mapping[str, dict[str, Any]], most_calls: int | None, are_calls_held: bool
    ) -> None:
        """Args: `most_calls` bounds the calls of a choice; None: any number."""
        self.tools = tools
        self.are_calls_held = are_calls_held
        self.num_calls = self.num_whole = 0
        self.is_thinking = False
        self.was_cut = False
        self._most_calls = most_calls
        self._is_behind_call = False
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}

    def takes(self, name: Any) -> bool:
        """Returns True if a call of this function may begin."""
        return isinstance(name, str) and name in self.tools and self.num_calls != self._most_calls

    def add_text(self, text: str) -> None:
        """Text that is of no call."""
        (self._reasoning if self.is_thinking else self._text).append(text)
        self._is_behind_call &= not text

    def leave(self, mark: str) -> None:
        """The beginning or the end of a call's mark, with which the text ends.

        Right behind a whole call it is dropped where the text was cut: it has no word for anyone,
        and the reason of the end tells that more was to come. Else it is text.
        """
        if not (self.was_cut and self._is_behind_call):
            self.add_text(mark)

    def begin(self, name: str) -> None:
        """A call has begun."""
        self._calls[self.num_calls] = _Call(f"call_{uuid.uuid4().hex}", name)
        self.num_calls += 1
        self.is_thinking, self._is_behind_call = False, True

    def add_arguments(self, arguments: str) -> None:
        """The next part of the arguments of the call that began last."""
        part = self._calls.setdefault(self.num_calls - 1, _Call("", ""))
        part.arguments.append(arguments)

    def end_call(self) -> None:
        """The arguments of the call that began last are whole."""
        self.num_whole += 1

    def take(self) -> Delta:
        """All of it, once."""
        calls = tuple(
            ToolCallDelta(index, call.call_id, call.name, "".join(call.arguments))
            for index, call in self._calls.items()
        )
        delta = Delta("".join(self._text), "".join(self._reasoning), calls)
        self._text, self._reasoning, self._calls = [], [], {}
        return delta


class TextCursor:
    """The characters of a text, of which some may be read once more.

    Attributes:
      ended: All characters were sent; some may be left to be read once more.
    """

    def __init__(self) -> None:
        self.ended = False
        self._back: list[str] = []  # the next one last
        self._record: list[str] | None = None

    def next(self) -> ParserStep[str]:
        """The next character; "" at the end, again and again."""
        if self._back:
            char = self._back.pop()
        elif self.ended:
            return ""
        else:
            char = yield
            self.ended = not char
        if self._record is not None:
            self._record += char
        return char

    def put_back(self, text: str) -> None:
        """Makes what was read last the next characters."""
        self._back += reversed(text)
        if self._record is not None:
            del self._record[max(0, len(self._record) - len(text)) :]

    def record(self) -> None:
        """Keeps what is read from here on."""
        self._record = []

    def recorded(self) -> str:
        """Returns the output since `record`, and the rest at the end of the text."""
        record, self._record = self._record or [], None
        if self.ended:
            record += reversed(self._back)
            self._back = []
        return "".join(record)

    def rest(self, said: Said) -> ParserStep[None]:
        """Says all that is left as text."""
        while char := (yield from self.next()):
            said.add_text(char)

    def skip_space(self) -> ParserStep[str]:
        """The white space that comes next."""
        space = ""
        while (char := (yield from self.next())) and char.isspace():
            space += char
        self.put_back(char)
        return space

    def up_to(self, marks: tuple[str, ...], said: Said) -> ParserStep[str]:
        """Says text up to a mark and the white space before it; returns both, "" at the end."""
        self._record = None
        held, first = "", {mark[0] for mark in marks}
        while char := (yield from self.next()):
            if not held and char not in first and not char.isspace():  # most of a text
                said.add_text(char)
                continue
            held += char
            while len(held) > MAX_HELD or not _may_begin(held.lstrip(), marks):
                said.add_text(held[0])
                held = held[1:]
            if held.endswith(marks):
                return held
        if held.strip():
            said.leave(held)
        elif not said.num_calls:  # white space behind a call is of no text
            said.add_text(held)
        return ""

    def expect(self, mark: str) -> ParserStep[str]:
        """Reads white space and a mark; reads and returns nothing where other text comes next."""
        held = yield from self.skip_space()
        for want in mark:
            char = yield from self.next()
            held += char
            if char != want:
                self.put_back(held)
                return ""
        return held

    def give_up(self, text: str, said: Said) -> None:
        """Says as text what was read and is no call; white space at its end is read once more."""
        words = text.rstrip()
        said.add_text(words)
        self.put_back(text[len(words) :])

    def close(self, mark: str, said: Said) -> ParserStep[None]:
        """Reads the mark that ends a call, which may be missing or cut."""
        self.record()
        if (yield from self.expect(mark)) or not self.ended:
            return
        left = self.recorded()
        if left.strip() and mark.startswith(left.lstrip()):
            said.leave(left)
        else:
            self.put_back(left)


def _may_begin(text: str, marks: tuple[str, ...]) -> bool:
    return any(mark.startswith(text) for mark in marks)


ReadAll = Callable[[TextCursor, Said], ParserStep[None]]
"""Reads a text to its end."""

ReadCall = Callable[[TextCursor, Said, str], ParserStep[bool]]
"""Reads a call behind the mark that begins it, which is its last argument, with the white space
before; whether there was one. All that is not of it is said as text, or left to be read."""


class TextReader:
    """Reads the text of a choice, an `OutputParser`.

    Args:
      read: Reads all of a text.
      said: What it says it to.
    """

    def __init__(self, read: ReadAll, said: Said) -> None:
        self._said = said
        self._reading = read(TextCursor(), said)
        next(self._reading)

    @property
    def has_whole_calls(self) -> bool:
        """See `OutputParser`."""
        return self._said.num_whole == self._said.num_calls > 0

    def push(self, text: str) -> Delta:
        """Returns the parsed output of a text."""
        for char in text:
            self._reading.send(char)
        return self._said.take()

    def flush(self, was_cut: bool) -> Delta:
        """Returns the text that was held back."""
        self._said.was_cut = was_cut
        with contextlib.suppress(StopIteration):
            self._reading.send("")
        return self._said.take()
