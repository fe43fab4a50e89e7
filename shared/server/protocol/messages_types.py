"""Request types of Anthropic's Messages API, and their conversion to a conversation."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr

from shared.options.unsupported_fields import MESSAGES
from shared.server.protocol.chat_messages import MAX_MESSAGES, MAX_TOOLS, Function
from shared.server.protocol.content import MAX_IMAGES, ImagePart
from shared.server.protocol.conversation_builder import ConversationBuilder, Part
from shared.server.protocol.errors import ApiError
from shared.server.protocol.fields import (
    MAX_COUNT,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_USER_LENGTH,
    Nested,
    Strict,
    Text,
    check_depth,
)
from shared.server.protocol.generation_request import ChatInput, GenerationRequest, ToolUse
from shared.server.protocol.messages_blocks import (
    CacheControl,
    ContentBlock,
    CustomTool,
    ImageBlock,
    InputMessage,
    MessagesTool,
    MessagesToolChoice,
    NamedChoice,
    SystemContent,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from shared.server.protocol.openai_types import MAX_ARGUMENTS, MAX_SEED, Name, SpeculativeOptions
from shared.server.protocol.sampling_fields import SamplingFields
from shared.server.protocol.sealed_text import SealedText
from shared.text.chat_template import Conversation
from shared.text.grammar_worker import OutputFormat

_ALLOWED = {
    "user": ("text", "image", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
"""Types of blocks by role."""


class Thinking(Strict):
    """Reasoning: enabled, disabled, or decided by the model."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class SchemaOutput(Strict):
    """Output format of JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: Annotated[Nested, Field(alias="schema")]


class OutputConfig(Strict):
    """Effort and format of the output."""

    effort: Annotated[Name, Field(min_length=1)] | None = None
    format: SchemaOutput | None = None


class RequestMetadata(Strict):
    """Owner of the request."""

    user_id: Text | None = None


class TokenCountRequest(Strict):
    """Body of /v1/messages/count_tokens."""

    ENDPOINT: ClassVar[str] = MESSAGES

    model: Text
    messages: Annotated[
        list[InputMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    ]
    system: SystemContent | None = None
    tools: Annotated[list[MessagesTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl = None
    chat_template_kwargs: (
        Annotated[dict[Name, Any], Field(max_length=MAX_ARGUMENTS), AfterValidator(check_depth)]
        | None
    ) = None

    _advice: tuple[str, ...] = PrivateAttr(())

    @property
    def custom_tools(self) -> list[CustomTool]:
        """Tools that the chat template lists."""
        return list(self.tools or ())

    @property
    def choice(self) -> str:
        """Type of the tool choice."""
        return self.tool_choice.type if self.tool_choice else "auto"

    @property
    def has_hidden_thinking(self) -> bool:
        """True if the reasoning is returned in the signature only."""
        return bool(self.thinking and self.thinking.display == "omitted")

    def with_advice(self, names: tuple[str, ...]) -> Self:
        """Sets the ignored fields (`unsupported_fields`) of the body; returns itself."""
        self._advice = names
        return self

    def to_chat(self, sealed: SealedText) -> ChatInput:
        """Returns the conversation in the form that all APIs share.

        Args:
          sealed: Opens the reasoning of earlier answers.

        Raises:
          ApiError: A block is invalid at its place; names it.
        """
        builder = ConversationBuilder()
        for number, message in enumerate(self.messages):
            _add_message(builder, message, f"messages[{number}]", sealed)
        if self.system is not None:
            builder.add_instructions(_texts(self.system))
        if len(builder.images) > MAX_IMAGES:
            reason = f"the request has {len(builder.images)} images"
            raise ApiError(400, f"{reason}, at most {MAX_IMAGES} are supported", "messages")
        continues = self.messages[-1].role == "assistant"
        if continues and builder.messages[-1].get("tool_calls"):
            reason = "ends with a tool_use block; append a user message with its tool_result"
            place = f"messages[{len(self.messages) - 1}]"
            raise ApiError(400, f"{place} {reason}", place)
        conversation = Conversation(
            messages=builder.messages,
            tools=[_for_template(tool) for tool in self.custom_tools],
            arguments=self.chat_template_kwargs or {},
            advice=self._template_advice(),
            add_generation_prompt=not continues,
            continue_final_message=continues,
        )
        names = {
            "arguments": "chat_template_kwargs",
            "continue_final_message": "messages",
            "reasoning_effort": "output_config.effort",
        }
        return ChatInput(
            conversation=conversation, images=builder.images, tools=self._tool_use(), names=names
        )

    def _template_advice(self) -> dict[str, Any]:
        advice: dict[str, Any] = {}
        if self.thinking and self.thinking.type in ("enabled", "disabled"):
            advice["thinking"] = self.thinking.model_dump(exclude_none=True, exclude={"display"})
        if self.output_config and self.output_config.effort:
            advice["reasoning_effort"] = self.output_config.effort
        return advice

    def _tool_use(self) -> ToolUse:
        choice, tools = self.tool_choice, self.custom_tools
        if self.choice == "none":
            return ToolUse(forbids_calls=bool(tools))
        name = choice.name if isinstance(choice, NamedChoice) else None
        called = [tool for tool in tools if name in (None, tool.name)]
        if self.choice in ("any", "tool") and not called:
            reason = "tool_choice requests a call of a tool that is not in tools"
            raise ApiError(400, reason, "tool_choice")
        is_one = name is not None or bool(choice and choice.disable_parallel_tool_use)
        return ToolUse(
            functions=[
                Function(name=tool.name, parameters=tool.input_schema, strict=tool.strict)
                for tool in called
            ],
            requires_call=self.choice in ("any", "tool"),
            restricts_calls=self.choice in ("any", "tool"),
            max_calls=1 if is_one else None,
        )


Stop = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class MessagesRequest(TokenCountRequest):
    """Body of /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    stop_sequences: Annotated[list[Stop], Field(max_length=MAX_STOPS)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=MAX_COUNT)] | None = None
    stream: bool | None = None
    metadata: RequestMetadata | None = None
    seed: Annotated[int, Field(ge=-MAX_SEED - 1, le=MAX_SEED)] | None = None
    speculative: SpeculativeOptions | None = None

    def to_generation(self, sealed: SealedText) -> GenerationRequest:
        """Returns the request in the form that all APIs share; raises as `to_chat`."""
        chat = self.to_chat(sealed)
        form = self.output_config and self.output_config.format
        return GenerationRequest(
            endpoint=MESSAGES,
            id_prefix="msg_",
            body=self,
            model=self.model,
            chat=chat,
            sampling=SamplingFields(
                temperature=self.temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                max_tokens=self.max_tokens,
                is_clamped=True,
                max_drafts=self.speculative.max_drafts if self.speculative else None,
            ),
            names=self._names(chat.tools),
            stop=self.stop_sequences or (),
            form=OutputFormat(kind="schema", value=form.schema_) if form else None,
            seed=self.seed,
            user=self._user(),
            ignored=self._ignored(chat.tools),
            stream=bool(self.stream),
        )

    def _ignored(self, tools: ToolUse) -> tuple[str, ...]:
        """Returns the fields without effect; a format has none if the output must be a call."""
        has_format = bool(self.output_config and self.output_config.format)
        return (
            *self._advice,
            *(["output_config.format"] if has_format and tools.requires_call else []),
        )

    def _names(self, tools: ToolUse) -> dict[str, str]:
        has_format = bool(self.output_config and self.output_config.format)
        grammar = "output_config.format" if has_format else "tools"
        return {
            "prompt": "messages",
            "stop": "stop_sequences",
            "grammar": "tool_choice" if tools.restricts_calls else grammar,
        }

    def _user(self) -> str:
        """Returns the owner of cached prefixes; a long id is replaced by its digest."""
        given = (self.metadata and self.metadata.user_id) or ""
        is_short = len(given) <= MAX_USER_LENGTH
        return given if is_short else hashlib.sha256(given.encode()).hexdigest()


