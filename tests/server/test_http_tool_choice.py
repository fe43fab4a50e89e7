"""Tool choices over HTTP that need a grammar: no calls, and inputs of custom tools."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.support.grammar_server import CITY, start, tool
from tests.support.http_fixtures import CHAT, USER, Server


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with start(tmp_path_factory.mktemp("model")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none")


LONG: Any = [{"role": "user", "content": "Which weather is it in Rome? " * 8}]


@pytest.mark.parametrize("path", [CHAT, "/v1/responses", "/v1/messages"])
def test_tool_choice_none_keeps_cached_prefix(server, path):
    """The prompt lists the tools, so the request finds the prefix that another one left."""
    tools: Any = [tool("weather"), tool("news")]
    fields: dict[str, Any] = {"messages": LONG, "tools": tools, "max_tokens": 2, "model": "default"}
    none: Any = "none"
    if path == "/v1/responses":
        flat = [{"type": "function", **each["function"]} for each in tools]
        fields = {"input": LONG, "tools": flat, "max_output_tokens": 2}
    if path == "/v1/messages":
        functions = [each["function"] for each in tools]
        schemas = [{"name": f["name"], "input_schema": f["parameters"]} for f in functions]
        fields |= {"tools": schemas}
        none = {"type": "none"}
    counts = []
    for more in ({}, {}, {"tool_choice": none}):
        usage = server.post(path, **fields, **more).json()["usage"]
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        counts.append(details.get("cached_tokens", usage.get("cache_read_input_tokens")))
    assert counts[1] == counts[2] > len(LONG[0]["content"])  # a token is a byte


def test_tool_choice_none_forbids_calls(server):
    """A bias towards the tag of calls writes it in every answer that may call."""
    (tag,) = server.post("/tokenize", prompt="<tool_call>", add_special_tokens=False).json()[
        "tokens"
    ]
    asked: Any = {"messages": USER, "tools": [tool("weather")], "max_tokens": 20}
    asked |= {"logit_bias": {tag: 100}, "temperature": 0}
    for choice, is_begun in (("auto", True), ("none", False)):
        answer = server.post(CHAT, **asked, tool_choice=choice).json()["choices"][0]
        assert ("<tool_call>" in answer["message"]["content"]) is is_begun
        assert "tool_calls" not in answer["message"]


@pytest.mark.parametrize(
    ("syntax", "definition", "pattern"),
    [
        ("regex", "[a-c]{3}\n", r"[a-c]{3}\n"),
        (
            "lark",
            'start: ("+" WORD LF)~1..2\nWORD: /[a-c]{2}/\n%import common.LF',
            r"(\+[a-c]{2}\n){1,2}",
        ),
    ],
)
def test_custom_tool_input_matches_grammar(client, syntax, definition, pattern):
    form = {"type": "grammar", "syntax": syntax, "definition": definition}
    tools: Any = [{"type": "custom", "name": "edit", "format": form}]
    choice: Any = {"type": "custom", "name": "edit"}
    asked: Any = {"input": "x", "tools": tools, "tool_choice": choice, "max_output_tokens": 500}
    for seed in range(3):
        given = {"seed": seed}
        (call,) = client.responses.create(model="default", **asked, extra_body=given).output
        assert (call.type, call.name) == ("custom_tool_call", "edit")
        assert re.fullmatch(pattern, call.input)
    subset: Any = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
    tools += [{"type": "function", "name": "look", "parameters": CITY}]
    asked |= {"tools": tools, "tool_choice": subset}
    response = client.responses.create(model="default", **asked)
    assert {item.name for item in response.output} == {"edit"}
    assert response.model_dump()["tool_choice"] == subset
