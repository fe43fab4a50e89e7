"""Message content: a string, or parts of text and images in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from shared.server.protocol.errors import ApiError
from shared.text.tokenizer import is_text

TEXT, IMAGE = "text", "image_url"
"""Supported types of parts."""

MAX_IMAGES = 64
"""Maximum number of images of one request."""

_CACHE_HINTS = {"cache_control", "prompt_cache_breakpoint"}  # ignored: all prompts are cached

LOW = "low"
_DETAILS = (None, "auto", "high", "original", LOW)
"""Values of `detail`: `low` bounds the size of an image, the others use the model's settings."""

FOR_TEMPLATE = {"type": "image"}
"""Image part in the form that chat templates read; they only write the placeholder."""

_OTHER = {
    "video": "video is not supported; send single frames as parts of type image_url",
    "audio": "audio is not supported; send its text",
    "image": "images must be parts of type image_url",
    "file": ("files are not supported; send their text, or an image as a part of type image_url"),
}
"""Reasons for unsupported parts, by a word of the part's type."""


def check_image_count(messages: Any) -> Any:
    """Checks the number of images in unvalidated messages, and returns the messages.

    Raises:
      ApiError: The number of images exceeds `MAX_IMAGES`.
    """
    read = messages if isinstance(messages, list) else []
    contents = (message.get("content") for message in read if isinstance(message, dict))
    parts = (part for content in contents if isinstance(content, list) for part in content)
    count = sum(isinstance(part, dict) and part.get("type") == IMAGE for part in parts)
    if count > MAX_IMAGES:
        reason = f"the request has {count} images, at most {MAX_IMAGES} are supported; send fewer"
        raise ApiError(400, reason, "messages")
    return messages


def _read_texts(value: Any) -> str | list[Any]:
    return _read(value, (TEXT,))


def _read_all(value: Any) -> str | list[Any]:
    return _read(value, (TEXT, IMAGE))


def _read_answer(value: Any) -> str | list[Any] | None:
    """Parses the content of an assistant message, which may be null next to tool calls."""
    return None if value is None else _read_texts(value)


def _read(value: Any, kinds: tuple[str, ...]) -> str | list[Any]:
    if is_text(value):
        return value
    parts: list[Any] = value if isinstance(value, list) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise _fault(kinds)
    return [_read_part(part, kinds) for part in parts]


def _read_part(part: dict[str, Any], kinds: tuple[str, ...]) -> dict[str, Any]:
    """Returns a part without cache hints."""
    kind = part.get("type")
    if kind not in kinds:
        raise _other_kind(kind, kinds)
    if part.keys() - _CACHE_HINTS != {"type", kind}:
        raise _fault(kinds)
    if kind == TEXT and not is_text(part[TEXT]):
        raise PydanticCustomError("content", "has a text part whose text is not a string")
    read = {key: part[key] for key in part if key not in _CACHE_HINTS}
    return {**read, IMAGE: _read_image(part[IMAGE])} if kind == IMAGE else read


def _read_image(given: Any) -> dict[str, Any]:
    """Parses the object of an image; a bare URL is accepted."""
    image = {"url": given} if isinstance(given, str) else given
    if not isinstance(image, dict) or image.keys() - {"detail"} != {"url"}:
        raise PydanticCustomError(
            "content", "has an image part whose image_url is neither a URL nor an object with a URL"
        )
    if not is_text(image["url"]):
        raise PydanticCustomError("content", "has an image part whose url is not a string")
    if image.get("detail") not in _DETAILS:
        named = ", ".join(filter(None, _DETAILS))
        raise PydanticCustomError(
            "content", "has an image whose detail is invalid; give one of {named}", {"named": named}
        )
    return image


def _other_kind(kind: Any, kinds: tuple[str, ...]) -> PydanticCustomError:
    if kind == IMAGE:
        return PydanticCustomError(
            "content", "has an image; images are supported in messages of role user and tool"
        )
    reason = next((_OTHER[word] for word in _OTHER if isinstance(kind, str) and word in kind), None)
    if reason is None:
        return _fault(kinds)
    return PydanticCustomError(
        "content", "has a part of an unsupported type: {why}", {"why": reason}
    )


def _fault(kinds: tuple[str, ...]) -> PydanticCustomError:
    named = " or ".join(kinds)
    return PydanticCustomError(
        "content", "must be a string or a list of parts of type {kinds}", {"kinds": named}
    )


def _part_schema(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "type": {"const": kind},
            kind: value,
            **{hint: {} for hint in sorted(_CACHE_HINTS)},
        },
        "required": ["type", kind],
        "additionalProperties": False,
    }


_URL = {"type": "string", "description": "data:image/...;base64,..."}
_IMAGE = {
    "anyOf": [
        _URL,
        {
            "type": "object",
            "properties": {"url": _URL, "detail": {"enum": [*_DETAILS]}},
            "required": ["url"],
            "additionalProperties": False,
        },
    ]
}
_TEXT_PART, _IMAGE_PART = _part_schema(TEXT, {"type": "string"}), _part_schema(IMAGE, _IMAGE)


def _schema(part: dict[str, Any], *others: dict[str, Any]) -> WithJsonSchema:
    listed = {"type": "array", "items": part, "minItems": 1}
    return WithJsonSchema({"anyOf": [{"type": "string"}, listed, *others]})


Content = Annotated[
    str | list[Any],
    PlainValidator(_read_all),
    _schema({"anyOf": [_TEXT_PART, _IMAGE_PART]}),
]
AnswerContent = Annotated[
    str | list[Any] | None,
    PlainValidator(_read_answer),
    _schema(_TEXT_PART, {"type": "null"}),
]


@dataclass(frozen=True)
class ImagePart:
    """Image part of a request.

    Attributes:
      place: Path of the part in the request, for errors.
      url: Data URL with the image.
      is_low: `detail` is `low`: `shared.models.image_processor.LOW_DETAIL_PIXELS` bounds the size.
    """

    place: str
    url: str
    is_low: bool = False


def images_in(contents: Iterable[str | list[Any] | None]) -> list[ImagePart]:
    """Returns the images of message contents, in order."""
    return [
        ImagePart(
            f"messages[{number}].content[{index}].{IMAGE}",
            part[IMAGE]["url"],
            part[IMAGE].get("detail") == LOW,
        )
        for number, content in enumerate(contents)
        for index, part in enumerate(content if isinstance(content, list) else ())
        if part["type"] == IMAGE
    ]


def without_images(content: str | list[Any]) -> str | list[Any]:
    """Returns a message's content for chat templates, with placeholders for images."""
    if isinstance(content, str):
        return content
    return [FOR_TEMPLATE if part["type"] == IMAGE else part for part in content]