def _for_template(tool: CustomTool) -> dict[str, Any]:
    """Returns a tool in the form of chat completions, which templates read."""
    described = {} if tool.description is None else {"description": tool.description}
    strict = {} if tool.strict is None else {"strict": tool.strict}
    function = {"name": tool.name, **described, "parameters": tool.input_schema, **strict}
    return {"type": "function", "function": function}


def _texts(content: SystemContent) -> list[Part]:
    return [content] if isinstance(content, str) else [block.text for block in content]


def _add_message(
    builder: ConversationBuilder, message: InputMessage, place: str, sealed: SealedText
) -> None:
    """Adds a message; raises as `TokenCountRequest.to_chat`."""
    given, role = message.content, message.role
    blocks = [TextBlock(type="text", text=given)] if isinstance(given, str) else given
    for number, block in enumerate(blocks):
        if block.type not in _ALLOWED[role]:
            where = f"{place}.content[{number}]"
            reason = f"has the type {block.type}, which messages of the role {role} cannot have"
            raise ApiError(400, f"{where} {reason}; move it to another message", where)
    if role == "assistant":
        _add_answer(builder, blocks, place, sealed)
    else:
        _add_input(builder, role, blocks, place)


def _add_input(
    builder: ConversationBuilder, role: str, blocks: Sequence[ContentBlock], place: str
) -> None:
    """Adds a message of user or system; tool results precede it as separate messages."""
    parts: list[Part] = []
    for number, block in enumerate(blocks):
        where = f"{place}.content[{number}]"
        if isinstance(block, ToolResultBlock):
            _add_result(builder, block, where)
        elif isinstance(block, TextBlock | ImageBlock):
            parts.append(_part(block, where))
    if parts or not blocks:
        builder.add(role, parts)


def _add_result(builder: ConversationBuilder, block: ToolResultBlock, where: str) -> None:
    content = [] if block.content is None else block.content
    given = [TextBlock(type="text", text=content)] if isinstance(content, str) else content
    parts = [_part(each, f"{where}.content[{number}]") for number, each in enumerate(given)]
    if block.is_error:
        parts = ["Error:", *parts] if parts else ["Error"]
    builder.add_result(block.tool_use_id, parts, f"{where}.tool_use_id", "tool_use")


def _part(block: TextBlock | ImageBlock, where: str) -> Part:
    if isinstance(block, ImageBlock):
        return ImagePart(f"{where}.source", block.source.address)
    return block.text


def _add_answer(
    builder: ConversationBuilder, blocks: Sequence[ContentBlock], place: str, sealed: SealedText
) -> None:
    builder.begin_answer()
    for number, block in enumerate(blocks):
        if isinstance(block, ThinkingBlock):
            builder.add_reasoning(_reasoning(block, f"{place}.content[{number}]", sealed))
        elif isinstance(block, ToolUseBlock):
            builder.add_call(block.id, block.name, block.input)
        elif isinstance(block, TextBlock):
            builder.add_answer(block.text, joins=True)


def _reasoning(block: ThinkingBlock, place: str, sealed: SealedText) -> str:
    """Returns the text of a thinking block, from its signature if the text is empty."""
    if block.thinking or not block.signature:
        return block.thinking
    text = sealed.open(block.signature)
    if text is None:
        where = f"{place}.signature"
        reason = "was not made by this server, and the block has no text; remove the block"
        raise ApiError(400, f"{where} {reason}", where)
    return text
