"""What of a conversation its template has left out of the prompt.

A template is a program and may leave out what a client has written: a message of a role that it
does not know, a system message that is not the first. The model would then answer another
conversation than the client's, so such a request is refused. Two things may go, as families leave
them out on purpose and answers of this server come back with them: the reasoning of an answer, and
what it says beside its calls.

Templates may write a value otherwise: stripped, escaped as JSON, cut into parts. So a value stands
in a prompt where it is found as it is, or else where all its words are. What is found may have been
written by another message: values that are left out are not refused then.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from shared.text.marks import THINK_END

_WORD = re.compile(r"\w+")


def left_out(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]], prompt: str
) -> tuple[str, str] | None:
    """The first thing that is not in a prompt.

    Args:
      messages: With `role`, `content` that is a text or a list of parts, of which those with
        `text` are looked for, and `tool_calls` with `function`, whose `arguments` are an object or
        a text.
      tools: With `function`, which has a `name`.
      prompt: What the template has written.

    Returns:
      Which part of the request has it, "tools" or "messages", and what it is; None where all is in
      the prompt.
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
    """The texts of a message's content that may not be left out."""
    content = "" if message.get("tool_calls") else message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    texts = [part["text"] for part in parts if "text" in part]
    is_answer = message["role"] == "assistant"
    return (text.rpartition(THINK_END)[2] if is_answer else text for text in texts)


def _leaves(value: Any) -> Iterator[str]:
    """The names and values of arguments, as texts."""
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
    """Whether a prompt has a text: as it is, as JSON, or at least all its words."""
    text = text.strip()
    if text in prompt or json.dumps(text, ensure_ascii=False)[1:-1] in prompt:
        return True
    if json.dumps(text)[1:-1] in prompt:
        return True
    words = _WORD.findall(text)
    return bool(words) and all(word in prompt for word in words)
