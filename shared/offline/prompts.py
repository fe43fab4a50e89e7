"""Conversion of prompts and conversations to lists of one or several."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shared.offline.values import items_of, whole_number

Message = dict[str, Any]


def listed_prompts(prompts: Any) -> list[Any]:
    """Returns a list of prompts; a single prompt becomes a list of one.

    Raises:
      ValueError: The value is neither a prompt nor a list of prompts.
    """
    if isinstance(prompts, str):
        return [prompts]
    if (items := items_of(prompts)) is None:
        raise ValueError(not_a_prompt(prompts))
    return [items] if items and whole_number(items[0]) is not None else items


def not_a_prompt(value: Any) -> str:
    """Returns the error message for a value that is not a prompt."""
    return f"a prompt must be a string or a list of token ids, got {value!r:.60}"


def listed_chats(messages: Any) -> list[list[Message]]:
    """Returns a list of conversations; a single conversation becomes a list of one.

    Raises:
      ValueError: The value is neither a conversation nor a list of conversations.
    """
    items = items_of(messages)
    if items is None:
        raise ValueError(f"messages must be a list of messages, got {messages!r:.60}")
    return [_chat(each) for each in ([items] if items and is_message(items[0]) else items)]


def is_message(value: Any) -> bool:
    """Returns whether a value can be a message of a conversation."""
    return isinstance(value, Mapping)


def _chat(messages: Any) -> list[Message]:
    items = items_of(messages)
    if not items:
        raise ValueError(f"a conversation must be a list of messages, got {messages!r:.60}")
    for item in items:
        if not is_message(item):
            raise ValueError(
                f'a message must be a mapping as {{"role": "user", "content": "..."}}, '
                f"got {item!r:.60}"
            )
    return [dict(item) for item in items]
