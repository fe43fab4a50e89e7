"""Parser of request bodies: JSON to a validated request, or an error that names the field."""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Callable
from typing import Any, TypeVar

from pydantic import ValidationError

from shared.options.unsupported_fields import ENDPOINTS, UNSUPPORTED_FIELDS
from shared.server.protocol.errors import ApiError
from shared.server.protocol.fields import Strict
from shared.server.protocol.generation_request import GenerationRequest
from shared.server.protocol.messages_types import MessagesRequest, TokenCountRequest
from shared.server.protocol.openai_types import ChatRequest, CompletionRequest
from shared.server.protocol.responses_types import ResponsesRequest
from shared.server.protocol.structured import AllowedChoice

MAX_PARTS = 1 << 17  # lists, objects, fields or strings of a body
MAX_VALUES = 1 << 20  # of a body, for example the token ids of a prompt
AT_ONCE = 1 << 20  # bytes that are scanned without releasing the interpreter

_A_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_SUBJECT = re.compile(r"^(Input|Value) |( after validation)")
"""Words of pydantic's messages that are removed."""
_SHORT = reprlib.Repr()  # abbreviates values without visiting all of them
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 80

_UNSUPPORTED = {
    endpoint: [field for field in UNSUPPORTED_FIELDS if endpoint in field.endpoints]
    for endpoint in ENDPOINTS
}

Body = TypeVar("Body", CompletionRequest, ChatRequest)
Messages = TypeVar("Messages", TokenCountRequest, MessagesRequest)
Checked = TypeVar("Checked", bound=Strict)


def parse(body: bytes, kind: type[Body]) -> Body:
    """Parses the body of a request.

    Raises:
      ApiError: Status 400; names the invalid field.
    """
    fields = _read_object(body)
    advice = _take_unsupported(fields, kind.ENDPOINT)
    request = _checked(fields, kind).with_advice(advice)
    _check_together(request)
    return request


def parse_request(body: bytes, kind: type[Body]) -> GenerationRequest:
    """Parses the body of a request to the form that all APIs share; raises as `parse`."""
    return parse(body, kind).to_generation()


def parse_messages(body: bytes, kind: type[Messages]) -> Messages:
    """Parses a body of Anthropic's API; raises as `parse`."""
    fields = _read_object(body)
    advice = _take_unsupported(fields, kind.ENDPOINT)
    return _checked(fields, kind).with_advice(advice)


def parse_responses(body: bytes) -> tuple[ResponsesRequest, list[Any]]:
    """Parses a body of the Responses API; raises as `parse`.

    Returns:
      The request, and the items of its input as they were sent.
    """
    fields = _read_object(body)
    advice = _take_unsupported(fields, ResponsesRequest.ENDPOINT)
    request = _checked(fields, ResponsesRequest).with_advice(advice)
    if request.stream_options and not request.stream:
        raise ApiError(400, "stream_options requires stream: true", "stream_options")
    given = fields["input"]
    return request, given if isinstance(given, list) else [{"role": "user", "content": given}]


def parse_plain(body: bytes, kind: type[Checked]) -> Checked:
    """Parses a body that has no fields of other APIs.

    Raises:
      ApiError: Status 400; names the invalid field.
    """
    return _checked(_read_object(body), kind)


def parse_with(body: bytes, kind_of: Callable[[dict[str, Any]], type[Checked]]) -> Checked:
    """Parses a body whose model depends on its fields; raises the errors of `parse_plain`."""
    fields = _read_object(body)
    return _checked(fields, kind_of(fields))


def _read_object(body: bytes) -> dict[str, Any]:
    _check_width(body)
    try:
        fields = json.loads(body, object_hook=_let_others_run)
    except (ValueError, RecursionError) as error:
        # A plain ValueError is Python's limit of digits; its text explains how to raise the limit.
        reason = "a number has too many digits" if type(error) is ValueError else error
        raise ApiError(400, f"the body is not valid JSON: {reason}") from error
    if not isinstance(fields, dict):
        raise ApiError(400, f"the body must be a JSON object, got a {type(fields).__name__}")
    return fields


