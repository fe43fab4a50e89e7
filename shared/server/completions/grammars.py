"""Grammars of structured output: compiled and checked in a worker process, with a cache."""

from __future__ import annotations

from collections import OrderedDict

from shared.engine.checks import NO_GRAMMARS
from shared.process.ipc_messages import ServerInfo
from shared.server.engine_link.workers import WorkerPool
from shared.server.protocol.errors import ApiError
from shared.server.protocol.generation_request import GenerationRequest
from shared.text.grammar_worker import (
    DEADLINE_S,
    NO_CALLS,
    GrammarRequest,
    OutputFormat,
    ToolCallSpec,
)
from shared.text.parsing.reasoning import thinking_after
from shared.text.worker import WorkerError, pack

MAX_KEPT_BYTES = 1 << 23
"""Maximum bytes of cached requests and their grammars."""


class GrammarChecks(WorkerPool):
    """Compiles and checks grammars in worker processes, each within a deadline.

    Args:
      facts: Facts about the model, its tokenizer and its parsers.
    """

    def __init__(self, facts: ServerInfo) -> None:
        super().__init__(
            "shared.text.grammar_worker",
            pack([facts.model_folder, facts.limits.vocab_size, facts.marks]),
            name="grammar",
            deadline_s=DEADLINE_S,
            part="grammar",
        )
        self._facts = facts
        self._kept: OrderedDict[bytes, str] = OrderedDict()
        self._num_bytes = 0

    async def settle(self, request: GenerationRequest, prompt: str) -> str | None:
        """Returns the grammar of a request's outputs; None without structured output.

        Args:
          request: Validated request.
          prompt: Text of the prompt, which may open the reasoning.

        Raises:
          ApiError: The grammar is invalid or unsupported; names the field that requests it.
        """
        spec = self._grammar_request(request, prompt)
        if spec is None:
            return None
        field = request.name("grammar")
        if not self._facts.limits.structured_outputs:
            raise ApiError(400, f"{field}: {NO_GRAMMARS}", field)
        message = spec.pack()
        if message in self._kept:
            self._kept.move_to_end(message)
            return self._kept[message]
        try:
            grammar = await self.ask(message)
        except WorkerError as error:
            raise ApiError(400, str(error), field) from error
        self._keep(message, grammar)
        return grammar

    def _keep(self, message: bytes, grammar: str) -> None:
        if message in self._kept:  # two equal requests were compiled at the same time
            return
        self._kept[message] = grammar
        self._num_bytes += len(message) + len(grammar)
        while self._num_bytes > MAX_KEPT_BYTES:
            oldest, text = self._kept.popitem(last=False)
            self._num_bytes -= len(oldest) + len(text)

    def _grammar_request(self, request: GenerationRequest, prompt: str) -> GrammarRequest | None:
        form, lead = request.form, None
        style = self._facts.tool_call_parser
        calls = held_calls(request, style)
        if form is None and request.chat and request.chat.tools.forbids_calls:
            form = OutputFormat(kind=NO_CALLS, value=style)
        if request.chat and self._facts.reasoning_parser is not None:
            lead = thinking_after(prompt, self._facts.reasoning_parser, request.chat.begun)
        if form is None and calls is None:
            return None
        is_forced = calls is not None and calls.free is None
        return GrammarRequest(form=None if is_forced else form, calls=calls, lead=lead)


def held_calls(request: GenerationRequest, style: str | None) -> ToolCallSpec | None:
    """Returns the constraint on tool calls; None without one.

    Args:
      request: Validated request.
      style: Format of the model's tool calls; None: unsupported.
    """
    if request.chat is None or style is None or not request.constrains_tool_calls:
        return None
    tools = request.chat.tools
    if not tools.functions:
        return None
    free = None if tools.requires_call else "text" if request.form is None else "answer"
    return ToolCallSpec(
        style=style,
        tools=[
            (function.name, function.arguments_schema(tools.requires_call))
            for function in tools.functions
        ],
        many=tools.max_calls is None,
        free=free,
        inputs={name: (form.kind, form.value) for name, form in tools.input_formats.items()},
    )
