"""Chat messages in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Discriminator,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    Tag,
    WithJsonSchema,
    model_serializer,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from shared.server.protocol.content import AnswerContent, Content, without_images
from shared.server.protocol.fields import Nested, Strict, Text, check_depth
from shared.text.call_formats.json_calls import read_object
from shared.text.parsing.json_object import JsonObject
from shared.text.tokenizer import is_text
from shared.text.tool_call_grammar import arguments_schema

MAX_MESSAGES = 1 << 14
MAX_TOOLS = 128
MAX_CALLS = 1024  # per message
MAX_ID_LENGTH = 256


def read_arguments(value: Any) -> dict[str, Any]:
    """Parses the arguments of a call, which are JSON text; templates read the object."""
    arguments = read_object(value or "{}") if is_text(value) else None
    if arguments is None and is_text(value):
        arguments = _read_cut(value)
    if not isinstance(arguments, dict):
        raise PydanticCustomError("arguments", "must be the JSON text of an object")
    return check_depth(arguments)


def _read_cut(text: str) -> Any:
    """Reads the arguments of a tool call that was truncated by max_tokens."""
    beginning = JsonObject()
    if not all(map(beginning.take, text.lstrip())) or beginning.ended:
        return None
    try:
        return from_json(text, allow_partial="trailing-strings", allow_inf_nan=False)
    except ValueError:
        return None


MAX_NAME_LENGTH = 64
FunctionName = Annotated[str, Field(pattern=rf"^[a-zA-Z0-9_.-]{{1,{MAX_NAME_LENGTH}}}$")]
Arguments = Annotated[
    dict[str, Any],
    PlainValidator(read_arguments),
    WithJsonSchema({"type": "string", "description": "JSON text of an object"}),
]


Client = Annotated[Any, Field(exclude=True)]
"""Fields that clients add to assistant messages; templates do not read them."""


class TemplateInput(Strict):
    """Input of chat templates, with the keys in the order of the client."""

    _keys: tuple[str, ...] = PrivateAttr(())

    @model_validator(mode="wrap")
    @classmethod
    def _keep_order(cls, value: Any, read: ModelWrapValidatorHandler[Self]) -> Self:
        made = read(value)
        made._keys = tuple(value)
        return made

    @model_serializer(mode="wrap")
    def _in_order(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written = write(self)
        return {key: written[key] for key in self._keys if key in written} | written


class TextMessage(TemplateInput):
    """Message of the system, the developer or the user."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: Text | None = None


class CalledFunction(TemplateInput):
    """Name and arguments of a tool call."""

    name: FunctionName
    arguments: Arguments
    parsed_arguments: Client = None


class MadeCall(TemplateInput):
    """Tool call of an earlier assistant message."""

    id: Annotated[Text, Field(max_length=MAX_ID_LENGTH)]
    type: Literal["function"] = "function"
    function: CalledFunction
    # Sent by clients that assembled the call from a stream; templates do not read it.
    index: Annotated[int | None, Field(ge=0, le=MAX_CALLS, exclude=True)] = None


class AssistantMessage(TemplateInput):
    """Earlier assistant message.

    Clients send it back whole, some with extra fields (`parsed`, `annotations`), which are ignored.
    """

    role: Literal["assistant"]
    content: AnswerContent = None
    reasoning_content: Text | None = None
    reasoning: Annotated[Text | None, Field(exclude=True)] = None  # vLLM's new name
    tool_calls: Annotated[list[MadeCall], Field(max_length=MAX_CALLS)] | None = None
    name: Text | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any] | None, Field(max_length=0, exclude=True)] = None
    parsed: Client = None
    provider_specific_fields: None = None

    @model_validator(mode="after")
    def _is_sound(self) -> AssistantMessage:
        names = self.reasoning_content, self.reasoning
        if None not in names and len(set(names)) > 1:
            raise PydanticCustomError(
                "reasoning", "has different reasoning_content and reasoning; send one of them"
            )
        if self.content is None and not self.tool_calls and names == (None, None):
            raise PydanticCustomError("empty", "must have content or tool_calls")
        return self


class ToolMessage(TemplateInput):
    """Result of a tool."""

    role: Literal["tool"]
    content: Content
    tool_call_id: Annotated[Text, Field(max_length=MAX_ID_LENGTH)]
    name: Text | None = None


def _kind(value: Any) -> str:
    """Returns the class that parses a message."""
    role = value.get("role") if isinstance(value, dict) else None
    return f"<{role}>" if role in ("assistant", "tool") else "<plain>"


Message = Annotated[
    Annotated[TextMessage, Tag("<plain>")]
    | Annotated[AssistantMessage, Tag("<assistant>")]
    | Annotated[ToolMessage, Tag("<tool>")],
    Discriminator(_kind),
]


class Function(TemplateInput):
    """A function that the model may call."""

    name: FunctionName
    description: Text | None = None
    parameters: Nested | None = None
    strict: bool | None = None

    def arguments_schema(self, is_forced: bool) -> dict[str, Any] | None:
        """Returns the schema of the arguments of a call; None: any object.

        Args:
          is_forced: A call is required, so the schema of every function is enforced.
        """
        if not (self.strict or is_forced):
            return None
        return arguments_schema(self.parameters)


class Tool(TemplateInput):
    """Tool; only functions are supported."""

    type: Literal["function"]
    function: Function


def for_template(message: TextMessage | AssistantMessage | ToolMessage) -> dict[str, Any]:
    """Returns a message in the form that chat templates read.

    Null fields are omitted, same as in transformers, except `content`: many templates print it
    unchecked, and a message with only calls or reasoning has no content.
    """
    content = without_images(message.content or "")
    fields = message.model_dump(exclude_none=True) | {"content": content}
    if isinstance(message, AssistantMessage) and message.reasoning is not None:
        fields["reasoning_content"] = message.reasoning
    return fields
