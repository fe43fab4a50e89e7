"""The messages of a conversation as OpenAI's clients write them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import PlainValidator
from pydantic_core import PydanticCustomError

from shared.server.fields import Strict, Text, is_text

MAX_MESSAGES = 1 << 14


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


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_read_content)]
    name: Text | None = None
