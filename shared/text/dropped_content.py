"""Detection of content that a chat template has dropped from the prompt.

A template may drop messages, such as one with an unknown role or a second system message. The model
would then answer another conversation, so such a request is an error. Two parts may be dropped,
because templates drop them on purpose and clients return them: the reasoning of an assistant
message, and its text next to tool calls.

Templates may change a value: strip it, escape it as JSON, split it. A value therefore counts as
present if the prompt contains it unchanged, or all its words. A dropped value is not detected if
another message contains the same text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from shared.text.delimiters import THINK_END

_WORD = re.compile(r"\w+")


def left_out(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], prompt: str
) -> tuple[str, str] | None:
    """Finds the first value that is missing in a prompt.

    Args:
      messages: Messages with `role`, `content` (a string, or a list of parts, of which those with
        `text` are searched) and `tool_calls` with `function`, whose `arguments` are an object or a
        string.
      tools: Tools with `function`, which has a `name`.
      prompt: Output of the template.

    Returns:
      The part of the request, "tools" or "messages", and a description of the value; None if the
      prompt contains everything.
    """
    for name in _names(tools):
        if name not in prompt:
            return "tools", f"the function {name!r:.80}"
    for number, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        for name in _names(calls):
            if name not in prompt:
                return "messages", f"the function {name!r:.80}"
        of_message = f"of message {number} ({message['role']:.40})"
        if any(not _stands(text, prompt) for text in _texts(message)):
            return "messages", f"the content {of_message}"
        for call in calls:
            if any(not _stands(text, prompt) for text in _leaves(call["function"]["arguments"])):
                name = call["function"]["name"]
                return "messages", f"an argument for {name!r:.80} {of_message}"
    return None


def _names(given: Any) -> Iterator[str]:
    return (each["function"]["name"] for each in given)


def _texts(message: dict[str, Any]) -> Iterator[str]:
    """Yields the texts of a message that must be in the prompt."""
    content = "" if message.get("tool_calls") else message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    texts = [part["text"] for part in parts if "text" in part]
    is_answer = message["role"] == "assistant"
    return (text.rpartition(THINK_END)[2] if is_answer else text for text in texts)


def _leaves(value: Any) -> Iterator[str]:
    """Yields the names and values of arguments as strings."""
    if isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from _leaves(each)
    elif isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif isinstance(value, str):
        yield value
    elif value is not None and not isinstance(value, bool):  # true and True, null and None
        yield json.dumps(value)


def _stands(text: str, prompt: str) -> bool:
    """Returns whether a prompt contains a text: unchanged, as JSON, or at least all its words."""
    text = text.strip()
    if text in prompt or json.dumps(text, ensure_ascii=False)[1:-1] in prompt:
        return True
    if json.dumps(text)[1:-1] in prompt:
        return True
    words = _WORD.findall(text)
    return bool(words) and all(word in prompt for word in words)
