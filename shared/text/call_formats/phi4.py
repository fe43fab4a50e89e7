"""JSON in `<|tool_call|>`: Phi-4-mini."""

from __future__ import annotations

from collections.abc import Sequence

from shared.text.call_formats.call_format import Call, CallableFunction, CallFormat, any_of
from shared.text.call_formats.json_calls import (
    function_rules,
    list_rule,
    read_call_list,
    read_json_call,
    written_list,
)
from shared.text.grammar_source import literal
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

_OPENING, _END = "<|tool_call|>", "<|/tool_call|>"
_FUNCTOOLS = "functools["


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses a call or a list of calls, and the closing tag."""
    if lead.endswith(_FUNCTOOLS):  # the form without tags, which some templates describe
        source.put_back("[")
        return (yield from read_call_list(source, output, lead[:-1]))
    space = yield from source.skip_space()
    char = yield from source.next()
    source.put_back(space + char)
    read = read_json_call if char == "{" else read_call_list
    if (yield from read(source, output, lead)):
        yield from source.close(_END, output)
        return True
    return False


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of a call or a list of calls after an opening tag."""
    return [
        f"inner: (list | {any_of('f', tools)}) {literal(_END)}",
        list_rule(tools, many),
        *function_rules(tools, "arguments"),
    ]


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    return _OPENING + written_list(calls) + _END


FORMAT = CallFormat(
    name="phi4",
    description="JSON in <|tool_call|>",
    markers=(_OPENING, _END),
    openings=(_OPENING,),
    loose_openings=(_FUNCTOOLS,),
    marks=(_OPENING, _END),
    read_calls=read_calls,
    rules=rules,
    separator="",
    write=write,
)
