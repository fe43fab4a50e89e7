"""Conversations as agents send them; each value contains a unique word."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from random import Random
from typing import Any

from transformers.utils.chat_template_utils import (
    _compile_jinja_template as compiled,  # pyright: ignore[reportPrivateUsage]
)

from shared.text.chat_template import Conversation, TemplateError
from shared.text.tool_messages import FORMS

WORD = re.compile(r"w\d+w")
AROUND = (
    ("say", "it"),
    ('"so"', "\\n"),
    ("", "\n"),
    ("  ", ""),
    ("<b>", "&amp;"),
    ("é", "漢😀"),
    ("{", "}"),
)
"""Texts before and after a word."""


def drawn(random: Random) -> Conversation:
    """A conversation like those of agents: tools, calls, results, reasoning, blank contents."""
    numbers = iter(range(10**6))

    def text() -> str:
        before, after = random.choice(AROUND)
        return f"{before}w{next(numbers)}w{after}"

    def value(depth: int) -> Any:
        kinds = [text, lambda: next(numbers) + 0.5, lambda: random.choice([True, None, "", []])]
        if depth:
            kinds.append(lambda: {text(): value(depth - 1)})
            kinds.append(lambda: [value(depth - 1) for _ in range(2)])
        return random.choice(kinds)()

    def call() -> dict[str, Any]:
        return {"type": "function", "function": {"name": name(), "arguments": {text(): value(2)}}}

    def name() -> str:
        return f"w{next(numbers)}w"

    def turn() -> Iterator[dict[str, Any]]:
        yield {"role": "user", "content": text()}
        if random.random() < 0.5:
            calls = [call() for _ in range(random.choice([1, 1, 2]))]
            said = random.choice([None, "", " ", text()])
            yield {"role": "assistant", "content": said, "tool_calls": calls}
            yield from ({"role": "tool", "content": text()} for _ in calls)
        thought = f"<think>w{next(numbers)}w</think>" if random.random() < 0.3 else ""
        yield {"role": "assistant", "content": thought + text()}

    messages = [{"role": "system", "content": text()}] if random.random() < 0.5 else []
    messages += [message for _ in range(random.choice([0, 1, 2])) for message in turn()]
    messages.append({"role": random.choice(["user"] * 4 + ["system"]), "content": text()})
    tools = [
        {"type": "function", "function": {"name": name(), "parameters": {"type": "object"}}}
        for _ in range(random.choice([0, 0, 2]))
    ]
    return Conversation(messages, tools)


def words_said(conversation: Conversation) -> set[str]:
    """Returns the words that the prompt must contain.

    Reasoning of answers may be dropped, and their text next to tool calls.
    """
    messages = [
        {
            **each,
            "content": "" if "tool_calls" in each else each["content"].rpartition("</think>")[2],
        }
        for each in conversation.messages
    ]
    return set(WORD.findall(repr((messages, conversation.tools))))


def count_refused(
    render: Callable[[Conversation], str], oracle: Any, chat_template: str | None = None
) -> Counter[bool]:
    """Counts the rejected and accepted conversations of a hundred; see `check_prompt`."""
    drawn_ones = (drawn(Random(seed)) for seed in range(100))
    return Counter(check_prompt(each, render, oracle, chat_template) for each in drawn_ones)


def check_prompt(
    conversation: Conversation,
    render: Callable[[Conversation], str],
    oracle: Any,
    chat_template: str | None = None,
) -> bool:
    """Checks that a prompt equals one of transformers', and is rejected if all drop content.

    Args:
      render: Renders a prompt; raises `TemplateError` for an unsupported conversation.
      oracle: A tokenizer of transformers.
      chat_template: Template for the oracle; None: its own.

    Returns:
      Whether it was rejected.
    """
    try:
        prompt, why = render(conversation), ""
    except TemplateError as refused:
        prompt, why = None, str(refused)
    words = words_said(conversation)
    whole = [
        text
        for text in _prompts(conversation, oracle, chat_template)
        if words <= set(WORD.findall(text))
    ]
    assert bool(why) == (not whole), why
    assert why or prompt in whole
    return bool(why)


def _prompts(conversation: Conversation, oracle: Any, chat_template: str | None) -> Iterator[str]:
    """Yields the oracle's prompts, one for each form in which calls may be rendered."""
    has_calls = any("tool_calls" in message for message in conversation.messages)
    source = chat_template or oracle.get_chat_template(tools=conversation.tools or None)
    # `apply_chat_template` removes a content of None, which some templates require next to calls.
    template = compiled(source)
    split = [replace(form, is_split=True) for form in FORMS]
    for form in [*FORMS, *split] if has_calls else FORMS[:1]:
        try:
            yield template.render(
                messages=form.of(conversation.messages),
                tools=conversation.tools or None,
                add_generation_prompt=True,
                **oracle.special_tokens_map,
            )
        except Exception:  # a template is a program
            continue
