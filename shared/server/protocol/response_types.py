"""Response types of the routes, the source of `/openapi.json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

STREAM_END = "[DONE]"
"""Data of the last event of a stream."""

FinishReason = Literal["stop", "length", "tool_calls"]


class ResponseModel(BaseModel):
    """Response object; it has no fields besides those of the schema."""

    model_config = ConfigDict(extra="forbid", strict=True, defer_build=True)


class ErrorFields(ResponseModel):
    """Message, type, invalid field (`param`) and code of an error."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class Error(ResponseModel):
    """Error response of every route; within a stream it is sent as an event."""

    error: ErrorFields


class PromptDetails(ResponseModel):
    """Number of prompt tokens found in the prefix cache, and of image tokens."""

    cached_tokens: int
    image_tokens: int


class Usage(ResponseModel):
    """Number of tokens of all prompts, each counted once, and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Speculative(ResponseModel):
    """Acceptance statistics of speculative decoding.

    Entry i of `accept_length_histogram` is the number of steps that accepted i draft tokens.
    `accept_length` is the average number of tokens per step, with the bonus token.
    """

    verify_steps: int
    accept_length: float
    accept_length_histogram: list[int]


class CompletionLogprobs(ResponseModel):
    """Logprobs of a completion: lists with one entry per token, including an echoed prompt.

    The entries of the first prompt token are null, because no token precedes it.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(ResponseModel):
    """Logprob of a token at a prompt position, its rank in the vocabulary (from 1) and its text."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Logprobs of each prompt position by token id: the most likely tokens and the prompt token. The
entry of the first token is null. In a stream the first event of a choice contains them."""


class TokenLogprob(ResponseModel):
    """Text, bytes and logprob of a token."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    """Output token, with the most likely tokens at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ResponseModel):
    """Logprobs of a chat choice: one object per token."""

    content: list[ChatTokenLogprob]
    refusal: None


class TracedToken(ResponseModel):
    """Output token in a step trace.

    `origin` is the source of the accepted draft token, `bonus` for the bonus token of a step with
    drafts, and `target` for the token of a prefill or plain step. `node` and `depth` are 0 for
    `bonus` and `target`. `text` is the text that the token added, "" within a character; `name` is
    the text of the token alone.
    """

    token: int
    text: str
    name: str
    origin: Literal["target", "draft", "ngram", "corpus", "bonus"]
    node: int
    depth: int


class TracedDraft(ResponseModel):
    """Node of the draft tree; `parent` 0 is the root, the newest token before the step."""

    node: int
    parent: int
    depth: int
    token: int
    text: str
    origin: Literal["draft", "ngram", "corpus"]
    accepted: bool


class TracedStep(ResponseModel):
    """Step trace of one choice.

    `step` is the number of the engine step. `time_ms` is the time since the engine received the
    request, `host_ms` the time from the step's submission to its result.
    """

    step: int
    source: Literal["prefill", "plain", "draft", "ngram", "merged"]
    batch_size: int
    time_ms: float
    host_ms: float
    device_ms: float | None
    drafts: list[TracedDraft]
    tokens: list[TracedToken]


class TracedChoice(ResponseModel):
    """Steps of a choice; `finish_reason` is null while the choice runs."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "abort", "error"] | None
    steps: list[TracedStep]


class RequestTrace(ResponseModel):
    """Step trace of a request; the oldest `dropped_steps` steps were dropped to save memory."""

    id: str
    object: Literal["request.trace"]
    created: int
    model: str
    speculative_algorithm: str | None
    dropped_steps: int
    choices: list[TracedChoice]


class ChoiceBase(ResponseModel):
    """Fields of all choices; `token_ids` and `trace` are present if requested."""

    index: int
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    trace: TracedStep | None = None


class CompletionChoice(ChoiceBase):
    """Choice of a completion; in a stream, its increment by one step."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None


class FunctionCall(ResponseModel):
    """Name and arguments of a tool call; in a stream, `name` is in the first increment only."""

    name: str | None = None
    arguments: str


