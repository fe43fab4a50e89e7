"""Selection of the parser of one output, for all APIs."""

from __future__ import annotations

from shared.text.call_formats import harmony
from shared.text.call_formats.registry import FORMATS
from shared.text.parsing.delta import OutputParser, PassthroughParser
from shared.text.parsing.output_parser import OutputBuilder, ParserStep, TextCursor, TextReader
from shared.text.parsing.reasoning import read_reasoning
from shared.text.reasoning_formats import THINKING, ReasoningFormat


def new_parser(
    calls: str | None,
    output: OutputBuilder,
    is_open: bool | None,
    tags: ReasoningFormat = THINKING,
) -> OutputParser:
    """Returns a parser for one output.

    Args:
      calls: Format of tool calls, a name of `FORMATS`; None: no tool calls.
      output: Builds the increments and checks the names of functions.
      is_open: True if the output begins in reasoning; None: no reasoning.
      tags: Delimiters of the reasoning.
    """
    if tags.has_channels:  # also without calls, because channels separate the content
        calls = harmony.FORMAT.name
    if calls is None:
        if is_open is None:
            return PassthroughParser()
        openings, read_calls, read_content = (), _no_calls, TextCursor.rest
    else:
        call_format = FORMATS[calls]
        output.new_id = call_format.new_id
        read_calls, read_content = call_format.read_calls, call_format.read
        # A grammar begins after the reasoning, so constrained calls occur only there.
        openings = () if output.are_calls_constrained else call_format.openings
    output.reasoning_end, output.content_tags = tags.end, tags.content_tags

    def read(source: TextCursor, output: OutputBuilder) -> ParserStep[None]:
        if tags.has_channels:
            output.is_thinking = is_open is True
        elif is_open is not None:
            yield from read_reasoning(source, output, tags, is_open, openings, read_calls)
        yield from read_content(source, output)

    return TextReader(read, output)


def _no_calls(source: TextCursor, output: OutputBuilder, lead: str) -> ParserStep[bool]:
    """Parses no calls."""
    output.add_text(lead)
    yield from ()
    return False
