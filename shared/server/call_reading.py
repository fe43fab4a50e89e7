"""What reads calls of tools out of a text: characters in, text and calls out."""

from __future__ import annotations

import re
import uuid
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from shared.server.arguments import from_json, to_json
from shared.server.delta import Delta, ToolCall
from shared.server.json_object import JsonObject

Result = TypeVar("Result")
Reading = Generator[None, str, Result]
"""A part of a text being read: it is sent a character at a time, and "" at the end of the text."""

MAX_HELD = 256  # characters of white space that may stand before a mark and belong to it
_HEADER = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*')
_KEYS = {"name", "arguments", "parameters", "id", "type"}


class Source:
    """The characters of a text, of which some may be read once more."""

    def __init__(self) -> None:
        self._back: list[str] = []  # the next one last
        self._ended = False

    def next(self) -> Reading[str]:
        """The next character; "" at the end, again and again."""
        if self._back:
            return self._back.pop()
        if not self._ended:
            char = yield
            self._ended = not char
            return char
        return ""

    def put_back(self, text: str) -> None:
        """Makes these the next characters."""
        self._back += reversed(text)

    def rest(self, said: Said) -> Reading[None]:
        """Says all that is left as text."""
        while char := (yield from self.next()):
            said.say(char)

    def skip_space(self) -> Reading[str]:
        """The white space that comes next."""
        space = ""
        while (char := (yield from self.next())) and char.isspace():
            space += char
        self.put_back(char)
        return space

    def up_to(self, mark: str, said: Said) -> Reading[str]:
        """Says text up to a mark and the white space before it; returns both, "" at the end."""
        held = ""
        while char := (yield from self.next()):
            held += char
            while len(held) > MAX_HELD or not mark.startswith(held.lstrip()):
                said.say(held[0])
                held = held[1:]
            if held.endswith(mark):
                return held
        if held.strip() or not said.num_calls:  # white space behind a call is of no text
            said.say(held)
        return ""

    def expect(self, mark: str) -> Reading[str]:
        """Reads white space and a mark; reads and returns nothing where other text comes next."""
        held = yield from self.skip_space()
        for want in mark:
            char = yield from self.next()
            held += char
            if char != want:
                self.put_back(held)
                return ""
        return held


@dataclass
class _Call:
    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)


class Said:
    """What was read since it was last asked for.

    Attributes:
      tools: The schema of the parameters of each function that may be called.
      num_calls: Calls that have begun.
    """

    def __init__(self, tools: Mapping[str, dict[str, Any]], most_calls: int | None) -> None:
        """Args: `most_calls` bounds the calls of a choice; None: any number."""
        self.tools = tools
        self.num_calls = 0
        self._most_calls = most_calls
        self._text: list[str] = []
        self._calls: dict[int, _Call] = {}

    def takes(self, name: Any) -> bool:
        """Whether a call of this function may begin."""
        return isinstance(name, str) and name in self.tools and self.num_calls != self._most_calls

    def say(self, text: str) -> None:
        """Text that is of no call."""
        self._text.append(text)

    def begin(self, name: str) -> None:
        """A call has begun."""
        self._calls[self.num_calls] = _Call(f"call_{uuid.uuid4().hex}", name)
        self.num_calls += 1

    def argue(self, arguments: str) -> None:
        """The next part of the arguments of the call that began last."""
        part = self._calls.setdefault(self.num_calls - 1, _Call("", ""))
        part.arguments.append(arguments)

    def take(self) -> Delta:
        """All of it, once."""
        calls = tuple(
            ToolCall(index, call.call_id, call.name, "".join(call.arguments))
            for index, call in self._calls.items()
        )
        text = "".join(self._text)
        self._text, self._calls = [], {}
        return Delta(text, "", calls)


def read_json_call(source: Source, said: Said, lead: str) -> Reading[bool]:
    """Reads a call as a JSON object of a name and arguments.

    The arguments are said while they are read where the name stands before them, as models are
    taught, and else when the object is whole.

    Args:
      lead: What stands before it; said as text where there is no call.

    Returns:
      Whether there was one. All that is not of it is said as text, or left to be read.
    """
    scan, held = JsonObject(), lead + (yield from source.skip_space())
    has_begun = is_arguing = False
    while not scan.ended:
        char = yield from source.next()
        if not char or not scan.take(char):
            said.say(held)
            source.put_back(char)
            return False
        opens = not has_begun and char == "{" and scan.depth == 2
        if opens and _begin(held.removeprefix(lead), said):
            has_begun, is_arguing, held = True, True, ""
        if is_arguing:
            said.argue(char)
            is_arguing = scan.depth > 1
        else:
            held += char
    if has_begun and held.strip() == "}":
        return True
    if not has_begun and _say_whole(held.removeprefix(lead), said):
        return True
    said.say(held)
    return has_begun


def _begin(header: str, said: Said) -> bool:
    """Begins a call whose arguments come next, if there is one."""
    found = _HEADER.fullmatch(header)
    if not found or not said.takes(found[1]):
        return False
    said.begin(found[1])
    return True


def _say_whole(text: str, said: Said) -> bool:
    """Says the call that an object is, if it is one."""
    call = read_object(text)
    if call is None:  # nested too deeply
        return False
    arguments = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # JSON within JSON, as OpenAI writes it
        arguments = read_object(arguments)
    if not (call.keys() <= _KEYS and said.takes(call.get("name")) and isinstance(arguments, dict)):
        return False
    said.begin(call["name"])
    said.argue(to_json(arguments))
    return True


def read_object(text: str) -> dict[str, Any] | None:
    """The JSON object that a text is; None where it is none."""
    try:
        found = from_json(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
