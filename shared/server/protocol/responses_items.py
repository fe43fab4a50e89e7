"""Input items and tools of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)
from pydantic_core import PydanticCustomError

from shared.server.protocol.chat_messages import (
    MAX_ID_LENGTH,
    MAX_NAME_LENGTH,
    MAX_TOOLS,
    Arguments,
    Client,
    FunctionName,
)
from shared.server.protocol.content import LOW
from shared.server.protocol.fields import Nested, Strict, Text, string_or_list, type_of

MAX_PARTS = 1 << 12  # per item

ItemId = Annotated[Text, Field(max_length=MAX_ID_LENGTH)]
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(Strict):
    """Text of a message or a tool result."""

    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: Client = None
    logprobs: Client = None
    parsed: Client = None  # of objects of the openai packages
    prompt_cache_breakpoint: Client = None


class InputImage(Strict):
    """Image as a data URL; other URLs are not fetched."""

    type: Literal["input_image"]
    image_url: Text
    detail: Literal["low", "high", "auto", "original"] | None = None
    file_id: None = None
    prompt_cache_breakpoint: Client = None

    @property
    def is_low(self) -> bool:
        """True if the size of the image is bounded."""
        return self.detail == LOW


def _part_kind(value: Any) -> str:
    kind = type_of(value)
    if kind in ("input_text", "output_text", "text"):
        return "<text>"
    return "<image>" if kind == "input_image" else "<other>"


def _reject_part(value: Any) -> Any:
    kind = type_of(value)
    hint = "supported types are input_text, output_text and input_image"
    raise PydanticCustomError(
        "part",
        "has the type {kind}, which is not supported; {hint}",
        {"kind": str(kind)[:80], "hint": hint},
    )


_Rejected = Annotated[Any, PlainValidator(_reject_part), WithJsonSchema({"not": {}})]
ContentPart = Annotated[
    Annotated[InputText, Tag("<text>")]
    | Annotated[InputImage, Tag("<image>")]
    | Annotated[_Rejected, Tag("<other>")],
    Discriminator(_part_kind),
]


ItemContent = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[list[ContentPart], Field(max_length=MAX_PARTS), Tag("<list>")],
    Discriminator(string_or_list),
]


class MessageItem(Strict):
    """Message of the user, the assistant, the system or the developer."""

    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent
    id: ItemId | None = None
    status: Status | None = None
    phase: Client = None


class FunctionCallItem(Strict):
    """Function call of an earlier answer; a call that was cut is accepted."""

    type: Literal["function_call"]
    call_id: ItemId
    name: FunctionName
    arguments: Arguments
    id: ItemId | None = None
    status: Status | None = None
    namespace: FunctionName | None = None
    caller: Client = None
    parsed_arguments: Client = None  # of objects of the openai packages

    @property
    def template_name(self) -> str:
        """Name that the chat template reads."""
        return self.name if self.namespace is None else join_names(self.namespace, self.name)


class FunctionCallOutput(Strict):
    """Result of a function call."""

    type: Literal["function_call_output"]
    call_id: ItemId
    output: ItemContent
    id: ItemId | None = None
    status: Status | None = None
    name: Text | None = None
    caller: Client = None


class ReasoningPart(Strict):
    """Text or summary of reasoning."""

    type: Literal["reasoning_text", "summary_text"]
    text: Text


class ReasoningItem(Strict):
    """Reasoning of an earlier answer: its text, or the opaque `encrypted_content`."""

    type: Literal["reasoning"]
    id: ItemId | None = None
    summary: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] = []
    content: Annotated[list[ReasoningPart], Field(max_length=MAX_PARTS)] | None = None
    encrypted_content: Text | None = None
    status: Status | None = None


_KINDS = ("message", "function_call", "function_call_output", "reasoning")


def _item_kind(value: Any) -> str:
    kind = type_of(value)
    if isinstance(value, dict) and kind is None:
        return "<message>"
    return f"<{kind}>" if kind in _KINDS else "<other>"


def _reject_item(value: Any) -> Any:
    kind = type_of(value)
    if not isinstance(kind, str):
        raise PydanticCustomError("item", "must be an item with a type")
    raise PydanticCustomError(
        "item",
        "has the type {kind}, which is not supported; supported types are {known}",
        {"kind": kind[:80], "known": ", ".join(_KINDS)},
    )


_RejectedItem = Annotated[Any, PlainValidator(_reject_item), WithJsonSchema({"not": {}})]
InputItem = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[_RejectedItem, Tag("<other>")],
    Discriminator(_item_kind),
]


class FunctionTool(Strict):
    """Function that the model may call."""

    type: Literal["function"]
    name: FunctionName
    description: Text | None = None
    parameters: Nested | None = None
    strict: bool | None = None


def join_names(namespace: str, name: str) -> str:
    """Returns the name by which the model calls a function of a namespace."""
    return f"{namespace}.{name}"


class NamespaceTool(Strict):
    """Functions that share a namespace."""

    type: Literal["namespace"]
    name: FunctionName
    description: Text | None = None
    tools: Annotated[list[FunctionTool], Field(min_length=1, max_length=MAX_TOOLS)]

    @field_validator("tools")
    @classmethod
    def _check_names(cls, tools: list[FunctionTool], info: ValidationInfo) -> list[FunctionTool]:
        for tool in tools:
            if len(joined := join_names(info.data.get("name", ""), tool.name)) > MAX_NAME_LENGTH:
                raise PydanticCustomError(
                    "names",
                    "has the function {name}, which is too long; shorten the names of namespace "
                    "and function to {most} characters together",
                    {"name": joined, "most": MAX_NAME_LENGTH - 1},
                )
        return tools

    @property
    def functions(self) -> list[FunctionTool]:
        """Functions as the chat template lists them; each has the description of all."""
        return [
            tool.model_copy(
                update={
                    "name": join_names(self.name, tool.name),
                    "description": "\n\n".join(filter(None, (self.description, tool.description))),
                }
            )
            for tool in self.tools
        ]


_HINTS = {
    "web_search": "turn web search off in the client",
    "custom": "send a function with one string parameter",
}


def _tool_kind(value: Any) -> str:
    kind = value.get("type") if isinstance(value, dict) else "function"
    if kind == "namespace":
        return "<namespace>"
    return "<function>" if kind in (None, "function") else "<server>"


def _reject_tool(value: Any) -> Any:
    kind = str(value["type"])[:80]
    raise PydanticCustomError(
        "tool",
        "has the type {kind}, and only functions and namespaces are supported; {hint}",
        {"kind": kind, "hint": _HINTS.get(kind, "send it as a function")},
    )


_RejectedTool = Annotated[Any, PlainValidator(_reject_tool), WithJsonSchema({"not": {}})]
ResponsesTool = Annotated[
    Annotated[FunctionTool, Tag("<function>")]
    | Annotated[NamespaceTool, Tag("<namespace>")]
    | Annotated[_RejectedTool, Tag("<server>")],
    Discriminator(_tool_kind),
]
