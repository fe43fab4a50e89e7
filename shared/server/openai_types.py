"""Requests as OpenAI's clients write them, checked field by field, and the errors they get."""

from __future__ import annotations

import json
import re
import reprlib
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from shared.options.request_fields import BOTH, CHAT, COMPLETIONS, NOT_SERVED, NotServed

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_CHOICES = 1024  # of all prompts of one request
MAX_BIAS = 100  # of a token, either way
MAX_USER_LENGTH = 256  # the drafter NGRAM keeps the name for as long as what was seen of it
MAX_MESSAGES = 1 << 14
MAX_TOKEN_IDS = 1 << 14  # of stop_token_ids and of logit_bias; a model's own bounds are lower
MAX_PARTS = 1 << 17  # lists, objects, fields or texts of a body
MAX_VALUES = 1 << 20  # of a body, say of a prompt of token ids
MAX_PRIORITY = 1000
MAX_DRAFT_TOKENS = 1 << 16  # more than any step has; what a request allows beyond means the same

_A_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SHORT = reprlib.Repr()  # writes the beginning of what a request has, without walking all of it
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80

_NOT_SERVED = {
    endpoint: {field.name: field for field in NOT_SERVED if endpoint in field.endpoints}
    for endpoint in BOTH
}


class ApiError(Exception):
    """An answer with OpenAI's error object.

    Attributes:
      status: HTTP status.
      message: One sentence.
      param: The field at fault, or None.
      code: A word for programs, or None.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def to_json(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def is_text(value: Any) -> bool:
    """Whether a value is a string of characters; JSON can also write halves of them."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def _check_text(value: str) -> str:
    if not is_text(value):
        raise PydanticCustomError("text", "must be a text, not halves of characters")
    return value


Text = Annotated[str, AfterValidator(_check_text)]
User = Annotated[Text, Field(max_length=MAX_USER_LENGTH)]


def is_id_list(value: Any) -> bool:
    """Whether a value is a list of integers, which may be ids of tokens."""
    return isinstance(value, list) and set(map(type, value)) <= {int}


def _read_prompt(value: Any) -> list[str] | list[list[int]]:
    """Prompts, of which a request may have several: all texts or all lists of token ids."""
    prompts = [value] if isinstance(value, str) or (value and is_id_list(value)) else value
    if isinstance(prompts, list) and len(prompts) > MAX_CHOICES:
        raise PydanticCustomError(
            "prompt", "must have at most {number} prompts", {"number": MAX_CHOICES}
        )
    if not isinstance(prompts, list) or not (
        all(map(is_text, prompts)) or all(map(is_id_list, prompts))
    ):
        raise PydanticCustomError(
            "prompt", "must be a text, a list of token ids, or a list of such prompts of one kind"
        )
    if not prompts or not all(prompts):
        raise PydanticCustomError("prompt", "must not be empty")
    return prompts


def _read_stops(value: Any) -> list[str]:
    stops = [value] if isinstance(value, str) else value if value is not None else []
    few = isinstance(stops, list) and stops[: MAX_STOPS + 1]
    if not isinstance(few, list) or not all(is_text(s) and s for s in few):
        raise PydanticCustomError("stop", "must be a text or a list of texts, none of them empty")
    if len(few) > MAX_STOPS or any(len(s) > MAX_STOP_LENGTH for s in few):
        raise PydanticCustomError(
            "stop",
            "must have at most {number} texts of {length} characters",
            {"number": MAX_STOPS, "length": MAX_STOP_LENGTH},
        )
    return stops


def _read_bias(value: Any) -> dict[int, float]:
    """Biases by token id; JSON writes the ids as texts."""
    if not isinstance(value, dict | None):
        raise PydanticCustomError("logit_bias", "must be an object of token ids and their biases")
    biases = value or {}
    if len(biases) > MAX_TOKEN_IDS:
        raise PydanticCustomError(
            "logit_bias", "must have at most {number} token ids", {"number": MAX_TOKEN_IDS}
        )
    for name, bias in biases.items():
        if not (name.isascii() and name.isdigit() and len(name) < 20):
            raise PydanticCustomError("logit_bias", "must have token ids as its keys")
        # NaN is not within the bounds either.
        if type(bias) not in (int, float) or not -MAX_BIAS <= bias <= MAX_BIAS:
            raise PydanticCustomError(
                "logit_bias", "must have numbers from -{bound} to {bound}", {"bound": MAX_BIAS}
            )
    if len(set(map(int, biases))) < len(biases):
        raise PydanticCustomError("logit_bias", "must have each token id once")
    return {int(name): float(bias) for name, bias in biases.items()}


def _read_content(value: Any) -> str:
    """A message's content: a text, or parts of type text, joined by newlines as vLLM does."""
    if is_text(value):
        return value
    parts = value if isinstance(value, list) and value else [None]
    texts = []
    for part in parts:
        if not isinstance(part, dict) or set(part) != {"type", "text"} or part["type"] != "text":
            raise PydanticCustomError("content", "must be a text or a list of parts of type text")
        texts.append(part["text"])
    if not all(map(is_text, texts)):
        raise PydanticCustomError("content", "has a part whose text is not a string")
    return "\n".join(texts)


class Strict(BaseModel):
    """Wrong types, unknown fields, NaN and infinity are errors."""

    model_config = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False, validate_default=True, frozen=True
    )


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False


class SpeculativeOptions(Strict):
    """How much may be drafted for one request; the law of its text never depends on it."""

    enabled: bool | None = None
    max_draft_tokens: Annotated[int, Field(ge=0)] | None = None

    @property
    def most_drafts(self) -> int | None:
        """Most drafts of a step, or None for all that the step has."""
        if self.enabled is False:
            return 0
        asked = self.max_draft_tokens
        return None if asked is None else min(asked, MAX_DRAFT_TOKENS)


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_read_content)]
    name: Text | None = None


