"""The messages of a conversation as OpenAI's clients write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from shared.server.call_reading import read_object
from shared.server.fields import Nested, Strict, Text, check_depth, is_text

MAX_MESSAGES = 1 << 14
MAX_TOOLS = 128
MAX_CALLS = 1024  # of one message
MAX_ID_LENGTH = 256


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


def _read_answer(value: Any) -> str | None:
    """The content of an answer, which may have none beside its calls."""
    return None if value is None else _read_content(value)


def _read_arguments(value: Any) -> dict[str, Any]:
    """The arguments of a call, which OpenAI writes as JSON text; templates read the object."""
    arguments = read_object(value or "{}") if is_text(value) else None
    if arguments is None:
        raise PydanticCustomError("arguments", "must be the JSON text of an object")
    return check_depth(arguments)


FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
_PART = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT = [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]
Content = Annotated[str, PlainValidator(_read_content), WithJsonSchema({"anyOf": _CONTENT})]
AnswerContent = Annotated[
    str | None,
    PlainValidator(_read_answer),
    WithJsonSchema({"anyOf": [*_CONTENT, {"type": "null"}]}),
]
Arguments = Annotated[
    dict[str, Any],
    PlainValidator(_read_arguments),
    WithJsonSchema({"type": "string", "description": "JSON text of an object"}),
]


class PlainMessage(Strict):
    """A message of anybody but the assistant and its tools."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: Text | None = None


class CalledFunction(Strict):
    """What was called, and with what."""

    name: FunctionName
    arguments: Arguments


class MadeCall(Strict):
    """A call of an earlier answer."""

    id: Annotated[Text, Field(max_length=MAX_ID_LENGTH)]
    type: Literal["function"] = "function"
    function: CalledFunction
    # Of one that a client has put together of parts; templates do not read it.
    index: Annotated[int | None, Field(ge=0, le=MAX_CALLS, exclude=True)] = None


class AssistantMessage(Strict):
    """An earlier answer, as it was given; clients send it back as a whole."""

    role: Literal["assistant"]
    content: AnswerContent = None
    reasoning_content: Text | None = None
    tool_calls: Annotated[list[MadeCall], Field(max_length=MAX_CALLS)] | None = None
    name: Text | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any] | None, Field(max_length=0, exclude=True)] = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls:
            raise PydanticCustomError("empty", "must have content or tool_calls")
        return self


class ToolMessage(Strict):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[Text, Field(max_length=MAX_ID_LENGTH)]
    name: Text | None = None


def _kind(value: Any) -> str:
    """Which class reads a message; that of plain ones names a role that nobody has."""
    role = value.get("role") if isinstance(value, dict) else None
    return f"<{role}>" if role in ("assistant", "tool") else "<plain>"


Message = Annotated[
    Annotated[PlainMessage, Tag("<plain>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    Discriminator(_kind),
]


class Function(Strict):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: Nested | None = None
    strict: bool | None = None

    def arguments_schema(self, is_forced: bool) -> dict[str, Any] | None:
        """What the arguments of a call are held to; None: they are any object.

        Args:
          is_forced: A call must be made, and then every function is held to its schema.
        """
        if not (self.strict or is_forced):
            return None
        return self.parameters or {"properties": {}, "additionalProperties": False}


class Tool(Strict):
    """A tool; functions are all there are."""

    type: Literal["function"]
    function: Function


def for_template(message: PlainMessage | AssistantMessage | ToolMessage) -> dict[str, Any]:
    """A message as chat templates read it."""
    return {"content": "", **message.model_dump(exclude_none=True)}
