"""JSON with parameters as the whole output: Llama 3."""

from __future__ import annotations

from collections.abc import Sequence

from shared.text.call_formats.call_format import Call, CallableFunction, CallFormat, any_of
from shared.text.call_formats.json_calls import function_rules, read_json_call, written_object
from shared.text.delimiters import PYTHON_TAG
from shared.text.grammar_source import literal
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses `{"name": ..., "parameters": ...}`, or several after `;`."""
    lead += yield from source.skip_space()
    if (yield from source.expect(PYTHON_TAG)):
        lead += PYTHON_TAG
    has_call = False
    while (yield from read_json_call(source, output, lead)):
        has_call, lead = True, (yield from source.skip_space())
        if not (yield from source.expect(";")):
            break
        lead += ";"
    return has_call


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of the whole output: calls after an optional tag."""
    more = ' (";" call)*' if many else ""
    head = f"calls: {literal(PYTHON_TAG)}? call{more}"
    return [head, f"call: {any_of('f', tools)}", *function_rules(tools, "parameters")]


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    return ";".join(written_object(call, "parameters") for call in calls)


FORMAT = CallFormat(
    name="llama3",
    description="JSON with parameters",
    marks=(PYTHON_TAG,),
    read_calls=read_calls,
    rules=rules,
    other_text="other_text: OTHER_TEXT\n"
    r"OTHER_TEXT: /[^{\s](.|\n)*/ & ~/<\|python_tag\|>\s*\{(.|\n)*/",
    write=write,
)
