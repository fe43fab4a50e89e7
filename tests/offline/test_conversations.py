"""Conversations in Python are read as those that come over HTTP."""

import pytest

from shared.offline.conversations import for_template, read_functions
from shared.server.openai_types import ChatPrompt
from shared.server.prompts import conversation_of

FUNCTION = {"name": "weather", "arguments": '{"city": "Rome"}'}
CALL = {"id": "1", "type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "tool_calls": [CALL], "name": None},
        {"role": "assistant", "content": "12", "reasoning": "why"},
        {"role": "assistant", "content": None, "reasoning_content": "why"},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
        {"role": "user", "content": [{"type": "text", "text": "a"}]},
    ],
)
def test_a_template_is_given_what_the_server_gives_it(message):
    over_http = conversation_of(ChatPrompt.model_validate({"messages": [message]}))
    assert [for_template(message)] == over_http.messages


def test_arguments_of_a_call_may_be_an_object():
    call = {**CALL, "function": {**FUNCTION, "arguments": {"city": "Rome"}}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert for_template(message)["tool_calls"] == [call]


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        ({"role": "bot", "content": "a"}, "a message has the role 'bot'; roles are system, "),
        ({"role": "assistant", "content": None}, "a message must have content or tool_calls"),
        (
            {"role": "assistant", "content": "a", "reasoning": "b", "reasoning_content": "c"},
            "a message has reasoning_content and reasoning that differ; give one",
        ),
    ],
)
def test_what_nobody_says_is_refused_in_a_sentence(message, sentence):
    with pytest.raises(ValueError, match=sentence):
        for_template(message)


def test_a_tool_is_a_function_with_a_name():
    for tool in ({}, {"function": {}}, "weather"):
        with pytest.raises(ValueError, match="a tool must have a function with a name"):
            read_functions([tool])
