"""Incremental output parser: splits generated text into content, reasoning and tool calls."""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shared.text.delimiters import THINK_END
from shared.text.parsing.delta import Delta, ToolCallDelta

Result = TypeVar("Result")
ParserStep = Generator[None, str, Result]
"""Coroutine of a parser: receives one character at a time, and "" at the end."""

_NOT_IN_NAMES = frozenset('\n<>{}"')
MAX_HELD = 256  # characters of white space before a tag that are part of the tag


@dataclass
class _Call:
    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class OutputBuilder:
    """Builder of the increment since the last `take`.

    Attributes:
      tools: Schema of the parameters of each function that may be called.
      are_calls_constrained: A grammar constrains the calls, so only its tags begin one.
      num_calls: Calls that have begun.
      num_whole: Calls with complete arguments.
      max_calls: Maximum number of calls; None: no limit.
      num_malformed: Calls that began with a tag and were returned as text, in whole or in part.
      new_id: Returns an id for a call that has none.
      is_thinking: Text is reasoning, until a call begins.
      reasoning_end: Closing tag of the reasoning.
      content_tags: Texts around the content, which are dropped.
      was_cut: The text ended at `max_tokens`.
    """

    def __init__(
        self,
        tools: Mapping[str, dict[str, Any]],
        max_calls: int | None,
        are_calls_constrained: bool,
    ) -> None:
        """Args: `max_calls` is the maximum number of calls of a choice; None: no limit."""
        self.tools = tools
        self.are_calls_constrained = are_calls_constrained
        self.num_calls = self.num_whole = self.num_malformed = 0
        self.new_id = lambda: f"call_{uuid.uuid4().hex}"
        self.is_thinking = False
        self.reasoning_end = THINK_END
        self.content_tags: tuple[str, ...] = ()
        self.was_cut = False
        self.max_calls = max_calls
        self._follows_call = False
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}

    def allows_call(self, name: Any) -> bool:
        """Returns True if a call of this function may begin."""
        return isinstance(name, str) and name in self.tools and self.num_calls != self.max_calls

    def add_text(self, text: str) -> None:
        """Adds text that belongs to no call."""
        (self._reasoning if self.is_thinking else self._text).append(text)
        self._follows_call &= not text

    def add_partial_tag(self, tag: str) -> None:
        """Adds the partial tag of a call with which the text ends.

        A partial tag directly after a complete call is dropped if `max_tokens` cut the text; the
        finish reason then reports the cut. In all other cases it is text.
        """
        if not (self.was_cut and self._follows_call):
            self.add_text(tag)

    def note_malformed(self) -> None:
        """Counts a malformed call, unless the text or the limit of calls ended it."""
        self.num_malformed += not (self.was_cut or self.num_calls == self.max_calls)

    def begin(self, name: str, call_id: str = "") -> None:
        """Begins a call of a function, with the id that the model wrote, or a new one."""
        self._calls[self.num_calls] = _Call(call_id or self.new_id(), name)
        self.num_calls += 1
        self.is_thinking, self._follows_call = False, True

    def add_arguments(self, arguments: str) -> None:
        """Adds the next part of the arguments of the newest call."""
        part = self._calls.setdefault(self.num_calls - 1, _Call("", ""))
        part.arguments.append(arguments)

    def add_whole_call(self, name: str, arguments: str) -> None:
        """Adds a complete call."""
        self.begin(name)
        self.add_arguments(arguments)
        self.end_call()

    def end_call(self) -> None:
        """Ends the arguments of the newest call."""
        self.num_whole += 1

    def take(self) -> Delta:
        """Returns the increment and resets the builder."""
        calls = tuple(
            ToolCallDelta(index, call.call_id, call.name, "".join(call.arguments))
            for index, call in self._calls.items()
        )
        delta = Delta("".join(self._text), "".join(self._reasoning), calls)
        self._text, self._reasoning, self._calls = [], [], {}
        return delta


