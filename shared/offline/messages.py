"""Validation of Python conversations, and their conversion to the form of the HTTP routes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.offline.values import as_json, items_of
from shared.text.call_formats.json_calls import read_object
from shared.text.tokenizer import is_text

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")
FIELDS = {
    "assistant": (
        *("role", "content", "reasoning_content", "reasoning", "tool_calls", "name", "refusal"),
        *("audio", "function_call", "annotations", "parsed", "provider_specific_fields"),
    ),
    "tool": ("role", "content", "tool_call_id", "name"),
}
"""Fields of a message by role, the same as over HTTP."""

PLAIN_FIELDS = ("role", "content", "name")
"""Fields of messages of all other roles."""

_ALWAYS_NULL = ("refusal", "audio", "function_call", "provider_specific_fields")
_CLIENT_FIELDS = ("annotations", "parsed")  # added to an output by client libraries


def for_template(message: Message) -> Message:
    """Returns a message in the form that chat templates read.

    Arguments of tool calls become objects and null fields are removed. Null content, as in a
    message of tool calls alone, becomes an empty string.

    Raises:
      ValueError: The role is missing or unknown, the message is empty, or it has parts other than
        text, which a template could drop silently.
    """
    message = as_json(message, "a message")
    if (role := message.get("role")) not in ROLES:
        raise ValueError(f"a message has the role {role!r:.80}; roles are {', '.join(ROLES)}")
    content, calls = message.get("content"), message.get("tool_calls")
    _check_fields(message)
    _check_content(content)
    given = {
        name: value
        for name, value in message.items()
        if value is not None and name not in _CLIENT_FIELDS
    }
    reasoning = given.pop("reasoning", None)  # vLLM's newer name of the field
    if reasoning is not None and given.setdefault("reasoning_content", reasoning) != reasoning:
        raise ValueError("a message has reasoning_content and reasoning that differ; give only one")
    if content is None and not calls and "reasoning_content" not in given:
        raise ValueError("a message must have content or tool_calls")
    if calls and not isinstance(calls, list):
        raise ValueError(f"tool_calls must be a list of calls, got {calls!r:.60}")
    more = {"tool_calls": list(map(_read_call, calls))} if calls else {}
    return given | {"content": content or ""} | more


def _check_fields(message: Message) -> None:
    """Raises a ValueError for a field that messages of this role do not have."""
    role, fields = message["role"], FIELDS.get(message["role"], PLAIN_FIELDS)
    if unknown := [name for name in message if name not in fields and message[name] is not None]:
        raise ValueError(
            f"a message of role {role} has the unknown field {unknown[0]!r:.80}; fields are "
            f"{', '.join(fields)}"
        )
    if set_ := [name for name in _ALWAYS_NULL if message.get(name) is not None]:
        raise ValueError(f"{set_[0]} of a message is not supported; remove it")


def _check_content(content: Any) -> None:
    """Raises a ValueError unless the content is a string or a list of text parts."""
    if content is None or is_text(content):
        return
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ValueError(f"content must be a string or a list of text parts, got {content!r:.60}")
    for part in content:
        if (kind := part.get("type")) != "text":
            raise ValueError(
                f"a message has a part of type {kind!r:.80}, and LLM supports only text; send "
                "images to a server"
            )
        if not is_text(part.get("text")):
            raise ValueError(
                f"a part of type 'text' must have a string as its text, got {part!r:.60}"
            )


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Returns the tools that an output may call.

    Raises:
      ValueError: The value is not a list.
    """
    items = [] if tools is None else items_of(tools)
    if items is None:
        raise ValueError(f"tools must be a list of tools, got {tools!r:.60}")
    return [as_json(item, "a tool") for item in items]


def read_variables(given: Any) -> dict[str, Any]:
    """Returns the values of variables that a chat template defines.

    Raises:
      ValueError: The value is not a mapping.
    """
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"chat_template_kwargs must be a mapping, got {given!r:.60}")
    return as_json(given or {}, "chat_template_kwargs")


def _read_call(call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not is_text(function.get("name")):
        raise ValueError(f"a tool call must have a function with a name, got {call!r:.80}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = read_object(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(
            f"arguments of a call of {function['name']!r:.80} must be an object or a JSON string"
        )
    return {**call, "function": {**function, "arguments": arguments}}
