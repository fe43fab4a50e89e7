"""`reasoning_effort: "none"` turns reasoning off, and is never taken where it would not."""

from __future__ import annotations

from typing import Any

import pytest

from shared.server.bodies import parse
from shared.server.errors import ApiError
from shared.server.openai_types import ChatRequest
from shared.server.prompts import conversation_of
from shared.text.chat_template import ChatTemplate, TemplateFailed

ASKED = b'{"messages": [{"role": "user", "content": "hi"}], "reasoning_effort": "none"%s}'
SWITCHED = "{{ messages[0].content }}{% if not enable_thinking %}<think>\n\n</think>{% endif %}"
OTHERWISE = "{{ messages[0].content }}{% if thinking %}<think>{% else %}</think>{% endif %}"


def rendered(source: str, more: bytes = b"") -> str:
    request = parse(ASKED % more, ChatRequest)
    return ChatTemplate(source, {}).render(conversation_of(request))


def test_the_templates_own_switch_turns_it_off():
    assert rendered(SWITCHED) == "hi<think>\n\n</think>"
    assert rendered(OTHERWISE) == "hi</think>"
    assert rendered(SWITCHED, b', "chat_template_kwargs": {"enable_thinking": false}') == (
        "hi<think>\n\n</think>"
    )


def test_a_model_that_does_not_reason_is_asked_for_nothing():
    assert rendered("{{ messages[0].content }}") == "hi"


@pytest.mark.parametrize(
    ("source", "more", "reason"),
    [
        ("{{ messages[0].content }}<think>", b"", "has no switch"),
        (
            SWITCHED,
            b', "chat_template_kwargs": {"enable_thinking": true}',
            "reasoning_effort none and the argument enable_thinking",
        ),
    ],
)
def test_what_cannot_be_turned_off_is_refused(source: str, more: bytes, reason: str):
    with pytest.raises(TemplateFailed, match=reason) as refused:
        rendered(source, more)
    assert refused.value.part == "reasoning_effort"


@pytest.mark.parametrize("value", ["minimal", "low", "high", "", 0, False])
def test_another_degree_is_refused_with_the_way_out(value: Any):
    body = ASKED.replace(b'"none"', b"%s") % (repr(value).replace("'", '"').lower().encode(), b"")
    with pytest.raises(ApiError, match="chat_template_kwargs") as refused:
        parse(body, ChatRequest)
    assert refused.value.param == "reasoning_effort"
