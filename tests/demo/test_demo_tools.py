"""Server of the README's first command: structured output and tools need no flag."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.support.http_fixtures import Server, serving

QUESTION: Any = [{"role": "user", "content": "Ann has 7 bags of 12 nuts. How many nuts?"}]
ADD: Any = {
    "type": "function",
    "function": {
        "name": "lookup",
        "parameters": {
            "type": "object",
            "properties": {"thing": {"enum": ["nuts", "bags"]}},
            "required": ["thing"],
            "additionalProperties": False,
        },
    },
}


class Reply(BaseModel):
    """Schema of the structured output."""

    thing: Literal["nuts", "bags"]
    is_sure: bool


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(["-m", "torch_impl.serve", "--port", "0"]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none")


def test_openai_parse_returns_object(client: openai.OpenAI):
    answer = client.chat.completions.parse(
        model="default", messages=QUESTION, response_format=Reply, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Reply)


def test_forced_tool_call_round_trip(client: openai.OpenAI):
    asked: Any = {"model": "default", "tools": [ADD], "temperature": 0, "max_tokens": 64}
    answer = client.chat.completions.create(
        messages=QUESTION, tool_choice="required", **asked
    ).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.tool_calls
    (call,) = answer.message.tool_calls
    assert call.type == "function"
    assert json.loads(call.function.arguments)["thing"] in ("nuts", "bags")
    result = {"role": "tool", "tool_call_id": call.id, "content": "84"}
    messages = [*QUESTION, answer.message.model_dump(exclude_none=True), result]
    last = client.chat.completions.create(messages=messages, **asked)
    assert last.usage is not None
    assert last.choices[0].message.content


def test_capabilities_name_parsers(server: Server):
    told = httpx.get(server.url + "/capabilities").json()
    assert told["tool_call_parser"] == "hermes"
    assert told["reasoning_parser"] is None
    assert told["chat_template"] is None
    assert told["structured_outputs"] is True
