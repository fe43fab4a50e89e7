"""Response types of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, RootModel

from shared.server.protocol.response_types import ChatTokenLogprob, ResponseModel, Speculative

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputTextPart(ResponseModel):
    """Text of a message."""

    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: list[ChatTokenLogprob]


class ReasoningTextPart(ResponseModel):
    """Text of the reasoning."""

    type: Literal["reasoning_text"]
    text: str


class OutputMessageItem(ResponseModel):
    """Message of the assistant; its first event has no content yet."""

    id: str
    type: Literal["message"]
    status: ItemStatus
    role: Literal["assistant"]
    content: list[OutputTextPart]


class OutputReasoningItem(ResponseModel):
    """Reasoning; `encrypted_content` is opaque and present if it is requested."""

    id: str
    type: Literal["reasoning"]
    status: ItemStatus
    summary: Annotated[list[Any], Field(max_length=0)]
    content: list[ReasoningTextPart]
    encrypted_content: str | None


class OutputCallItem(ResponseModel):
    """Function call; `namespace` is present if the function has one."""

    id: str
    type: Literal["function_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str


class OutputCustomCallItem(ResponseModel):
    """Call of a custom tool; `namespace` is present if the tool has one."""

    id: str
    type: Literal["custom_tool_call"]
    status: ItemStatus
    call_id: str
    name: str
    namespace: str | None = None
    input: str


OutputItem = Annotated[
    OutputMessageItem | OutputReasoningItem | OutputCallItem | OutputCustomCallItem,
    Field(discriminator="type"),
]


class ResponseFailure(ResponseModel):
    """Reason of a failed response."""

    code: Literal["server_error", "invalid_prompt"]
    message: str


class IncompleteDetails(ResponseModel):
    """Reason of an incomplete response."""

    reason: Literal["max_output_tokens"]


class InputTokensDetails(ResponseModel):
    """Prompt tokens found in the prefix cache; writing costs nothing."""

    cached_tokens: int
    cache_write_tokens: int


class ReasoningTokensDetails(ResponseModel):
    """Tokens of the reasoning with its delimiters."""

    reasoning_tokens: int


class ResponseUsage(ResponseModel):
    """Number of tokens of prompt and output."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokensDetails
    total_tokens: int


class ResponseObject(ResponseModel):
    """Response of /v1/responses; `ignored` lists the request fields without effect, if any."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    previous_response_id: str | None
    user: str | None
    safety_identifier: str | None
    prompt_cache_key: str | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    text: dict[str, Any]
    reasoning: dict[str, Any]
    top_logprobs: int
    truncation: Literal["disabled"]
    background: Literal[False]
    speculative: Speculative | None = None
    ignored: list[str] | None = None


class DeletedResponse(ResponseModel):
    """Result of the deletion of a stored response."""

    id: str
    object: Literal["response"]
    deleted: Literal[True]


class SequencedEvent(ResponseModel):
    """Common field of stream events, which are numbered from 0."""

    sequence_number: int


class StatusEvent(SequencedEvent):
    """Event with the whole response: the first two and the last one."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(SequencedEvent):
    """Start or end of an output item."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(SequencedEvent):
    """Start or end of the content of an item."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int
    part: Annotated[OutputTextPart | ReasoningTextPart, Field(discriminator="type")]


class TextDeltaEvent(SequencedEvent):
    """Increment of a text."""

    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDoneEvent(SequencedEvent):
    """Complete text."""

    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDeltaEvent(SequencedEvent):
    """Increment of the reasoning."""

    type: Literal["response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDoneEvent(SequencedEvent):
    """Complete reasoning."""

    type: Literal["response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str


class ArgumentsDeltaEvent(SequencedEvent):
    """Increment of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(SequencedEvent):
    """Complete arguments of a call."""

    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str


class InputDeltaEvent(SequencedEvent):
    """Increment of the input of a custom tool."""

    type: Literal["response.custom_tool_call_input.delta"]
    item_id: str
    output_index: int
    delta: str


class InputDoneEvent(SequencedEvent):
    """Complete input of a custom tool."""

    type: Literal["response.custom_tool_call_input.done"]
    item_id: str
    output_index: int
    input: str


class ResponseEvent(
    RootModel[
        Annotated[
            StatusEvent
            | ItemEvent
            | PartEvent
            | TextDeltaEvent
            | TextDoneEvent
            | ReasoningDeltaEvent
            | ReasoningDoneEvent
            | ArgumentsDeltaEvent
            | ArgumentsDoneEvent
            | InputDeltaEvent
            | InputDoneEvent,
            Field(discriminator="type"),
        ]
    ]
):
    """Stream event of /v1/responses; its name is its `type`."""
