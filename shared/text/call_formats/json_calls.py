"""Calls written as JSON objects with a name and arguments, alone or in a list."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shared.text.call_formats.call_format import (
    Call,
    CallableFunction,
    any_of,
    object_schema,
    to_json,
)
from shared.text.grammar_source import literal, schema_rule
from shared.text.parsing import arguments as values
from shared.text.parsing.json_object import JsonObject
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

_MORE_MEMBERS = re.compile(r'(?:\s*,\s*"(?:id|type)"\s*:\s*"[^"\\]*")*\s*\}')


@dataclass(frozen=True, kw_only=True)
class CallKeys:
    """Keys of the JSON object of a call.

    Attributes:
      first: Key of a string before the name; "": none.
      name: Key of the function's name.
      arguments: Keys of the arguments.
    """

    first: str = ""
    name: str
    arguments: tuple[str, ...]

    @cached_property
    def header(self) -> re.Pattern[str]:
        """Expression of the text before the arguments; its group is the name."""
        first = rf'(?:"{self.first}"\s*:\s*"[^"\\]*"\s*,\s*)?' if self.first else ""
        name = rf'"{self.name}"\s*:\s*"([^"\\]+)"\s*,\s*'
        return re.compile(rf'\s*\{{\s*{first}{name}"(?:{"|".join(self.arguments)})"\s*:\s*')

    def call_of(self, given: dict[str, Any]) -> tuple[Any, Any] | None:
        """Returns name and arguments of an object; None if it has other members."""
        if given.keys() - {self.first, self.name, *self.arguments, "id", "type"}:
            return None
        arguments = next((given[key] for key in self.arguments if key in given), {})
        return given.get(self.name), arguments


NAME_KEYS = CallKeys(name="name", arguments=("arguments", "parameters"))


def read_json_call(
    source: TextCursor, output: OutputBuilder, lead: str, keys: CallKeys = NAME_KEYS
) -> ParserStep[bool]:
    """Parses a tool call written as a JSON object with a name and arguments.

    The arguments are streamed if the name precedes them, as models are trained to write it. Else
    the call is added when the object is complete.

    Args:
      source: Reads the text.
      output: Receives the call, or the text.
      lead: Text before the object; added as text if there is no call.
      keys: Keys of the object.

    Returns:
      True if there was a call. Other text is added as text, or put back into `source`.
    """
    scan, held = JsonObject(), lead + (yield from source.skip_space())
    has_begun = is_arguing = False
    while not scan.ended:
        char = yield from source.next()
        if not char and not has_begun and scan.depth < 2:
            output.add_partial_tag(held)
            return False
        if not char or not scan.take(char):
            source.put_back(char)
            source.give_up(held, output)
            return False
        opens = not has_begun and char == "{" and scan.depth == 2
        if opens and _begin(held.removeprefix(lead), output, keys):
            has_begun, is_arguing, held = True, True, ""
        if is_arguing:
            output.add_arguments(char)
            is_arguing = scan.depth > 1
            if not is_arguing:
                output.end_call()
        else:
            held += char
    if has_begun and _MORE_MEMBERS.fullmatch(held):
        return True
    if not has_begun and _add_whole_call(held.removeprefix(lead), output, keys):
        return True
    output.add_text(held)
    return has_begun


def read_call_list(
    source: TextCursor, output: OutputBuilder, lead: str, keys: CallKeys = NAME_KEYS
) -> ParserStep[bool]:
    """Parses a list of calls in brackets; the arguments are those of `read_json_call`."""
    bracket = yield from source.expect("[")
    if not bracket:
        source.record()
        yield from source.skip_space()
        source.give_up_lead(lead, output)
        return False
    lead, has_call = lead + bracket, False
    while (yield from read_json_call(source, output, lead, keys)):
        has_call = True
        if not (lead := (yield from source.expect(","))):
            yield from source.close("]", output)
            return True
    return has_call


def read_json_arguments(
    source: TextCursor, output: OutputBuilder, name: str, call_id: str = ""
) -> ParserStep[bool]:
    """Begins a call at the opening brace that follows, and streams its arguments.

    Returns:
      True if the arguments are complete; False if they break off, and the rest is text.
    """
    scan = JsonObject()
    output.begin(name, call_id)
    while not scan.ended:
        char = yield from source.next()
        if not char or not scan.take(char):
            source.put_back(char)
            return False
        output.add_arguments(char)
    output.end_call()
    return True


def function_rules(tools: Sequence[CallableFunction], key: str, more: str = "") -> Iterator[str]:
    """Yields rules `f_0`, `f_1`, ... of JSON objects with a name and arguments.

    Args:
      tools: Functions that may be called.
      key: Key of the arguments.
      more: Rule of further members; "": none.
    """
    for number, tool in enumerate(tools):
        head = f'{{"name": {to_json(tool.name)}, "{key}": '
        yield f"f_{number}: {literal(head)} a_{number} {more} {literal('}')}"
    yield from argument_rules(tools)


def list_rule(tools: Sequence[CallableFunction], many: bool) -> str:
    """Returns the rule `list` of calls in brackets."""
    call = f"({any_of('f', tools)})"
    more = f' (", " {call})*' if many else ""
    return f'list: "[" {call}{more} "]"'


def argument_rules(tools: Sequence[CallableFunction]) -> Iterator[str]:
    """Yields rules `a_0`, `a_1`, ... of JSON arguments."""
    for number, tool in enumerate(tools):
        is_text = tool.pattern is not None
        yield schema_rule(f"a_{number}", _text_schema(tool) if is_text else object_schema(tool))


def _text_schema(tool: CallableFunction) -> dict[str, Any]:
    """Returns the schema of arguments with one text that matches the pattern of a function."""
    assert tool.schema is not None, "a function with a pattern has one argument"
    (key,) = tool.schema["properties"]
    text = {"type": "string", "pattern": f"^(?:{tool.pattern})$"}
    return {**tool.schema, "properties": {key: text}}


def written_object(call: Call, key: str) -> str:
    """Returns a call as a JSON object."""
    name, arguments = call
    return f'{{"name": {to_json(name)}, "{key}": {to_json(arguments)}}}'


def written_list(calls: Sequence[Call]) -> str:
    """Returns calls as a JSON list."""
    return f"[{', '.join(written_object(call, 'arguments') for call in calls)}]"


def _begin(header: str, output: OutputBuilder, keys: CallKeys) -> bool:
    """Starts a call if the header is complete and the function may be called."""
    parts = keys.header.fullmatch(header)
    if not parts or not output.allows_call(parts[1]):
        return False
    output.begin(parts[1])
    return True


def _add_whole_call(text: str, output: OutputBuilder, keys: CallKeys) -> bool:
    """Adds the call of a complete object; returns False if the object is not a call."""
    given = read_object(text)  # None: nested too deeply
    call = None if given is None else keys.call_of(given)
    if call is None:
        return False
    name, arguments = call
    if isinstance(arguments, str):  # JSON within JSON, as OpenAI writes it
        arguments = read_object(arguments)
    if not (output.allows_call(name) and isinstance(arguments, dict)):
        return False
    output.add_whole_call(name, values.to_json(arguments))
    return True


def read_object(text: str) -> dict[str, Any] | None:
    """Returns the JSON object of a text; None if the text is not one."""
    try:
        value = values.from_json(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
