"""An id with the name, and JSON, between Kimi's tokens: Kimi K2."""

from __future__ import annotations

import re
from collections.abc import Sequence

from shared.text.call_formats.call_format import Call, CallableFunction, CallFormat, any_of
from shared.text.call_formats.named_calls import NameTags, read_section
from shared.text.grammar_source import literal
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

_CALLS, _CALLS_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_BEGIN, _ARGUMENTS, _END = (
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
    "<|tool_call_end|>",
)
_TAGS = NameTags(begin=f"{_BEGIN}functions.", after_name=_ARGUMENTS, end=_END)
_READ_TAGS = NameTags(begin=_BEGIN, after_name=_ARGUMENTS, end=_END)
_ID = re.compile(r"\s*(?:functions\.)?([^:]+)(?::\d+)?\s*")


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses the calls of a section; a model numbers them over the whole conversation."""
    return (yield from read_section(source, output, lead, _READ_TAGS, _CALLS_END, _split))


def _split(text: str) -> tuple[str, str]:
    """Returns name and id; the id is the text itself, which later prompts repeat."""
    parts = _ID.fullmatch(text)
    return (parts[1], text.strip()) if parts else ("", "")


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of the calls in a section."""
    inner = f"inner: call{'+' if many else ''} {literal(_CALLS_END)}"
    number = 'number: ":" /[0-9]{1,4}/'
    return [inner, f"call: {any_of('n', tools)}", number, *_TAGS.rules(tools, "number")]


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    written = (_TAGS.write(call, f":{number}") for number, call in enumerate(calls))
    return _CALLS + "".join(written) + _CALLS_END


FORMAT = CallFormat(
    name="kimi_k2",
    description="functions.NAME:NUMBER and JSON after <|tool_call_begin|>",
    markers=(_CALLS,),
    openings=(_CALLS,),
    marks=(_CALLS, _CALLS_END, _BEGIN, _ARGUMENTS, _END),
    read_calls=read_calls,
    rules=rules,
    write=write,
)
