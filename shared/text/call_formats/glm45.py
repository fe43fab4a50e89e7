"""A name, `<arg_key>` and `<arg_value>` in `<tool_call>`: GLM-4.5, GLM-4.6, GLM-4.7."""

from __future__ import annotations

from collections.abc import Sequence

from shared.text.call_formats.call_format import Call, CallableFunction, CallFormat, any_of
from shared.text.call_formats.typed_parameters import (
    ParameterTags,
    parameter_rules,
    read_parameters,
)
from shared.text.delimiters import CALL, CALL_END
from shared.text.grammar_source import literal
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

_KEY, _KEY_END, _VALUE, _VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_TAGS = ParameterTags(
    begin=_KEY,
    after_key=f"{_KEY_END}\n{_VALUE}",
    end=_VALUE_END,
    separator="\n",
    are_lines_optional=True,
)


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses one call."""
    source.record()
    name = (yield from source.until_any("<\n")).strip()
    if output.allows_call(name):
        arguments = yield from read_parameters(source, output, output.tools[name], _TAGS)
        if arguments is not None and (yield from source.expect(CALL_END)):
            source.recorded()
            output.add_whole_call(name, arguments)
            return True
    source.give_up_recorded(lead, output, _VALUE)
    return False


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of a call after its opening tag; line breaks are optional."""
    made = [f"inner: ({any_of('f', tools)}) {literal(CALL_END)}"]
    made += [
        f'f_{number}: {literal(tool.name)} "\\n"? p_{number}' for number, tool in enumerate(tools)
    ]
    return made + parameter_rules(tools, _TAGS)


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    return "\n".join(map(_written, calls))


def _written(call: Call) -> str:
    name, arguments = call
    parameters = "".join(_TAGS.write(key, value) for key, value in arguments.items())
    return f"{CALL}{name}\n{parameters}{CALL_END}"


FORMAT = CallFormat(
    name="glm45",
    description="<arg_key> and <arg_value> in <tool_call>",
    markers=(CALL, _KEY, _VALUE),
    openings=(CALL,),
    marks=(CALL, CALL_END, _KEY, _KEY_END, _VALUE, _VALUE_END),
    read_calls=read_calls,
    rules=rules,
    separator=r"\n{0,2}",
    write=write,
)
