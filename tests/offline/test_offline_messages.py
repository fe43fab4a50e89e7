"""Messages, tools and template variables in Python, read like those of HTTP requests."""

import numpy as np
import pytest

from shared.offline.messages import (
    FIELDS,
    PLAIN_FIELDS,
    ROLES,
    for_template,
    read_tools,
    read_variables,
)
from shared.server.protocol.chat_messages import AssistantMessage, TextMessage, ToolMessage
from shared.server.protocol.openai_types import ChatPrompt
from shared.text.tool_messages import read_functions

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
def test_for_template_equals_server_messages(message):
    over_http = ChatPrompt.model_validate({"messages": [message]}).to_chat().conversation
    assert [for_template(message)] == over_http.messages


def test_for_template_preserves_object_arguments():
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
            "a message has reasoning_content and reasoning that differ; give only one",
        ),
        ({"role": "user", "content": 5}, "content must be a string or a list of text parts, got 5"),
        (
            {"role": "user", "content": [{"type": "text"}]},
            "a part of type 'text' must have a string",
        ),
        ({"role": "user", "content": "a", "contnet": "b"}, "has the unknown field 'contnet'"),
        ({"role": "assistant", "content": "a", "refusal": "b"}, "refusal of a message is not sup"),
        ({"role": "assistant", "tool_calls": "a"}, "tool_calls must be a list of calls, got 'a'"),
        ({"role": "assistant", "tool_calls": [{}]}, "a tool call must have a function with a name"),
        ({"role": "user", "content": {"a"}}, "a message has a value of type set"),
    ],
)
def test_for_template_rejects_invalid_message(message, sentence):
    with pytest.raises(ValueError, match=sentence):
        for_template(message)


def test_read_functions_rejects_tool_without_named_function():
    for tool in ({}, {"function": {}}, "weather"):
        with pytest.raises(ValueError, match="a tool must have a function with a name"):
            read_functions([tool])


def test_message_fields_equal_server_models():
    models = {"assistant": AssistantMessage, "tool": ToolMessage}
    for role in ROLES:
        expected = models.get(role, TextMessage).model_fields.keys()
        assert set(FIELDS.get(role, PLAIN_FIELDS)) == set(expected)


def test_parts_and_tools_accept_any_iterable():
    parts = ({"type": "text", "text": "a"},)
    assert for_template({"role": "user", "content": parts})["content"] == list(parts)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"required": ("a",)}}}
    expected = [{"type": "function", "function": {"name": "f", "parameters": {"required": ["a"]}}}]
    assert read_tools(iter([tool])) == expected == read_tools((tool,))
    assert read_tools(None) == []
    with pytest.raises(ValueError, match="tools must be a list of tools, got {'type'"):
        read_tools(tool)


def test_read_variables_requires_mapping():
    assert read_variables(None) == read_variables({}) == {}
    assert read_variables({"enable_thinking": np.bool_(False)}) == {"enable_thinking": False}
    for wrong in (5, [("a", 1)], "a", {5: 1}):
        with pytest.raises(ValueError, match="^chat_template_kwargs "):
            read_variables(wrong)
