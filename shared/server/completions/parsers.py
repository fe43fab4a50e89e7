"""Selection of the output parsers of a request."""

from __future__ import annotations

from dataclasses import replace

from shared.process.ipc_messages import ServerInfo
from shared.server.protocol.errors import ApiError
from shared.server.protocol.generation_request import ChatInput, GenerationRequest, ToolUse
from shared.text.parsing.delta import OutputParser, PassthroughParser
from shared.text.parsing.output_parser import OutputBuilder
from shared.text.parsing.reasoning import is_open_after
from shared.text.reasoning_formats import REASONING_FORMATS, THINKING
from shared.text.text_parsers import new_parser


class Parsers:
    """Selects output parsers by the server's options; /v1/completions always returns plain text."""

    def __init__(self, facts: ServerInfo) -> None:
        self._reasoning, self._tool_calls = facts.reasoning_parser, facts.tool_call_parser
        self._forbids_calls = bool(self._tool_calls) and facts.limits.structured_outputs

    def settle(self, chat: ChatInput) -> ChatInput:
        """Returns a conversation with the tools that the prompt lists.

        Tools that must not be called stay in the prompt, which keeps its prefix in the cache, if a
        grammar can forbid their calls. Otherwise they are removed.

        Raises:
          ApiError: The server has no tool-call parser; status 400.
        """
        if chat.tools.forbids_calls and not self._forbids_calls:
            conversation = replace(chat.conversation, tools=[])
            return replace(chat, conversation=conversation, tools=ToolUse())
        if chat.conversation.tools and not self._tool_calls:
            message = (
                "tools require a tool-call parser, and none was detected from the chat "
                "template; start the server with --tool-call-parser NAME"
            )
            raise ApiError(400, message, chat.name("tools"))
        return chat

    def new(self, request: GenerationRequest, prompt: str) -> OutputParser:
        """Returns a parser for one choice.

        Args:
          request: Validated request.
          prompt: Text of the prompt, which may open the reasoning.
        """
        chat = request.chat
        if chat is None:
            return PassthroughParser()
        functions = chat.tools.functions
        schemas = {function.name: function.parameters or {} for function in functions}
        name, begun = self._reasoning, chat.begun
        return new_parser(
            self._tool_calls if functions else None,
            OutputBuilder(schemas, chat.tools.max_calls, request.constrains_tool_calls),
            None if name is None else is_open_after(prompt, name, begun),
            THINKING if name is None else REASONING_FORMATS[name],
        )
