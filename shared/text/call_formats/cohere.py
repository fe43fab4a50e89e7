"""A JSON list of numbered calls in `<|START_ACTION|>`: Cohere Command R7B, Command A."""

from __future__ import annotations

from collections.abc import Sequence

from shared.text.call_formats.call_format import (
    Call,
    CallableFunction,
    CallFormat,
    any_of,
    to_json,
)
from shared.text.call_formats.json_calls import CallKeys, argument_rules, read_call_list
from shared.text.grammar_source import literal
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

_OPENING, _END = "<|START_ACTION|>", "<|END_ACTION|>"
_KEYS = CallKeys(first="tool_call_id", name="tool_name", arguments=("parameters",))
_LINE, _LAST_LINE = "\n    ", "\n"


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses a list of calls and the closing tag; numbers of calls are no ids."""
    has_call = yield from read_call_list(source, output, lead, _KEYS)
    if has_call:
        yield from source.close(_END, output)
    return has_call


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of a list of calls and the closing tag; line breaks are optional."""
    more = ' ("," LINE call)*' if many else ""
    end = f'"]" {literal(_END)}'
    made = [f'inner: "[" LINE call{more} LINE {end}', r"LINE: /(\n {0,4})?/"]
    made += [f"call: {any_of('f', tools)}", "number: /[0-9]{1,4}/"]
    begin = literal(f'{{"{_KEYS.first}": "')
    for number, tool in enumerate(tools):
        head = literal(f'", "{_KEYS.name}": {to_json(tool.name)}, "{_KEYS.arguments[0]}": ')
        made.append(f"f_{number}: {begin} number {head} a_{number} {literal('}')}")
    return made + list(argument_rules(tools))


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    written = [
        to_json({"tool_call_id": str(number), "tool_name": name, "parameters": arguments})
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"{_OPENING}[{_LINE}{f',{_LINE}'.join(written)}{_LAST_LINE}]{_END}"


FORMAT = CallFormat(
    name="cohere",
    description="JSON list with tool_name in <|START_ACTION|>",
    markers=(_OPENING, "tool_name"),
    openings=(_OPENING,),
    marks=(_OPENING, _END),
    read_calls=read_calls,
    rules=rules,
    write=write,
)
