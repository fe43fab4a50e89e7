"""A JSON list in `<TOOLCALL>`: Nemotron Nano 2."""

from __future__ import annotations

from collections.abc import Sequence

from shared.text.call_formats.call_format import Call, CallableFunction, CallFormat
from shared.text.call_formats.json_calls import (
    function_rules,
    list_rule,
    read_call_list,
    written_list,
)
from shared.text.grammar_source import literal
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

_OPENING, _END = "<TOOLCALL>", "</TOOLCALL>"


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses a list of calls and the closing tag."""
    has_call = yield from read_call_list(source, output, lead)
    if has_call:
        yield from source.close(_END, output)
    return has_call


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of a list of calls and the closing tag."""
    listed = list_rule(tools, many)
    return [f"inner: list {literal(_END)}", listed, *function_rules(tools, "arguments")]


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    return _OPENING + written_list(calls) + _END


FORMAT = CallFormat(
    name="nemotron",
    description="JSON list in <TOOLCALL>",
    markers=(_OPENING,),
    openings=(_OPENING,),
    marks=(_OPENING, _END),
    read_calls=read_calls,
    rules=rules,
    write=write,
)
