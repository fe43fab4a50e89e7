"""JSON in a Markdown block between DeepSeek's tokens: DeepSeek V3 and R1."""

from __future__ import annotations

from collections.abc import Sequence

from shared.text.call_formats.call_format import Call, CallableFunction, CallFormat, any_of
from shared.text.call_formats.named_calls import NameTags, read_section
from shared.text.grammar_source import literal
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_SEPARATOR, CALL_END = (
    *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
    "<｜tool▁call▁end｜>",
)
MARKS = (CALLS, CALLS_END, CALL_BEGIN, CALL_SEPARATOR, CALL_END)
_TAGS = NameTags(
    begin=f"{CALL_BEGIN}function{CALL_SEPARATOR}",
    after_name="\n```json\n",
    end=f"\n```{CALL_END}",
)


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses the calls of a section."""
    return (yield from read_section(source, output, lead, _TAGS, CALLS_END))


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of the calls in a section."""
    more = r' ("\n" call)*' if many else ""
    inner = f"inner: call{more} {literal(CALLS_END)}"
    return [inner, f"call: {any_of('n', tools)}", *_TAGS.rules(tools)]


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    return CALLS + "\n".join(map(_TAGS.write, calls)) + CALLS_END


FORMAT = CallFormat(
    name="deepseek_v3",
    description="JSON in a Markdown block after <｜tool▁sep｜>",
    markers=(CALL_BEGIN, "```json"),
    openings=(CALLS,),
    marks=MARKS,
    read_calls=read_calls,
    rules=rules,
    write=write,
)
