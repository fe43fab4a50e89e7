"""Response types of the routes, the source of `/openapi.json`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

STREAM_END = "[DONE]"
"""Data of the last event of a stream."""

FinishReason = Literal["stop", "length", "tool_calls"]


class ResponseModel(BaseModel):
    """No field is there that is not told of."""

    model_config = ConfigDict(extra="forbid", strict=True)


class ErrorFields(ResponseModel):
    """Error message, with the field and a code."""

    message: str
    type: Literal["invalid_request_error", "server_error"]
    param: str | None
    code: str | None


class Error(ResponseModel):
    """Every error of every route; within a stream it is an event."""

    error: ErrorFields


class PromptDetails(ResponseModel):
    """Prompt tokens found in the prefix cache, and image tokens."""

    cached_tokens: int
    image_tokens: int


class Usage(ResponseModel):
    """Tokens of all prompts, each counted once, and of all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


class Speculative(ResponseModel):
    """Acceptance figures; entry i of the histogram counts the steps that accepted i drafts."""

    verify_steps: int
    accept_length: float
    accept_length_histogram: list[int]


class CompletionLogprobs(ResponseModel):
    """Lists of equal length, an entry per token, those of an echoed prompt too.

    The first token of a prompt follows nothing and has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(ResponseModel):
    """A token at a place of the prompt: what the model gave it, and its place among all tokens."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""Logprobs of each prompt token by id: the most likely tokens and the token itself. The
first follows nothing and has null. In a stream the first event of a choice has them."""


class TokenLogprob(ResponseModel):
    """A token, and what the model gave it."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(TokenLogprob):
    """A token of the answer beside the best ones of its place."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(ResponseModel):
    """An object per token."""

    content: list[ChatTokenLogprob]
    refusal: None


class TracedToken(ResponseModel):
    """A token of the text: of what kind it is, and the draft that it was.

    A token that no draft was accepted for is the target's own: the first of an answer, the bonus
    token of a step with drafts, or the token of a plain step; its node and depth are 0. `text` is
    what it added, "" within a character; `name` is the token itself.
    """

    token: int
    text: str
    name: str
    origin: Literal["target", "draft", "ngram", "corpus", "bonus"]
    node: int
    depth: int


class TracedDraft(ResponseModel):
    """A node of the draft tree; `parent` 0 is the newest token before the step."""

    node: int
    parent: int
    depth: int
    token: int
    text: str
    origin: Literal["draft", "ngram", "corpus"]
    accepted: bool


class TracedStep(ResponseModel):
    """Step trace of one choice.

    `step` counts the engine's, `time_ms` begins when the engine had the request, `host_ms` is from
    the step's submission to its result.
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
    """The steps of a choice; why it ended is null while it runs."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "abort", "error"] | None
    steps: list[TracedStep]


class RequestTrace(ResponseModel):
    """Every step of a request; `dropped_steps` of its first ones were too many to keep."""

    id: str
    object: Literal["request.trace"]
    created: int
    model: str
    speculative_algorithm: str | None
    dropped_steps: int
    choices: list[TracedChoice]


class ChoiceBase(ResponseModel):
    """Fields of all choices; `token_ids` and `trace` if requested."""

    index: int
    finish_reason: FinishReason | None
    token_ids: list[int] | None = None
    trace: TracedStep | None = None


class CompletionChoice(ChoiceBase):
    """A choice of a completion, or what a step added to it."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None


class FunctionCall(ResponseModel):
    """A call: its name, where it begins, and JSON text."""

    name: str | None = None
    arguments: str


class ToolCall(ResponseModel):
    """A call of a tool, or the part of one that `index` tells; the first part has `id`."""

    index: int | None = None
    id: str | None = None
    type: Literal["function"] | None = None
    function: FunctionCall


class ChatMessage(ResponseModel):
    """A message, or what a step added to it."""

    role: Literal["assistant"] | None = None
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ChatChoice(ChoiceBase):
    """A choice of a chat."""

    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatPart(ChoiceBase):
    """Increment of a chat choice by one step."""

    delta: ChatMessage
    logprobs: ChatLogprobs | None


class ResponseHeader(ResponseModel):
    """First fields of all responses."""

    id: str
    created: int
    model: str


class Result(ResponseHeader):
    """An answer to a prompt; a stream has `ignored` in its first event.

    `ignored` names the fields of the request that have no effect, where there are some.
    """

    ignored: list[str] | None = None


class Completion(Result):
    """Answer of /v1/completions; an event of its stream has the totals at the end alone."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None
    speculative: Speculative | None = None


class Chat(Result):
    """Answer of /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    speculative: Speculative
    prompt_logprobs: PromptLogprobs | None = None


class ChatEvent(Result):
    """An event of a chat's stream; the last one has the totals."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatPart]
    usage: Usage | None = None
    speculative: Speculative | None = None
    prompt_logprobs: PromptLogprobs | None = None


class ModelCard(ResponseModel):
    """The model that is served; `created` is when the server began to serve it, in seconds."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    speculative_algorithm: str | None
    tp_size: int


class Models(ResponseModel):
    """All models: one."""

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
    """The bounds of a request; null: there is none, or what is bounded is not served."""

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
    """The bounds of the images of a request.

    An image may have `max_pixels` as it is sent; it is brought to `min_tokens` up to the limit
    `max_image_tokens`, each of `pixels_per_token`, and to fewer where its shape has no size in
    between. All of a request have at most `max_bytes` then, three for each pixel.
    """

    max_images: int
    max_pixels: int
    max_bytes: int
    pixels_per_token: int
    min_tokens: int


class IgnoredField(ResponseModel):
    """A field of requests that has no effect: a request that has it is served all the same."""

    field: str
    endpoints: list[str]
    neutral: list[Any]


class Capabilities(ResponseModel):
    """Supported methods, unsupported combinations and limits.

    `ignored` is empty where the server was started with `--strict-fields`. The parsers are those in
    use, `chat_template` is the file of the flag.
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
    """The version of the server."""

    version: str


class CorpusList(ResponseModel):
    """Tokens of each external corpus."""

    corpora: dict[str, int]
