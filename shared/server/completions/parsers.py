"""Selection of the output parsers of a request."""

from __future__ import annotations

from shared.process.ipc_messages import ServerInfo
from shared.server.parsing.delta import OutputParser, PassthroughParser
from shared.server.parsing.output_parser import OutputBuilder
from shared.server.parsing.reasoning import is_open_after
from shared.server.parsing.text_parsers import new_parser
from shared.server.protocol.errors import ApiError
from shared.server.protocol.openai_types import ChatRequest, CompletionRequest


class Parsers:
    """Selects output parsers by the server's options; /v1/completions always returns plain text."""

    def __init__(self, facts: ServerInfo) -> None:
        self._reasoning, self._tool_calls = facts.reasoning_parser, facts.tool_call_parser

    def check(self, request: CompletionRequest | ChatRequest) -> None:
        """Rejects tools if the server has no tool-call parser.

        Raises:
          ApiError: Status 400.
        """
        if isinstance(request, ChatRequest) and request.usable_tools and not self._tool_calls:
            message = (
                "tools require a tool-call parser, and none was detected from the chat "
                "template; start the server with --tool-call-parser NAME"
            )
            raise ApiError(400, message, "tools")

    def new(self, request: CompletionRequest | ChatRequest, prompt: str) -> OutputParser:
        """Returns a parser for one choice.

        Args:
          request: Validated request.
          prompt: Text of the prompt, which may open the reasoning.
        """
        if not isinstance(request, ChatRequest):
            return PassthroughParser()
        functions = [tool.function for tool in request.callable_tools]
        schemas = {function.name: function.parameters or {} for function in functions}
        name, begun = self._reasoning, request.begun
        return new_parser(
            self._tool_calls if functions else None,
            OutputBuilder(schemas, request.max_tool_calls, request.constrains_tool_calls),
            None if name is None else is_open_after(prompt, name, begun),
        )
