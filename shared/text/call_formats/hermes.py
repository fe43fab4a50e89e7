"""JSON in `<tool_call>`: Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4."""

from __future__ import annotations

from collections.abc import Sequence

from shared.text.call_formats.call_format import Call, CallableFunction, CallFormat, any_of
from shared.text.call_formats.json_calls import function_rules, read_json_call, written_object
from shared.text.delimiters import CALL, CALL_END
from shared.text.grammar_source import literal
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses `{"name": ..., "arguments": ...}</tool_call>`."""
    if (yield from read_json_call(source, output, lead)):
        yield from source.close(CALL_END, output)
        return True
    return False


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of a call after its opening tag."""
    inner = f"inner: {literal(chr(10))} ({any_of('f', tools)}) {literal(chr(10) + CALL_END)}"
    return [inner, *function_rules(tools, "arguments")]


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    return "\n".join(f"{CALL}\n{written_object(call, 'arguments')}\n{CALL_END}" for call in calls)


FORMAT = CallFormat(
    name="hermes",
    description="JSON in <tool_call>",
    markers=(CALL, CALL_END),
    openings=(CALL,),
    marks=(CALL, CALL_END),
    read_calls=read_calls,
    rules=rules,
    separator=r"\n{0,2}",
    write=write,
)