class TextCursor:
    """Cursor over the characters of a text, with push-back.

    Attributes:
      ended: All characters were received; some may have been put back.
    """

    def __init__(self) -> None:
        self.ended = False
        self._back: list[str] = []  # in reverse order
        self._record: list[str] | None = None

    def next(self) -> ParserStep[str]:
        """Returns the next character; "" at the end and after it."""
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
        """Puts characters back, so that they are read next."""
        self._back += reversed(text)
        if self._record is not None:
            del self._record[max(0, len(self._record) - len(text)) :]

    def record(self) -> None:
        """Starts to record the characters that are read."""
        self._record = []

    def recorded(self) -> str:
        """Returns the characters since `record`, and at the end of the text those put back."""
        record, self._record = self._record or [], None
        if self.ended:
            record += reversed(self._back)
            self._back = []
        return "".join(record)

    def rest(self, output: OutputBuilder) -> ParserStep[None]:
        """Adds the rest of the text as text, without tags of the content."""
        if output.content_tags:
            while (yield from self.up_to(output.content_tags, output)):
                pass
        while char := (yield from self.next()):
            output.add_text(char)

    def skip_space(self) -> ParserStep[str]:
        """Reads and returns white space."""
        space = ""
        while (char := (yield from self.next())) and char.isspace():
            space += char
        self.put_back(char)
        return space

    def up_to(self, tags: tuple[str, ...], output: OutputBuilder) -> ParserStep[str]:
        """Adds text up to a tag; returns the tag with the white space before it, "" at the end."""
        self._record = None
        held, first = "", {tag[0] for tag in tags}
        while char := (yield from self.next()):
            if not held and char not in first and not char.isspace():  # most of a text
                output.add_text(char)
                continue
            held += char
            while len(held) > MAX_HELD or not _may_begin(held.lstrip(), tags):
                output.add_text(held[0])
                held = held[1:]
            if held.endswith(tags):
                return held
        if held.strip():
            output.add_partial_tag(held)
        elif not output.num_calls:  # white space after a call is dropped
            output.add_text(held)
        return ""

    def expect(self, tag: str) -> ParserStep[str]:
        """Reads white space and a tag; reads nothing and returns "" if other text follows."""
        held = yield from self.skip_space()
        for expected in tag:
            char = yield from self.next()
            held += char
            if char != expected:
                self.put_back(held)
                return ""
        return held

    def expect_any(self, tags: tuple[str, ...]) -> ParserStep[str]:
        """Reads white space and the first of the tags that follows; see `expect`."""
        for tag in tags:
            if held := (yield from self.expect(tag)):
                return held
        return ""

    def give_up(self, text: str, output: OutputBuilder) -> None:
        """Adds text that is no call as text; white space at its end is put back."""
        words = text.rstrip()
        output.add_text(words)
        self.put_back(text[len(words) :])

    def give_up_lead(self, lead: str, output: OutputBuilder) -> None:
        """Adds a tag that no call follows as text, and puts back the characters since `record`."""
        text = self.recorded()
        if self.ended and not self._back:
            output.add_partial_tag(lead + text)
        else:
            self.put_back(text)
            self.give_up(lead, output)

    def give_up_recorded(self, lead: str, output: OutputBuilder, value: str) -> None:
        """Adds a tag and the characters since `record` as text.

        At the end of the output they are a partial tag unless they contain `value`, the tag of a
        value.
        """
        text = lead + self.recorded()
        if self.ended and value not in text:
            output.add_partial_tag(text)
        else:
            self.give_up(text, output)

    def until(self, end: str, most: int) -> ParserStep[str | None]:
        """Reads a name and its end; returns the name, or None if it does not end.

        Args:
          end: Text after the name.
          most: Maximum characters of the name, which has no line breaks and brackets.
        """
        text = ""
        while len(text) < most + len(end) and (char := (yield from self.next())):
            text += char
            if text.endswith(end):
                return text.removesuffix(end)
            if char in _NOT_IN_NAMES and not _ends_within(text, end):
                break
        return None

    def until_any(self, ends: str, most: int = MAX_HELD) -> ParserStep[str]:
        """Reads and returns text up to one of the characters."""
        text = ""
        while len(text) < most and (char := (yield from self.next())):
            if char in ends:
                self.put_back(char)
                break
            text += char
        return text

    def close(
        self, tag: str, output: OutputBuilder, others: tuple[str, ...] = ()
    ) -> ParserStep[None]:
        """Reads the closing tag of a call, which may be missing or incomplete.

        Args:
          tag: Closing tag.
          output: Receives an incomplete tag at the end of the output.
          others: Tags that may follow instead, and are not read.
        """
        self.record()
        if (yield from self.expect(tag)) or not self.ended:
            return
        rest = self.recorded()
        if rest.strip() and _may_begin(rest.lstrip(), (tag, *others)):
            output.add_partial_tag(rest)
        else:
            self.put_back(rest)


def _ends_within(text: str, tag: str) -> bool:
    """Returns True if a text ends with the beginning of a tag."""
    return any(tag.startswith(text[-size:]) for size in range(1, len(tag) + 1))


def _may_begin(text: str, tags: tuple[str, ...]) -> bool:
    return any(tag.startswith(text) for tag in tags)


ReadAll = Callable[[TextCursor, OutputBuilder], ParserStep[None]]
"""Parses a text to its end."""

ReadCall = Callable[[TextCursor, OutputBuilder, str], ParserStep[bool]]
"""Parses a call after its opening tag; returns True if there was one. The last argument is the
opening tag with the white space before it. Text outside the call is added as text or put back."""


class TextReader:
    """Parser of the text of a choice; implements `OutputParser`.

    Args:
      read: Parses the whole text.
      output: Builds the increments.
    """

    def __init__(self, read: ReadAll, output: OutputBuilder) -> None:
        self._said = output
        self._reading = read(TextCursor(), output)
        next(self._reading)

    @property
    def has_whole_calls(self) -> bool:
        """Same as `OutputParser.has_whole_calls`."""
        return self._said.num_whole == self._said.num_calls > 0

    @property
    def num_malformed_calls(self) -> int:
        """Same as `OutputParser.num_malformed_calls`."""
        return self._said.num_malformed

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
