"""`<invoke>` and `<parameter>` in `<minimax:tool_call>`: MiniMax M2."""

from __future__ import annotations

from collections.abc import Sequence

from shared.text.call_formats.call_format import Call, CallableFunction, CallFormat, any_of
from shared.text.call_formats.typed_parameters import (
    MAX_NAME,
    ParameterTags,
    parameter_rules,
    read_parameters,
    written_value,
)
from shared.text.grammar_source import literal
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor

_CALLS, _CALLS_END = "<minimax:tool_call>", "</minimax:tool_call>"
_INVOKE, _INVOKE_END, _PARAMETER = '<invoke name="', "</invoke>", '<parameter name="'
_TAGS = ParameterTags(
    begin=_PARAMETER,
    after_key='">',
    end="</parameter>",
    separator="\n",
    are_lines_optional=True,
)


def read_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses the calls of a block and its closing tag."""
    has_call = False
    source.record()
    while (yield from source.expect(_INVOKE)):
        name = (yield from source.until('">', MAX_NAME)) or ""
        arguments = None
        if output.allows_call(name):
            arguments = yield from read_parameters(source, output, output.tools[name], _TAGS)
        if arguments is None or not (yield from source.expect(_INVOKE_END)):
            source.give_up_recorded(lead, output, _PARAMETER)
            return has_call
        output.add_whole_call(name, arguments)
        source.recorded()
        source.record()
        has_call, lead = True, ""
    if not has_call:
        source.give_up_recorded(lead, output, _PARAMETER)
        return False
    source.recorded()
    yield from source.close(_CALLS_END, output, (_INVOKE,))
    return True


def rules(tools: Sequence[CallableFunction], many: bool) -> list[str]:
    """Returns the rules of the calls in a block; line breaks are optional."""
    more = "+" if many else ""
    made = [rf'inner: "\n"? invoke{more} {literal(_CALLS_END)}', f"invoke: {any_of('f', tools)}"]
    for number, tool in enumerate(tools):
        begin, end = literal(f'{_INVOKE}{tool.name}">'), literal(_INVOKE_END)
        made.append(rf'f_{number}: {begin} "\n"? p_{number} {end} "\n"?')
    return made + parameter_rules(tools, _TAGS)


def write(calls: Sequence[Call]) -> str:
    """Returns the text of calls."""
    return f"{_CALLS}\n{''.join(map(_written, calls))}{_CALLS_END}"


def _written(call: Call) -> str:
    name, arguments = call
    parameters = "".join(
        f'{_PARAMETER}{key}">{written_value(value)}</parameter>\n'
        for key, value in arguments.items()
    )
    return f'{_INVOKE}{name}">\n{parameters}{_INVOKE_END}\n'


FORMAT = CallFormat(
    name="minimax_m2",
    description="<invoke> and <parameter> in <minimax:tool_call>",
    markers=(_CALLS,),
    openings=(_CALLS,),
    marks=(_CALLS, _CALLS_END),
    read_calls=read_calls,
    rules=rules,
    write=write,
)
