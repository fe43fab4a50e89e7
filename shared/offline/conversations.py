"""Conversations as Python code gives them, made what the server makes of those of its clients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.server.call_reading import read_object

Message = dict[str, Any]
ROLES = ("system", "developer", "user", "assistant", "tool")


def for_template(message: Message) -> Message:
    """A message as chat templates read it.

    The arguments of its calls are objects, what is null is left out, and a text that is null, as of
    an answer of calls alone, is empty.

    Raises:
      ValueError: Nobody says it; it says nothing; or it has more than text, which a template may
        leave out without a word.
    """
    if (role := message.get("role")) not in ROLES:
        raise ValueError(f"a message has the role {role!r:.80}; roles are {', '.join(ROLES)}")
    content, calls = message.get("content"), message.get("tool_calls")
    kinds = [part.get("type") for part in content] if isinstance(content, list) else []
    if other := [kind for kind in kinds if kind != "text"]:
        raise ValueError(
            f"a message has a part of type {other[0]!r:.80}, and LLM takes text alone; send "
            "pictures to a server"
        )
    given = {name: value for name, value in message.items() if value is not None}
    reasoning = given.pop("reasoning", None)  # vLLM's new name of it
    if reasoning is not None and given.setdefault("reasoning_content", reasoning) != reasoning:
        raise ValueError("a message has reasoning_content and reasoning that differ; give one")
    if content is None and not calls and "reasoning_content" not in given:
        raise ValueError("a message must have content or tool_calls")
    more = {"tool_calls": list(map(_read_call, calls))} if calls else {}
    return given | {"content": content or ""} | more


def read_functions(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The functions that an answer may call.

    Raises:
      ValueError: A tool is none.
    """
    for tool in tools:
        match tool:
            case {"function": {"name": str()}}:
                pass
            case _:
                raise ValueError(f"a tool must have a function with a name, got {tool!r:.80}")
    return [tool["function"] for tool in tools]


def _read_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        arguments = read_object(arguments)
    if not isinstance(arguments, dict):
        raise ValueError(
            f"arguments of a call of {function['name']!r:.80} must be an object or its JSON text"
        )
    return {**call, "function": {**function, "arguments": arguments}}
