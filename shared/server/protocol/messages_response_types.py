"""Response types of Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from shared.server.protocol.response_types import ResponseModel, Speculative

StopReason = Literal[
    "end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"
]


class AnthropicErrorDetails(ResponseModel):
    """Code of an error from which clients recover: they send the request without `thread`."""

    error_code: Literal["thread_unsupported_request"]


class AnthropicErrorFields(ResponseModel):
    """Type and message of an error; the message begins with the path of the invalid field."""

    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "permission_error",
        "not_found_error",
        "timeout_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
    ]
    message: str
    details: AnthropicErrorDetails | None = None


class AnthropicError(ResponseModel):
    """Error response of Anthropic's API; within a stream it is the event `error`."""

    type: Literal["error"]
    error: AnthropicErrorFields


class OutputTextBlock(ResponseModel):
    """Text of the answer."""

    type: Literal["text"]
    text: str
    citations: None


class OutputThinkingBlock(ResponseModel):
    """Reasoning; `signature` is opaque and contains the reasoning if `thinking` is empty."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class OutputToolUseBlock(ResponseModel):
    """Tool call."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


OutputBlock = Annotated[
    OutputTextBlock | OutputThinkingBlock | OutputToolUseBlock, Field(discriminator="type")
]


class OutputTokensDetails(ResponseModel):
    """Tokens of the reasoning with its delimiters."""

    thinking_tokens: int


class MessageUsage(ResponseModel):
    """Number of tokens; `input_tokens` excludes those found in the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class Message(ResponseModel):
    """Response of /v1/messages; `ignored` lists the request fields without effect, if any."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    speculative: Speculative | None = None
    ignored: list[str] | None = None


class MessageStart(ResponseModel):
    """First event; its message has no content and no stop reason."""

    type: Literal["message_start"]
    message: Message


class Ping(ResponseModel):
    """Event that keeps the connection open."""

    type: Literal["ping"]


class BlockStart(ResponseModel):
    """Start of block number `index`."""

    type: Literal["content_block_start"]
    index: int
    content_block: OutputBlock


class TextDelta(ResponseModel):
    """Increment of a text block."""

    type: Literal["text_delta"]
    text: str


class ThinkingDelta(ResponseModel):
    """Increment of a thinking block."""

    type: Literal["thinking_delta"]
    thinking: str


class SignatureDelta(ResponseModel):
    """Signature at the end of a thinking block."""

    type: Literal["signature_delta"]
    signature: str


class InputJsonDelta(ResponseModel):
    """Increment of the JSON text of a tool call's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class BlockDelta(ResponseModel):
    """Increment of block number `index`."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[
        TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta, Field(discriminator="type")
    ]


class BlockStop(ResponseModel):
    """End of block number `index`."""

    type: Literal["content_block_stop"]
    index: int


class StopFields(ResponseModel):
    """Stop reason, and the stop sequence that ended the text."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(ResponseModel):
    """Stop reason and usage at the end of a message."""

    type: Literal["message_delta"]
    delta: StopFields
    usage: MessageUsage
    speculative: Speculative


class MessageStop(ResponseModel):
    """Last event."""

    type: Literal["message_stop"]


class MessageEvent(
    RootModel[
        Annotated[
            MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop,
            Field(discriminator="type"),
        ]
    ]
):
    """Stream event of /v1/messages; its name is its `type`."""


class TokenCount(ResponseModel):
    """Number of prompt tokens of a message."""

    input_tokens: int


class ModelInfo(ResponseModel):
    """Served model; `created_at` is the time at which the server started."""

    type: Literal["model"]
    id: str
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    max_tokens: int


class ModelPage(ResponseModel):
    """List of models in Anthropic's format; the server has one."""

    data: list[ModelInfo]
    has_more: Literal[False]
    first_id: str
    last_id: str
