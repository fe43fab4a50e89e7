"""Selection of the parser of one output, for all APIs."""

from __future__ import annotations

from shared.server.parsing.delta import OutputParser, PassthroughParser
from shared.server.parsing.output_parser import ParserStep, Said, TextCursor, TextReader
from shared.server.parsing.reasoning import read_reasoning
from shared.server.parsing.tool_call_parsers import FORMATS, CallFormat


def new_parser(calls: str | None, said: Said, is_open: bool | None) -> OutputParser:
    """A parser of one text.

    Args:
      calls: Format of its calls, a name of `FORMATS`; None: it has none.
      said: What may be called.
      is_open: Whether the text begins within its reasoning; None: it has no reasoning.
    """
    if calls is None and is_open is None:
        return PassthroughParser()
    call_format = CallFormat(TextCursor.rest, None) if calls is None else FORMATS[calls]
    # A grammar begins behind the reasoning, and asks for its calls there.
    read_call = None if said.are_calls_held else call_format.read_call

    def read(source: TextCursor, said: Said) -> ParserStep[None]:
        if is_open is not None:
            yield from read_reasoning(source, said, is_open, read_call)
        yield from call_format.read(source, said)

    return TextReader(read, said)
