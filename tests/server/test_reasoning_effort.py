"""Reasoning advice fields: passed to chat templates that read them, otherwise ignored."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shared.server.api.request_parsing import parse
from shared.server.protocol.errors import ApiError
from shared.server.protocol.openai_types import ChatRequest
from shared.text.chat_template import ChatTemplate, TemplateError

SWITCHED = "{{ messages[0].content }}{% if not enable_thinking %}<think>\n\n</think>{% endif %}"
OTHERWISE = "{{ messages[0].content }}{% if thinking %}<think>{% else %}</think>{% endif %}"
PLAIN = "{{ messages[0].content }}"
THINKS = "{{ messages[0].content }}<think>"
EFFORT = "{{ messages[0].content }}{{ reasoning_effort or 'default' }}"
WORDY = "{{ messages[0].content }}{{ verbosity }}"


def asked(**fields: Any) -> ChatRequest:
    messages = [{"role": "user", "content": "hi"}]
    return parse(json.dumps({"messages": messages, **fields}).encode(), ChatRequest)


def rendered(source: str, **fields: Any) -> str:
    return ChatTemplate(source, {}).render(asked(**fields).to_chat().conversation)


OFF: dict[str, Any] = {"type": "disabled"}


@pytest.mark.parametrize(
    ("source", "fields", "want", "ignored"),
    [
        (SWITCHED, {"reasoning_effort": "none"}, "hi<think>\n\n</think>", []),
        (OTHERWISE, {"reasoning_effort": "none"}, "hi</think>", []),
        (SWITCHED, {"enable_thinking": True}, "hi", []),
        (SWITCHED, {"enable_thinking": False}, "hi<think>\n\n</think>", []),
        (SWITCHED, {"thinking": OFF}, "hi<think>\n\n</think>", []),
        (OTHERWISE, {"thinking": True}, "hi<think>", []),
        (OTHERWISE, {"enable_thinking": True}, "hi<think>", []),
        (OTHERWISE, {"thinking": {"type": "enabled"}}, "hi<think>", []),
        (
            OTHERWISE,
            {"thinking": {"type": "enabled", "budget_tokens": 99}},
            "hi<think>",
            ["thinking.budget_tokens"],
        ),
        (OTHERWISE, {"thinking": {"type": "adaptive"}}, "hi</think>", ["thinking"]),
        (EFFORT, {"reasoning_effort": "high"}, "hihigh", []),
        (EFFORT, {"reasoning_effort": "none"}, "hinone", []),
        (EFFORT, {}, "hidefault", []),
        (WORDY, {"verbosity": "low"}, "hilow", []),
        (PLAIN, {"reasoning_effort": "none"}, "hi", []),  # no reasoning to disable
        (PLAIN, {"reasoning_effort": "low"}, "hi", ["reasoning_effort"]),
        (PLAIN, {"enable_thinking": False, "thinking": OFF}, "hi", ["enable_thinking", "thinking"]),
        (THINKS, {"reasoning_effort": "none"}, "hi<think>", ["reasoning_effort"]),
        (
            SWITCHED,
            {"reasoning_effort": "high", "enable_thinking": True},
            "hi",
            ["reasoning_effort"],
        ),
        (
            SWITCHED,
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": False}},
            "hi<think>\n\n</think>",
            [],
        ),
    ],
)
def test_reasoning_advice_reaches_template_variables(source, fields, want, ignored):
    request = asked(**fields)
    assert rendered(source, **fields) == want
    assert ChatTemplate(source, {}).unread(request.advice) == ignored


@pytest.mark.parametrize(
    ("fields", "part", "reason"),
    [
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            "reasoning_effort",
            "reasoning_effort none and the argument enable_thinking of the chat template differ",
        ),
        (
            {"reasoning_effort": "none", "enable_thinking": True},
            "enable_thinking",
            "differ; give one of them",
        ),
        (
            {"thinking": {"type": "enabled"}, "enable_thinking": False},
            "thinking",
            "differ; give one of them",
        ),
    ],
)
def test_contradicting_reasoning_advice_raises(fields, part, reason):
    with pytest.raises(TemplateError, match=reason) as refused:
        rendered(SWITCHED, **fields)
    assert refused.value.part == part


@pytest.mark.parametrize("fields", [{"reasoning_effort": value} for value in ("", 0, False, [])])
def test_reasoning_effort_rejects_other_types(fields):
    with pytest.raises(ApiError) as refused:
        asked(**fields)
    assert refused.value.param == "reasoning_effort"
