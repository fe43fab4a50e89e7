"""A name and JSON between DeepSeek's tokens: DeepSeek V3.1."""

from __future__ import annotations

from collections.abc import Sequence

from shared.text.call_formats.call_format import Call, CallableFunction, CallFormat, any_of
from shared.text.call_formats.deepseek_v3 import (
    CALL_BEGIN,
    CALL_END,
    CALL_SEPARATOR,
    CALLS,
    CALLS_END,
    MARKS,
)
from shared.text.call_formats.named_calls import NameTags, read_section
from shared.text.grammar_source import literal
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

_TAGS = NameTags(begin=CALL_BEGIN, after_name=CALL_SEPARATOR, end=CALL_END)


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses the calls of a section."""
    return (yield from read_section(source, output, lead, _TAGS, CALLS_END))


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of the calls in a section."""
    inner = f"inner: call{'+' if many else ''} {literal(CALLS_END)}"
    return [inner, f"call: {any_of('n', tools)}", *_TAGS.rules(tools)]


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    return CALLS + "".join(map(_TAGS.write, calls)) + CALLS_END


FORMAT = CallFormat(
    name="deepseek_v31",
    description="a name, <｜tool▁sep｜> and JSON",
    markers=(CALL_BEGIN,),
    openings=(CALLS,),
    marks=MARKS,
    read_calls=read_calls,
    rules=rules,
    write=write,
)
