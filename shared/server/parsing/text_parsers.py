"""Selection of the parser of one output, for all APIs."""

from __future__ import annotations

from shared.server.parsing.delta import OutputParser, PassthroughParser
from shared.server.parsing.output_parser import OutputBuilder, ParserStep, TextCursor, TextReader
from shared.server.parsing.reasoning import read_reasoning
from shared.server.parsing.tool_call_parsers import FORMATS, CallFormat


def new_parser(calls: str | None, output: OutputBuilder, is_open: bool | None) -> OutputParser:
    """Returns a parser for one output.

    Args:
      calls: Format of tool calls, a name of `FORMATS`; None: no tool calls.
      output: Builds the increments and checks the names of functions.
      is_open: True if the output begins in reasoning; None: no reasoning.
    """
    if calls is None and is_open is None:
        return PassthroughParser()
    call_format = CallFormat(TextCursor.rest, None) if calls is None else FORMATS[calls]
    # A grammar begins after the reasoning, so constrained calls occur only there.
    read_call = None if output.are_calls_constrained else call_format.read_call

    def read(source: TextCursor, output: OutputBuilder) -> ParserStep[None]:
        if is_open is not None:
            yield from read_reasoning(source, output, is_open, read_call)
        yield from call_format.read(source, output)

    return TextReader(read, output)