class ToolCall(ResponseModel):
    """Tool call; in a stream, the increment of call number `index`, with `id` in the first one."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(ResponseModel):
    """Message of the assistant; in a stream, its increment by one step."""

    role: Literal["assistant"] | None = None
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ChoiceBase):
    """Choice of a chat completion."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatPart(ChoiceBase):
    """Choice in a stream event: the increment by one step."""

    delta: ChatMessage
    logprobs: ChatLogprobs | None


class ResponseHeader(ResponseModel):
    """Common first fields of responses."""

    id: str
    created: int
    model: str


class Result(ResponseHeader):
    """Common fields of completions.

    `ignored` lists the request fields without effect, if any; a stream has it in the first event.
    """

    ignored: list[str] | None = None


class Completion(Result):
    """Response of /v1/completions; in a stream, the last event has `usage` and `speculative`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    speculative: Speculative | None = None


class Chat(Result):
    """Response of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    speculative: Speculative
    prompt_logprobs: PromptLogprobs | None = None


class ChatEvent(Result):
    """Stream event of /v1/chat/completions; the last one has `usage` and `speculative`."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPart]
    usage: Usage | None = None
    speculative: Speculative | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ModelCard(ResponseModel):
    """Served model; `created` is the Unix time at which the server started."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    speculative_algorithm: str | None
    tp_size: int


class Models(ResponseModel):
    """List of models; the server has one."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(ResponseModel):
    """Tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(ResponseModel):
    """Text of tokens."""

    prompt: str


class UnsupportedFeature(ResponseModel):
    """Unsupported combination or field: reason, hint and example."""

    reason: str
    hint: str
    example: dict[str, Any]


class Limits(ResponseModel):
    """Limits of a request; null: unlimited, or the limited feature is unsupported."""

    context_length: int
    max_request_tokens: int
    vocab_size: int
    max_stop_token_ids: int
    max_logit_bias_entries: int
    max_logprobs: int | None
    max_prompt_logprobs: int
    max_image_tokens: int
    image_token: int | None
    max_open_requests: int | None
    max_draft_depth: int
    max_body_bytes: int
    max_header_bytes: int


class ImageLimits(ResponseModel):
    """Limits of the images of a request.

    An image may have at most `max_pixels` when it is sent. It is resized to between `min_tokens`
    and `max_image_tokens` tokens of `pixels_per_token` pixels each, or to fewer tokens if no size
    in that range matches its shape. The resized images of a request may have at most `max_bytes`
    bytes, three per pixel.
    """

    max_images: int
    max_pixels: int
    max_bytes: int
    pixels_per_token: int
    min_tokens: int


class IgnoredField(ResponseModel):
    """Request field that is accepted and ignored."""

    field: str
    endpoints: list[str]
    neutral: list[Any]


class Capabilities(ResponseModel):
    """Supported methods, unsupported combinations and limits.

    `ignored` is empty if the server was started with `--strict-fields`. The parsers are those in
    use; `chat_template` is the file of `--chat-template`.
    """

    drafters: list[str]
    ignored: list[IgnoredField]
    unsupported: list[UnsupportedFeature]
    tp_size: int
    tool_call_parser: str | None
    reasoning_parser: str | None
    chat_template: str | None
    structured_outputs: bool
    limits: Limits
    images: ImageLimits | None


class ServerVersion(ResponseModel):
    """Version of the server."""

    version: str


class KVAddress(ResponseModel):
    """Address of a KV cache record.

    `host` is empty: it is the host of the HTTP request. `socket_name` is an abstract Unix socket.
    """

    boot_id: str
    socket_name: str
    host: str
    port: int


class KVTicket(ResponseModel):
    """Ticket of a KV cache record, which can be fetched once; `header` describes the record."""

    ticket_id: str
    address: KVAddress
    num_bytes: int
    header: dict[str, Any]


class AdapterList(ResponseModel):
    """Folder of each LoRA adapter, and notes on tensors of a loaded one that are not used."""

    success: bool
    loaded_adapters: dict[str, str]
    notes: list[str]


class CorpusList(ResponseModel):
    """Number of tokens of each external corpus."""

    corpora: dict[str, int]
