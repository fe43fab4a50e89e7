"""Which parsers read the output of a request."""

from __future__ import annotations

from shared.process.frames import ModelFacts
from shared.server.call_formats import FORMATS, CallFormat
from shared.server.delta import OutputParser, PlainText
from shared.server.errors import ApiError
from shared.server.openai_types import ChatRequest, CompletionRequest
from shared.server.reading import Reading, Said, Source, TextReader
from shared.server.reasoning import is_open_after, read_reasoning


class Parsers:
    """Makes the parsers that the start named; what /v1/completions gives is always plain text."""

    def __init__(self, facts: ModelFacts) -> None:
        self._reasoning, self._tool_calls = facts.reasoning_parser, facts.tool_call_parser

    def check(self, request: CompletionRequest | ChatRequest) -> None:
        """Refuses tools whose calls nobody would read.

        Raises:
          ApiError: Status 400.
        """
        if isinstance(request, ChatRequest) and request.usable_tools and not self._tool_calls:
            message = "tools need a server that was started with --tool-call-parser"
            raise ApiError(400, message, "tools")

    def new(self, request: CompletionRequest | ChatRequest, prompt: str) -> OutputParser:
        """A parser for one choice.

        Args:
          request: What was asked.
          prompt: The text of the prompt, which may have opened the reasoning.
        """
        if not isinstance(request, ChatRequest):
            return PlainText()
        functions = [tool.function for tool in request.usable_tools]
        schemas = {function.name: function.parameters or {} for function in functions}
        return new_parser(
            self._tool_calls if functions else None,
            Said(schemas, request.most_calls, request.holds_calls),
            None if self._reasoning is None else is_open_after(prompt, self._reasoning),
        )


def new_parser(calls: str | None, said: Said, is_open: bool | None) -> OutputParser:
    """A parser of one text.

    Args:
      calls: Format of its calls, a name of `FORMATS`; None: it has none.
      said: What may be called.
      is_open: Whether the text begins within its reasoning; None: it has no reasoning.
    """
    if calls is None and is_open is None:
        return PlainText()
    call_format = CallFormat(Source.rest, None) if calls is None else FORMATS[calls]
    # A grammar begins behind the reasoning, and asks for its calls there.
    read_call = None if said.are_calls_held else call_format.read_call

    def read(source: Source, said: Said) -> Reading[None]:
        if is_open is not None:
            yield from read_reasoning(source, said, is_open, read_call)
        yield from call_format.read(source, said)

    return TextReader(read, said)
