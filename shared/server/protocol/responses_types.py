"""Request type of OpenAI's Responses API, and its conversion to a conversation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Discriminator, Field, PrivateAttr, Tag

from shared.options.unsupported_fields import RESPONSES
from shared.server.protocol.chat_messages import MAX_MESSAGES, MAX_TOOLS, Function
from shared.server.protocol.content import MAX_IMAGES, ImagePart
from shared.server.protocol.conversation_builder import ConversationBuilder, Part
from shared.server.protocol.errors import ApiError
from shared.server.protocol.fields import (
    MAX_COUNT,
    Nested,
    Strict,
    Text,
    User,
    check_depth,
    string_or_list,
    type_of,
)
from shared.server.protocol.generation_request import ChatInput, GenerationRequest, ToolUse
from shared.server.protocol.openai_types import (
    MAX_ARGUMENTS,
    MAX_PRIORITY,
    MAX_SEED,
    Name,
    SpeculativeOptions,
    tool_use_of,
)
from shared.server.protocol.responses_items import (
    CustomCallItem,
    FunctionCallItem,
    InputImage,
    InputItem,
    ItemContent,
    MessageItem,
    ReasoningItem,
)
from shared.server.protocol.responses_tools import (
    CustomTool,
    FunctionTool,
    NamespaceTool,
    ResponsesTool,
    ResponsesToolChoice,
    join_names,
)
from shared.server.protocol.sampling_fields import SamplingFields
from shared.server.protocol.sealed_text import SealedText
from shared.server.protocol.structured import chosen_names, requires_call
from shared.text.chat_template import Conversation
from shared.text.grammar_worker import OutputFormat

MAX_METADATA = 16
LOGPROBS, ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
Include = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    # Of tools and inputs that are not supported, so there is nothing to include.
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class PlainText(Strict):
    """Output format without a schema: any text, or any JSON object."""

    type: Literal["text", "json_object"]


class SchemaText(Strict):
    """Output format of JSON that matches a schema."""

    type: Literal["json_schema"]
    name: Annotated[Text, Field(max_length=64)]
    description: Text | None = None
    schema_: Annotated[Nested, Field(alias="schema")]
    strict: bool | None = None  # ignored: the schema is always enforced


def _format_kind(value: Any) -> str:
    kind = type_of(value)
    return "<schema>" if kind == "json_schema" else "<plain>"


TextFormat = Annotated[
    Annotated[PlainText, Tag("<plain>")] | Annotated[SchemaText, Tag("<schema>")],
    Discriminator(_format_kind),
]


class TextConfig(Strict):
    """Format and verbosity of the text."""

    format: TextFormat | None = None
    verbosity: Annotated[Name, Field(min_length=1)] | None = None


class ReasoningConfig(Strict):
    """Effort of the reasoning."""

    effort: Annotated[Name, Field(min_length=1)] | None = None


class ResponsesStreamOptions(Strict):
    """Options of a stream."""

    include_obfuscation: bool | None = None  # ignored: events are never padded


class ResponsesRequest(Strict):
    """Body of /v1/responses."""

    ENDPOINT: ClassVar[str] = RESPONSES

    model: Text | None = None
    input: Annotated[
        Annotated[Text, Field(min_length=1), Tag("<string>")]
        | Annotated[
            list[InputItem],
            Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
            Tag("<list>"),
        ],
        Discriminator(string_or_list),
    ]
    instructions: Text | None = None
    tools: Annotated[list[ResponsesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: ResponsesToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    include: Annotated[list[Include], Field(max_length=MAX_METADATA)] | None = None
    metadata: (
        Annotated[
            dict[Annotated[Text, Field(max_length=64)], Annotated[Text, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    previous_response_id: Annotated[Text, Field(max_length=64)] | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    truncation: Literal["disabled"] | None = None
    user: User | None = None
    # Parts of `user`: ignored.
    safety_identifier: User | None = None
    prompt_cache_key: User | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    speculative: SpeculativeOptions | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None
    chat_template_kwargs: (
        Annotated[dict[Name, Any], Field(max_length=MAX_ARGUMENTS), AfterValidator(check_depth)]
        | None
    ) = None

    _advice: tuple[str, ...] = PrivateAttr(())

    def with_advice(self, names: tuple[str, ...]) -> ResponsesRequest:
        """Sets the ignored fields (`unsupported_fields`) of the body; returns itself."""
        self._advice = names
        return self

    @property
    def items(self) -> list[InputItem]:
        """Items of the input."""
        if isinstance(self.input, str):
            return [MessageItem(type="message", role="user", content=self.input)]
        return self.input

    @property
    def callable_tools(self) -> list[FunctionTool | CustomTool]:
        """Functions and custom tools, under the names by which the model calls them."""
        return [
            member
            for tool in self.tools or ()
            for member in (tool.members if isinstance(tool, NamespaceTool) else (tool,))
        ]

    @property
    def custom_names(self) -> set[str]:
        """Names by which the model calls custom tools."""
        return {tool.name for tool in self.callable_tools if isinstance(tool, CustomTool)}

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """Namespace and name of a tool by the name by which the model calls it."""
        return {
            join_names(space.name, tool.name): (space.name, tool.name)
            for space in self.tools or ()
            if isinstance(space, NamespaceTool)
            for tool in space.tools
        }

    def includes(self, name: str) -> bool:
        """Returns True if the response includes an optional part."""
        return name in (self.include or ())

    def to_generation(self, sealed: SealedText, previous: Sequence[InputItem]) -> GenerationRequest:
        """Returns the request in the form that all APIs share.

        Args:
          sealed: Opens the reasoning of earlier answers.
          previous: Items of the conversation that `previous_response_id` continues.

        Raises:
          ApiError: An item is invalid at its place; names it.
        """
        chat = self._chat(sealed, previous)
        wants_logprobs = self.includes(LOGPROBS)
        if self.top_logprobs and not wants_logprobs:
            reason = f"top_logprobs requires {LOGPROBS} in include"
            raise ApiError(400, reason, "top_logprobs")
        form = self._form()
        return GenerationRequest(
            endpoint=RESPONSES,
            id_prefix="resp_",
            body=self,
            model=self.model,
            chat=chat,
            sampling=SamplingFields(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                max_tokens=self.max_output_tokens,
                logprobs=(self.top_logprobs or 0) if wants_logprobs else None,
                max_drafts=self.speculative.max_drafts if self.speculative else None,
            ),
            names=self._names(chat.tools, form),
            form=form,
            seed=self.seed,
            user=self.user or "",
            priority=self.priority or 0,
            ignored=(*self._advice, *self._unused(chat.tools, form)),
            stream=bool(self.stream),
        )

    def _form(self) -> OutputFormat | None:
        asked = self.text and self.text.format
        if isinstance(asked, SchemaText):
            return OutputFormat(kind="schema", value=asked.schema_)
        is_object = asked is not None and asked.type == "json_object"
        return OutputFormat(kind="schema", value={"type": "object"}) if is_object else None

    def _unused(self, tools: ToolUse, form: OutputFormat | None) -> tuple[str, ...]:
        """Returns the format if the output must be a call, which leaves no text."""
        return ("text.format",) if form and tools.requires_call else ()

    def _names(self, tools: ToolUse, form: OutputFormat | None) -> dict[str, str]:
        grammar = "tool_choice" if tools.restricts_calls else "tools"
        return {
            "prompt": "input",
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
            "grammar": "text.format" if form and not tools.requires_call else grammar,
        }

    def _chat(self, sealed: SealedText, previous: Sequence[InputItem]) -> ChatInput:
        builder = ConversationBuilder()
        for number, item in enumerate(previous):
            _add_item(builder, item, f"previous_response_id[{number}]", sealed)
        for number, item in enumerate(self.items):
            _add_item(builder, item, f"input[{number}]", sealed)
        if self.instructions is not None:
            builder.add_instructions([self.instructions])
        if len(builder.images) > MAX_IMAGES:
            reason = f"the request has {len(builder.images)} images"
            raise ApiError(400, f"{reason}, at most {MAX_IMAGES} are supported", "input")
        listed = self.callable_tools
        functions = [tool.function if isinstance(tool, CustomTool) else tool for tool in listed]
        conversation = Conversation(
            messages=builder.messages,
            tools=list(map(_for_template, functions)),
            arguments=self.chat_template_kwargs or {},
            advice=self._template_advice(),
        )
        names = {
            "messages": "input",
            "arguments": "chat_template_kwargs",
            "reasoning_effort": "reasoning.effort",
            "verbosity": "text.verbosity",
        }
        formats = {tool.name: tool.input_format for tool in listed if isinstance(tool, CustomTool)}
        given = {name: each for name, each in formats.items() if each is not None}
        tools = replace(self._tool_use(functions), input_formats=given)
        return ChatInput(conversation=conversation, images=builder.images, tools=tools, names=names)

    def _template_advice(self) -> dict[str, Any]:
        effort = self.reasoning and self.reasoning.effort
        verbosity = self.text and self.text.verbosity
        given = {"reasoning_effort": effort, "verbosity": verbosity}
        return {name: value for name, value in given.items() if value is not None}

    def _tool_use(self, listed: Sequence[FunctionTool]) -> ToolUse:
        known = {tool.name for tool in listed}
        unknown = (chosen_names(self.tool_choice) or set()) - known
        if unknown or (requires_call(self.tool_choice) and not known):
            named = f" {min(unknown)!r:.80}" if unknown else ""
            reason = f"tool_choice requests a call of a function{named} that is not in tools"
            raise ApiError(400, reason, "tool_choice")
        functions = [
            Function(name=tool.name, parameters=tool.parameters, strict=tool.strict)
            for tool in listed
        ]
        return tool_use_of(self.tool_choice, functions, self.parallel_tool_calls)


def _for_template(tool: FunctionTool) -> dict[str, Any]:
    """Returns a function in the form of chat completions, which templates read."""
    return {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}


def _add_item(
    builder: ConversationBuilder, item: InputItem, place: str, sealed: SealedText
) -> None:
    """Adds an item; raises as `ResponsesRequest.to_generation`."""
    if isinstance(item, ReasoningItem):
        builder.add_reasoning(_reasoning(item, place, sealed))
    elif isinstance(item, FunctionCallItem | CustomCallItem):
        builder.add_call(item.call_id, item.template_name, item.arguments)
    elif isinstance(item, MessageItem):
        _add_message(builder, item, place)
    else:
        parts = _parts(item.output, f"{place}.output")
        builder.add_result(item.call_id, parts, f"{place}.call_id", item.type[: -len("_output")])


def _add_message(builder: ConversationBuilder, item: MessageItem, place: str) -> None:
    parts = _parts(item.content, f"{place}.content")
    if item.role != "assistant":
        builder.add(item.role, parts)
        return
    if any(isinstance(part, ImagePart) for part in parts):
        reason = "of the role assistant cannot have images; move them to a user message"
        raise ApiError(400, f"{place} {reason}", f"{place}.content")
    builder.add_answer("".join(map(str, parts)), joins=False)


def _parts(content: ItemContent, place: str) -> list[Part]:
    if isinstance(content, str):
        return [content]
    return [
        ImagePart(f"{place}[{number}].image_url", part.image_url, part.is_low)
        if isinstance(part, InputImage)
        else part.text
        for number, part in enumerate(content)
    ]


def _reasoning(item: ReasoningItem, place: str, sealed: SealedText) -> str:
    """Returns the text of reasoning: its content, the opaque value, or the summary."""
    if item.content or item.encrypted_content is None:
        return "".join(part.text for part in item.content or item.summary)
    text = sealed.open(item.encrypted_content)
    if text is None:
        where = f"{place}.encrypted_content"
        reason = "was not made by this server; remove the item"
        raise ApiError(400, f"{where} {reason}", where, "invalid_encrypted_content")
    return text