class GenerationRequest(Strict):
    """The fields that both endpoints share.

    `DEFAULT_TOKENS` bounds an output whose request does not say; None: all that fits. `PROMPT` is
    the field of the prompt.
    """

    DEFAULT_TOKENS: ClassVar[int | None] = None
    PROMPT: ClassVar[str]

    model: Text | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # -1 and 0: off
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    # Logits are divided by it: far smaller values leave float32's range.
    repetition_penalty: Annotated[float, Field(ge=0.01, le=2)] | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_read_bias)] = {}
    seed: int | None = None
    stop: Annotated[list[str], PlainValidator(_read_stops)] = []
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)] | None = (
        None
    )
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    speculative: SpeculativeOptions | None = None
    user: User | None = None
    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = None

    @property
    def num_choices(self) -> int:
        """Choices of each prompt."""
        return self.n or 1

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """The field that bounds the output, and its value."""
        return "max_tokens", self.max_tokens

    @property
    def asked_logprobs(self) -> tuple[str, int | None]:
        """The field that asks for the best tokens, and how many; None for no logprobs at all."""
        return "logprobs", None

    @property
    def names(self) -> dict[str, str]:
        """This API's words for the fields of a request that the engine calls otherwise."""
        asked = {"max_tokens": self.asked_tokens[0], "logprobs": self.asked_logprobs[0]}
        return {"prompt": self.PROMPT, **asked}

    @property
    def most_drafts(self) -> int | None:
        """Most drafts of a step, or None for all that the step has."""
        return self.speculative.most_drafts if self.speculative else None


class CompletionRequest(GenerationRequest):
    """Body of /v1/completions."""

    DEFAULT_TOKENS: ClassVar[int | None] = 16  # OpenAI's
    PROMPT: ClassVar[str] = "prompt"

    prompt: Annotated[list[str] | list[list[int]], PlainValidator(_read_prompt)]
    logprobs: Annotated[int, Field(ge=0)] | None = None

    @property
    def asked_logprobs(self) -> tuple[str, int | None]:
        """`logprobs`, a number here."""
        return "logprobs", self.logprobs


class ChatRequest(GenerationRequest):
    """Body of /v1/chat/completions."""

    PROMPT: ClassVar[str] = "messages"

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0)] | None = None
    parallel_tool_calls: bool | None = None  # says nothing without tools

    @property
    def asked_tokens(self) -> tuple[str, int | None]:
        """`max_completion_tokens`, or its old name."""
        if self.max_completion_tokens is None:
            return "max_tokens", self.max_tokens
        return "max_completion_tokens", self.max_completion_tokens

    @property
    def asked_logprobs(self) -> tuple[str, int | None]:
        """`top_logprobs`, which `logprobs` turns on."""
        return "top_logprobs", (self.top_logprobs or 0) if self.logprobs else None


Body = TypeVar("Body", CompletionRequest, ChatRequest)
Checked = TypeVar("Checked", bound=Strict)


def parse(body: bytes, kind: type[Body]) -> Body:
    """Reads the body of a request.

    Raises:
      ApiError: Status 400; names the field at fault.
    """
    table = _NOT_SERVED[CHAT if kind is ChatRequest else COMPLETIONS]
    request = _checked(_drop_neutral(_read_object(body), table), kind)
    _check_together(request)
    return request


def parse_plain(body: bytes, kind: type[Checked]) -> Checked:
    """Reads a body of which no field is another API's.

    Raises:
      ApiError: Status 400; names the field at fault.
    """
    return _checked(_read_object(body), kind)


def _read_object(body: bytes) -> dict[str, Any]:
    _check_width(body)
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, got a {type(fields).__name__}")
    return fields


def _check_width(body: bytes) -> None:
    """Refuses a body of very many parts: nobody else is served while they are read."""
    # Texts may hold brackets and commas; without many texts it is quick to count without them.
    if _has_many_texts(body) or (_is_wide(body) and _is_wide(_A_TEXT.sub(b"", body))):
        message = f"the body has more than {MAX_PARTS} parts or {MAX_VALUES} values"
        raise ApiError(413, message, code="request_too_large")


def _has_many_texts(body: bytes) -> bool:
    # A quote after a backslash is none, or ends a text that ends with a backslash.
    return body.count(b'"') - body.count(b'\\"') > 2 * MAX_PARTS


def _is_wide(body: bytes) -> bool:
    num_parts = body.count(b"[") + body.count(b"{") + body.count(b":")
    return num_parts > MAX_PARTS or body.count(b",") > MAX_VALUES


def _checked(fields: dict[str, Any], kind: type[Checked]) -> Checked:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _api_error(error) from error


def _drop_neutral(fields: dict[str, Any], table: dict[str, NotServed]) -> dict[str, Any]:
    """Without the fields that are not served, whose values here ask for nothing."""
    for name in table.keys() & fields.keys():
        if table[name].refuses(fields[name]):
            raise ApiError(400, f"{table[name].reason}, {table[name].way_out}", name)
    return {name: value for name, value in fields.items() if name not in table}


def _api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    param = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not a known field", param)
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param)
    message = first["msg"].removeprefix("Input ")
    return ApiError(400, f"{param} {message}, got {_SHORT.repr(first['input']):.60}", param)


def _check_together(request: CompletionRequest | ChatRequest) -> None:
    if request.stream_options and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", "stream_options")
    name, asked = request.asked_tokens
    if name != "max_tokens" and request.max_tokens not in (None, asked):
        raise ApiError(400, f"max_tokens and {name} differ, give one of them", name)
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", "top_logprobs")
