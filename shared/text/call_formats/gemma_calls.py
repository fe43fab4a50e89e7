"""Calls of Gemma: `call:NAME{key:value}` with strings between quote tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shared.text.call_formats.call_format import (
    Call,
    CallableFunction,
    CallFormat,
    any_of,
    object_schema,
)
from shared.text.call_formats.literal_rules import LiteralRules, Notation, common_rules
from shared.text.call_formats.typed_parameters import MAX_NAME
from shared.text.grammar_source import InvalidGrammarError, literal
from shared.text.json_schema_refs import resolve_ref
from shared.text.parsing import arguments as values
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

_CALL = "call:"
_WORD = re.compile(r"[^:,{}\[\]<>]+")
"""Key, number or constant."""
_CONSTANTS = {"true": True, "false": False, "null": None, "None": None}
_MAX_DEPTH = 64


@dataclass(frozen=True)
class GemmaTags:
    """Tags of a model's calls.

    Attributes:
      begin, end: Texts around a call.
      quote: Text before and after a string, which has no escapes.
    """

    begin: str
    end: str
    quote: str

    def call_format(self, name: str, description: str) -> CallFormat:
        """Returns the format of calls in these tags."""
        return CallFormat(
            name=name,
            description=description,
            markers=(self.begin,),
            openings=(self.begin,),
            marks=(self.begin, self.end, self.quote),
            read_calls=self.read_calls,
            rules=self.rules,
            separator="",
            write=self.write,
        )

    def read_calls(self, source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
        """Parses one call."""
        source.record()
        if (yield from source.expect(_CALL)):
            name = (yield from source.until("{", MAX_NAME)) or ""
            text = (yield from self._entries(source, output)) if output.allows_call(name) else None
            if text is not None and (yield from source.expect(self.end)):
                try:
                    arguments = values.to_json(_ValueReader(text, self.quote).entries())
                except (ValueError, TypeError):
                    arguments = None
                if arguments is not None:
                    source.recorded()
                    output.add_whole_call(name, arguments)
                    return True
        source.give_up_recorded(lead, output, self.quote)
        return False

    def _entries(self, source: TextCursor, output: OutputBuilder) -> ParserStep[str | None]:
        """Reads entries up to the closing brace; None if they do not end."""
        text, depth, is_quoted = "", 1, False
        while depth and len(text) < values.MAX_LITERAL and (char := (yield from source.next())):
            text += char
            if output.is_thinking and text.endswith(output.reasoning_end):
                source.put_back(output.reasoning_end)
                return None
            if text.endswith(self.quote):
                is_quoted = not is_quoted
            elif not is_quoted:
                depth += {"{": 1, "}": -1}.get(char, 0)
        return text if not depth else None

    def rules(self, tools: Sequence[CallableFunction], many: bool) -> list[str]:
        """Returns the rules of a call after its opening tag."""
        made = [f'inner: {literal(_CALL)} ({any_of("f", tools)}) "}}" {literal(self.end)}']
        made += [*common_rules(self.notation), f"quoted[suffix={literal(self.quote)}]: /(.|\\n)*/"]
        for number, tool in enumerate(tools):
            schema = object_schema(tool)
            written = LiteralRules(self.notation, schema, f"v_{number}")
            entries = '(any_key any_value ("," any_key any_value)*)?'
            if tool.schema is not None:
                whole = resolve_ref(schema, schema)
                _check_keys(tool.name, whole)
                entries = written.entries(whole, self.notation.write_key)
            made.append(f"f_{number}: {literal(tool.name + '{')} {entries}")
            made += written.rules
        return made

    def write(self, calls: Sequence[Call]) -> str:
        """Returns the text of calls."""
        return "".join(map(self._written, calls))

    def _written(self, call: Call) -> str:
        name, arguments = call
        return f"{self.begin}{_CALL}{name}{self.notation.write(arguments)}{self.end}"

    @cached_property
    def notation(self) -> Notation:
        """Notation of the arguments; the chat template sorts the keys of an object."""
        return Notation(
            constants={True: "true", False: "false", None: "null"},
            string=f"{literal(self.quote)} quoted",
            write_string=lambda value: f"{self.quote}{value}{self.quote}",
            write_key=lambda key: f"{key}:",
            key='/[^:,{}\\[\\]<>\\s"]+/ ":"',
            separator=",",
            is_sorted=True,
        )


def _check_keys(name: str, schema: Any) -> None:
    """Raises for keys that the notation cannot represent."""
    for key in schema.get("properties", {}):
        if not _WORD.fullmatch(key) or key != key.strip():
            reason = "has a parameter name with outer white space or a character of :,{}[]<>"
            raise InvalidGrammarError(
                f"the function {name} {reason}, which this tool call format does not support"
            )


class _ValueReader:
    """Reader of a text of entries and their closing brace.

    Raises:
      ValueError: The text is invalid.
    """

    def __init__(self, text: str, quote: str) -> None:
        self._text, self._quote, self._place = text, quote, 0

    def entries(self, depth: int = 0) -> dict[str, Any]:
        """Returns the object up to its closing brace."""
        found: dict[str, Any] = {}
        while not self._takes("}"):
            if found and not self._takes(","):
                raise ValueError("a comma is missing")
            key = self._word()
            if not self._takes(":") or key in found:
                raise ValueError("a key has no value, or two")
            found[key] = self._value(depth + 1)
        return found

    def _value(self, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deeply")
        if self._takes(self._quote):
            text, found, _ = self._text[self._place :].partition(self._quote)
            if not found:
                raise ValueError("a string does not end")
            self._place += len(text) + len(self._quote)
            return text
        if self._takes("{"):
            return self.entries(depth)
        if self._takes("["):
            return self._items(depth)
        word = self._word().strip()
        return _CONSTANTS[word] if word in _CONSTANTS else _number(word)

    def _items(self, depth: int) -> list[Any]:
        found: list[Any] = []
        while not self._takes("]"):
            if found and not self._takes(","):
                raise ValueError("a comma is missing")
            found.append(self._value(depth + 1))
        return found

    def _takes(self, text: str) -> bool:
        """Skips white space and a text; returns False if another text follows."""
        while self._text[self._place : self._place + 1].isspace():
            self._place += 1
        found = self._text.startswith(text, self._place)
        self._place += len(text) if found else 0
        return found

    def _word(self) -> str:
        self._takes("")
        if (match := _WORD.match(self._text, self._place)) is None:
            raise ValueError("a key or a value is missing")
        self._place = match.end()
        return match[0]


def _number(word: str) -> int | float:
    value = values.from_json(word)
    if isinstance(value, int | float):
        return value
    raise ValueError("not a number")
