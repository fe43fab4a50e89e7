"""Input items of OpenAI's Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from shared.server.protocol.chat_messages import MAX_ID_LENGTH, Arguments, Client, FunctionName
from shared.server.protocol.content import LOW
from shared.server.protocol.fields import Strict, Text, string_or_list, type_of
from shared.server.protocol.responses_tools import join_names
from shared.text.parsing.input_decoder import INPUT

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


class CallItem(Strict):
    """Call of an earlier answer."""

    call_id: ItemId
    name: FunctionName
    id: ItemId | None = None
    status: Status | None = None
    namespace: FunctionName | None = None
    caller: Client = None

    @property
    def template_name(self) -> str:
        """Name that the chat template reads."""
        return self.name if self.namespace is None else join_names(self.namespace, self.name)


class FunctionCallItem(CallItem):
    """Function call of an earlier answer; a call that was cut is accepted."""

    type: Literal["function_call"]
    arguments: Arguments
    parsed_arguments: Client = None  # of objects of the openai packages


class CustomCallItem(CallItem):
    """Call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    input: Text

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments that the chat template reads."""
        return {INPUT: self.input}


class CallOutput(Strict):
    """Result of a function call, or of a call of a custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
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


_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_KINDS = ("message", "function_call", "custom_tool_call", *_OUTPUTS, "reasoning")


def _item_kind(value: Any) -> str:
    kind = type_of(value)
    if isinstance(value, dict) and kind is None:
        return "<message>"
    if kind in _OUTPUTS:
        return "<output>"
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
    | Annotated[CustomCallItem, Tag("<custom_tool_call>")]
    | Annotated[CallOutput, Tag("<output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")]
    | Annotated[_RejectedItem, Tag("<other>")],
    Discriminator(_item_kind),
]
