"""Content blocks, messages and tools of Anthropic's Messages API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, PlainValidator, Tag, WithJsonSchema
from pydantic_core import PydanticCustomError

from shared.server.protocol.chat_messages import MAX_ID_LENGTH, FunctionName
from shared.server.protocol.fields import Nested, Strict, Text, string_or_list, type_of

MAX_BLOCKS = 1 << 12  # per message

CacheControl = Annotated[Nested | None, Field(exclude=True)]
"""Cache hint, which is satisfied: every prompt is cached."""

_HINTS = {
    "document": "send its text, or its pages as image blocks",
    "search_result": "send its text",
    "server_tool_use": "server tools are not supported; remove the block",
    "container_upload": "send the text of the file",
}


class TextBlock(Strict):
    """Text."""

    type: Literal["text"]
    text: Text
    cache_control: CacheControl = None
    citations: Annotated[list[Any], Field(max_length=0)] | None = None


class Base64Source(Strict):
    """Image in base64."""

    type: Literal["base64"]
    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Text

    @property
    def address(self) -> str:
        """Data URL of the image."""
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(Strict):
    """Image as a data URL; other URLs are not fetched."""

    type: Literal["url"]
    url: Text

    @property
    def address(self) -> str:
        """Data URL of the image."""
        return self.url


def _source_kind(value: Any) -> str:
    kind = type_of(value)
    return "<url>" if kind == "url" else "<base64>"


class ImageBlock(Strict):
    """Image."""

    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")],
        Discriminator(_source_kind),
    ]
    cache_control: CacheControl = None


class ToolUseBlock(Strict):
    """Tool call of an earlier answer."""

    type: Literal["tool_use"]
    id: Annotated[Text, Field(min_length=1, max_length=MAX_ID_LENGTH)]
    name: FunctionName
    input: Nested
    cache_control: CacheControl = None


class ThinkingBlock(Strict):
    """Reasoning of an earlier answer; an empty text is read from the signature."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedThinkingBlock(Strict):
    """Reasoning that another server has encrypted."""

    type: Literal["redacted_thinking"]
    data: Text


def _kind(value: Any) -> str:
    """Returns the tag of a block's model."""
    kind = type_of(value)
    return f"<{kind}>" if kind in _BLOCKS else "<other>"


def _reject(value: Any) -> Any:
    kind = type_of(value)
    if not isinstance(kind, str):
        raise PydanticCustomError("block", "must be a block with a type")
    hint = _HINTS.get(kind, f"supported types are {', '.join(sorted(_BLOCKS))}")
    raise PydanticCustomError(
        "block", "has the type {kind}, which is not supported; {hint}", {"kind": kind, "hint": hint}
    )


_Other = Annotated[Any, PlainValidator(_reject), WithJsonSchema({"not": {}})]
ResultBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[_Other, Tag("<other>")],
    Discriminator(_kind),
]


ResultContent = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[list[ResultBlock], Field(max_length=MAX_BLOCKS), Tag("<list>")],
    Discriminator(string_or_list),
]


class ToolResultBlock(Strict):
    """Result of a tool call."""

    type: Literal["tool_result"]
    tool_use_id: Annotated[Text, Field(max_length=MAX_ID_LENGTH)]
    content: ResultContent | None = None
    is_error: bool | None = None
    cache_control: CacheControl = None


_BLOCKS = ("text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking")
ContentBlock = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[RedactedThinkingBlock, Tag("<redacted_thinking>")]
    | Annotated[_Other, Tag("<other>")],
    Discriminator(_kind),
]
Content = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[list[ContentBlock], Field(max_length=MAX_BLOCKS), Tag("<list>")],
    Discriminator(string_or_list),
]
SystemContent = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS), Tag("<list>")],
    Discriminator(string_or_list),
]


class InputMessage(Strict):
    """Message of the user, the assistant or the system."""

    role: Literal["user", "assistant", "system"]
    content: Content


class CustomTool(Strict):
    """Tool that the client runs."""

    type: Literal["custom"] | None = None
    name: FunctionName
    description: Text | None = None
    input_schema: Nested
    strict: bool | None = None
    cache_control: CacheControl = None


def _tool_kind(value: Any) -> str:
    kind = type_of(value)
    return "<custom>" if kind in (None, "custom") else "<server>"


def _reject_tool(value: Any) -> Any:
    raise PydanticCustomError(
        "tool",
        "has the type {kind}, and server tools are not supported; send custom tools with an "
        "input_schema",
        {"kind": str(value["type"])[:80]},
    )


MessagesTool = Annotated[
    Annotated[CustomTool, Tag("<custom>")]
    | Annotated[Any, PlainValidator(_reject_tool), WithJsonSchema({"not": {}}), Tag("<server>")],
    Discriminator(_tool_kind),
]


class AnyChoice(Strict):
    """Tool choice without a name: calls are optional, required or excluded."""

    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool | None = None


class NamedChoice(Strict):
    """Tool choice that requires a call of one tool."""

    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


def _choice_kind(value: Any) -> str:
    kind = type_of(value)
    return "<named>" if kind == "tool" else "<any>"


MessagesToolChoice = Annotated[
    Annotated[AnyChoice, Tag("<any>")] | Annotated[NamedChoice, Tag("<named>")],
    Discriminator(_choice_kind),
]