def _let_others_run(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns an object unchanged; called for each object of a body to release the interpreter.

    A thread can release the interpreter between two instructions of Python code. The C parser
    without this hook would hold it until the whole body is parsed.
    """
    return fields


def _check_width(body: bytes) -> None:
    """Raises an error for a body with too many parts, which would block other requests."""
    # Strings may contain brackets and commas, so they are removed before an exact count.
    if _has_many_texts(body) or (_is_wide(body) and _is_wide(_A_TEXT.sub(b"", body))):
        message = f"the body has more than {MAX_PARTS} parts or {MAX_VALUES} values"
        raise ApiError(413, message, code="request_too_large")


def _has_many_texts(body: bytes) -> bool:
    # A quote after a backslash is escaped, or ends a string that ends with a backslash.
    num_quotes = _count(body, b'"')
    return num_quotes > 2 * MAX_PARTS and num_quotes - _count(body, b'\\"') > 2 * MAX_PARTS


def _is_wide(body: bytes) -> bool:
    num_parts = sum(_count(body, sign) for sign in (b"[", b"{", b":"))
    return num_parts > MAX_PARTS or _count(body, b",") > MAX_VALUES


def _count(body: bytes, sign: bytes) -> int:
    """Counts a byte sequence in a body, across the borders of its chunks."""
    longer = AT_ONCE + len(sign) - 1
    return sum(body.count(sign, at, at + longer) for at in range(0, len(body), AT_ONCE))


def _checked(fields: dict[str, Any], kind: type[Checked]) -> Checked:
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _api_error(error) from error


def _take_unsupported(fields: dict[str, Any], endpoint: str) -> tuple[str, ...]:
    """Removes unsupported fields from a body; returns the names of ignored fields.

    Raises:
      ApiError: The value of an unsupported field would change the output.
    """
    used = [field for field in _UNSUPPORTED[endpoint] if field.take_from(fields)]
    for field in used:
        if not field.is_advice:
            raise ApiError(400, f"{field.reason}; {field.hint}", field.name, field.code)
    return tuple(field.name for field in used if not field.is_of_template)


def _api_error(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False)[0]
    param, message = _path(first["loc"]), _SUBJECT.sub("", first["msg"])
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{param} is not a known field", param)
    if first["type"] == "missing":
        return ApiError(400, f"{param} is missing", param)
    if message.startswith("has the type "):  # which is the reason
        return ApiError(400, f"{param} {message}", param)
    if isinstance(first["input"], str):  # pydantic calls the elements of a string items
        message = message.replace(" item", " character")
    return ApiError(400, f"{param} {message}, got {_SHORT.repr(first['input']):.60}", param)


def _path(steps: tuple[int | str, ...]) -> str:
    """Returns the path of a field without pydantic's tags of message types."""
    shown = [step for step in steps if isinstance(step, int) or not step.startswith("<")]
    parts = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in shown)
    return "".join(parts).lstrip(".")


def _check_together(request: CompletionRequest | ChatRequest) -> None:
    if request.stream_options and not request.stream:
        raise ApiError(400, "stream_options requires stream: true", "stream_options")
    _check_form(request)
    if request.max_tokens == 0 and not request.returns_prompt_logprobs:
        message = "max_tokens 0 requests no output"
        raise ApiError(
            400,
            f"{message}; set echo or prompt_logprobs, or max_tokens of at least 1",
            "max_tokens",
        )
    if isinstance(request, ChatRequest) and request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs requires logprobs: true", "top_logprobs")


def _check_form(request: CompletionRequest | ChatRequest) -> None:
    try:
        names = list(request.forms)
    except ValueError as error:
        raise ApiError(400, f"structured_outputs {error}", "structured_outputs") from error
    if len(names) > 1:
        raise ApiError(
            400, f"{' and '.join(names)} are mutually exclusive; send one of them", names[1]
        )
    if isinstance(request, ChatRequest):
        _check_choice(request)


def _check_choice(request: ChatRequest) -> None:
    names = {tool.function.name for tool in request.tools or ()}
    unknown = (request.chosen_names or set()) - names
    if unknown or (request.requires_tool_call and not names):
        message = "tool_choice requests a call of a function that is not in tools"
        if isinstance(request.tool_choice, AllowedChoice):
            message = f"tool_choice allows {min(unknown)!r:.80}, which is not in tools"
        raise ApiError(400, message, "tool_choice")
