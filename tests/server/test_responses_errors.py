"""OpenAI's Responses API: errors, with the openai package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.api_conversations import RESPONSES_TOOL, serving_apis
from tests.support.http_fixtures import MAX_OPEN, Server

RESPONSES = "/v1/responses"
TOOLS: Any = [RESPONSES_TOOL]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with serving_apis(tmp_path_factory.mktemp("model"), "--store-responses") as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def items(*given: Any) -> Any:
    return {"input": [*given]}


def user(*parts: Any) -> Any:
    return items({"role": "user", "content": [*parts]})


DEEP: Any = {}
for _ in range(70):
    DEEP = {"a": DEEP}
OUTPUT: Any = {"type": "function_call_output"}
CUSTOM: Any = {"type": "custom", "name": "f"}
GRAMMAR: Any = {"type": "grammar", "syntax": "lark", "definition": "start: x"}
CALLED: Any = {"type": "custom_tool_call", "call_id": "a", "name": "f", "input": "b"}
BAD: list[tuple[str, Any]] = [
    ("input", {"input": None}),
    ("input", {"input": ""}),
    ("input", {"input": []}),
    ("input", {"input": 5}),
    ("input", {"input": {"role": "user"}}),
    ("input", {"input": "\ud800"}),
    ("input[0]", {"input": ["a"]}),
    ("input[0]", items({"type": "web_search_call", "id": "a"})),
    ("input[0]", items({"type": "item_reference", "id": "a"})),
    ("input[0]", items({"type": 5})),
    ("input[0].role", items({"role": "tool", "content": "a"})),
    ("input[0].role", items({"content": "a"})),
    ("input[0].content", items({"role": "user"})),
    ("input[0].content", items({"role": "user", "content": 5})),
    ("input[0].name", items({"role": "user", "content": "a", "name": "b"})),
    ("input[0].status", items({"role": "user", "content": "a", "status": "done"})),
    ("input[0].content[0]", user("a")),
    ("input[0].content[0]", user({"type": "input_file", "file_id": "a"})),
    ("input[0].content[0]", user({"type": "input_audio"})),
    ("input[0].content[0].text", user({"type": "input_text"})),
    ("input[0].content[0].text", user({"type": "input_text", "text": None})),
    ("input[0].content[0].more", user({"type": "input_text", "text": "a", "more": 1})),
    ("input[0].content[0].image_url", user({"type": "input_image"})),
    (
        "input[0].content[0].file_id",
        user({"type": "input_image", "image_url": "a", "file_id": "b"}),
    ),
    ("input[0].content[0].detail", user({"type": "input_image", "image_url": "a", "detail": "x"})),
    ("input[0].content[0].image_url", user({"type": "input_image", "image_url": "data:a"})),
    ("input[0].call_id", items({"type": "function_call", "name": "f", "arguments": "{}"})),
    (
        "input[0].name",
        items({"type": "function_call", "call_id": "a", "name": "a b", "arguments": "{}"}),
    ),
    (
        "input[0].arguments",
        items({"type": "function_call", "call_id": "a", "name": "f", "arguments": "[1]"}),
    ),
    (
        "input[0].arguments",
        items({"type": "function_call", "call_id": "a", "name": "f", "arguments": {}}),
    ),
    ("input[0].output", items({**OUTPUT, "call_id": "a"})),
    ("input[0].call_id", items({**OUTPUT, "output": "a"})),
    ("input[0].call_id", items({**OUTPUT, "call_id": "a", "output": "b"})),
    ("input[0].output[0]", items({**OUTPUT, "call_id": "a", "output": [{"type": "x"}]})),
    ("input[0].summary", items({"type": "reasoning", "summary": "a"})),
    (
        "input[0].content[0].text",
        items({"type": "reasoning", "content": [{"type": "reasoning_text"}]}),
    ),
    ("input[0].encrypted_content", items({"type": "reasoning", "encrypted_content": "a"})),
    ("instructions", {"instructions": ["a"]}),
    ("tools", {"tools": {}}),
    ("tools", {"tools": TOOLS * 129}),
    ("tools[0]", {"tools": [{"type": "web_search"}]}),
    ("tools[0].tools", {"tools": [{"type": "namespace", "name": "n"}]}),
    ("tools[0].tools", {"tools": [{"type": "namespace", "name": "n", "tools": []}]}),
    ("tools[0].tools", {"tools": [{"type": "namespace", "name": "n" * 60, "tools": TOOLS}]}),
    (
        "tools[0].tools[0].type",
        {"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "mcp", "name": "f"}]}]},
    ),
    ("tools[0].name", {"tools": [{"type": "custom"}]}),
    ("tools[0].parameters", {"tools": [{**CUSTOM, "parameters": {}}]}),
    ("tools[0].format.type", {"tools": [{**CUSTOM, "format": {"type": "json"}}]}),
    ("tools[0].format.syntax", {"tools": [{**CUSTOM, "format": {**GRAMMAR, "syntax": "gbnf"}}]}),
    (
        "tools[0].format.definition",
        {"tools": [{**CUSTOM, "format": {"type": "grammar", "syntax": "lark"}}]},
    ),
    ("tools", {"tools": [{**CUSTOM, "format": GRAMMAR}]}),
    ("tool_choice", {"tools": [CUSTOM], "tool_choice": {"type": "custom", "name": "g"}}),
    ("tool_choice.type", {"tools": [CUSTOM], "tool_choice": {"type": "mcp", "name": "f"}}),
    ("input[0].input", items({"type": "custom_tool_call", "call_id": "a", "name": "f"})),
    ("input[0].arguments", items({**CALLED, "arguments": "{}"})),
    ("input[0].call_id", items({"type": "custom_tool_call_output", "call_id": "a", "output": ""})),
    ("tools[0].name", {"tools": [{"type": "function"}]}),
    ("tools[0].name", {"tools": [{"type": "function", "name": "a b"}]}),
    ("tools[0].parameters", {"tools": [{"type": "function", "name": "f", "parameters": DEEP}]}),
    ("tools[0].function", {"tools": [{"type": "function", "name": "f", "function": {}}]}),
    ("tool_choice", {"tool_choice": "any"}),
    ("tool_choice", {"tool_choice": "required"}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": {"type": "function", "name": "g"}}),
    ("tool_choice", {"tools": TOOLS, "tool_choice": "required"}),
    ("parallel_tool_calls", {"parallel_tool_calls": 1}),
    ("text.format.type", {"text": {"format": {"type": "xml"}}}),
    ("text.format.schema", {"text": {"format": {"type": "json_schema", "name": "a"}}}),
    ("text.format.name", {"text": {"format": {"type": "json_schema", "schema": {}}}}),
    ("text.format", {"text": {"format": {"type": "json_object"}}}),
    ("reasoning.effort", {"reasoning": {"effort": 5}}),
    ("reasoning.budget", {"reasoning": {"budget": 5}}),
    ("max_output_tokens", {"max_output_tokens": 0}),
    ("max_output_tokens", {"max_output_tokens": 10**6}),
    ("max_output_tokens", {"max_output_tokens": "5"}),
    ("temperature", {"temperature": 3}),
    ("top_p", {"top_p": 0}),
    ("top_logprobs", {"top_logprobs": 2}),
    ("top_logprobs", {"top_logprobs": 50, "include": ["message.output_text.logprobs"]}),
    ("include[0]", {"include": ["all"]}),
    ("metadata", {"metadata": {str(i): "a" for i in range(17)}}),
    ("metadata.a", {"metadata": {"a": 5}}),
    ("previous_response_id", {"previous_response_id": "resp_none"}),
    ("stream", {"stream": "yes"}),
    ("stream_options", {"stream_options": {"include_obfuscation": False}}),
    ("truncation", {"truncation": "auto"}),
    ("background", {"background": True}),
    ("conversation", {"conversation": "conv_1"}),
    ("prompt", {"prompt": {"id": "a"}}),
    ("context_management", {"context_management": [{"type": "compaction"}]}),
    ("user", {"user": "u" * 300}),
    ("no_such", {"no_such": 1}),
]


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: repr(value)[:50])
def test_responses_invalid_field_returns_error_with_param(server, field, fields):
    answer = server.post(RESPONSES, **{"input": "hi", **fields})
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
    assert error["param"] == field, error
    assert len(error["message"]) < 400


def test_responses_errors_raise_client_classes(server, client):
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="gpt-5", input="a")
    assert caught.value.param == "model"
    with server.post_slowly(MAX_OPEN), pytest.raises(openai.InternalServerError) as full:
        client.responses.create(model="default", input="a")
    assert full.value.code == "queue_full"
