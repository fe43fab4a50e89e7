"""Errors of Anthropic's Messages API: schema, type and path of the invalid field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest

from shared.server.protocol import messages_response_types as types
from tests.support.api_conversations import MESSAGES_TOOL, USER, serving_apis
from tests.support.http_fixtures import MAX_OPEN, Server, save_tokenizer, serving

KEY = "key-of-the-tests"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASKED: Any = {"model": "default", "max_tokens": 300, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with serving_apis(tmp_path_factory.mktemp("model")) as running:
        yield running


@pytest.fixture(scope="module")
def locked(tmp_path_factory) -> Iterator[Server]:
    with serving_apis(tmp_path_factory.mktemp("locked"), "--api-key", KEY) as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def error_of(answer: httpx.Response) -> tuple[int, str, str]:
    """Returns status, type and message of an error in Anthropic's format."""
    types.AnthropicError.model_validate(answer.json())
    return answer.status_code, answer.json()["error"]["type"], answer.json()["error"]["message"]


def test_thread_error_has_code_for_clients(server):
    """Tool runners of Anthropic's packages then send the whole conversation."""
    answer = server.post(MESSAGES, **ASKED, messages=[USER], thread={"type": "create"})
    assert error_of(answer)[:2] == (400, "invalid_request_error")
    assert answer.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}


def blocks(*given: Any, role: str = "user") -> Any:
    return {"messages": [{"role": role, "content": [*given]}]}


def result(**fields: Any) -> Any:
    return {"type": "tool_result", **fields}


DEEP: Any = {}
for _ in range(70):
    DEEP = {"a": DEEP}
SOURCE = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
BAD: list[tuple[str, Any]] = [
    ("model", {"model": None}),
    ("model", {"model": 5}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": "5"}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("max_tokens", {"max_tokens": True}),
    ("max_tokens", {"max_tokens": 10**12}),
    ("max_tokens", {"max_tokens": None}),
    ("messages", {"messages": []}),
    ("messages", {"messages": None}),
    ("messages", {"messages": "hi"}),
    ("messages.0", {"messages": ["hi"]}),
    ("messages.0.role", {"messages": [{"role": "tool", "content": "a"}]}),
    ("messages.0.role", {"messages": [{"content": "a"}]}),
    ("messages.0.content", {"messages": [{"role": "user"}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": 5}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": None}]}),
    ("messages.0.content", {"messages": [{"role": "user", "content": "\ud800"}]}),
    ("messages.0.name", {"messages": [{"role": "user", "content": "a", "name": "b"}]}),
    ("messages.0.content.0", blocks("a")),
    ("messages.0.content.0", blocks({"text": "a"})),
    ("messages.0.content.0", blocks({"type": "document", "source": {}})),
    ("messages.0.content.0", blocks({"type": "no_such"})),
    ("messages.0.content.0.text", blocks({"type": "text"})),
    ("messages.0.content.0.text", blocks({"type": "text", "text": 5})),
    ("messages.0.content.0.more", blocks({"type": "text", "text": "a", "more": 1})),
    ("messages.0.content.0.citations", blocks({"type": "text", "text": "a", "citations": [1]})),
    ("messages.0.content.0.source", blocks({"type": "image"})),
    ("messages.0.content.0.source.type", blocks({"type": "image", "source": {"type": "file"}})),
    (
        "messages.0.content.0.source.media_type",
        blocks({"type": "image", "source": {**SOURCE, "media_type": "image/tiff"}}),
    ),
    ("messages.0.content.0.source", blocks({"type": "image", "source": SOURCE})),
    ("messages.0.content.0", blocks({"type": "thinking", "thinking": "a"})),
    ("messages.0.content.0", blocks({"type": "image", "source": SOURCE}, role="assistant")),
    ("messages.0.content.0", blocks({"type": "image", "source": SOURCE}, role="system")),
    ("messages.0.content.0.tool_use_id", blocks(result())),
    ("messages.0.content.0.tool_use_id", blocks(result(tool_use_id="a", content="b"))),
    ("messages.0.content.0.content", blocks(result(tool_use_id="a", content=5))),
    ("messages.0.content.0.is_error", blocks(result(tool_use_id="a", is_error="no"))),
    (
        "messages.0.content.0.input",
        blocks({"type": "tool_use", "id": "a", "name": "f", "input": "{}"}, role="assistant"),
    ),
    (
        "messages.0.content.0.name",
        blocks({"type": "tool_use", "id": "a", "name": "a b", "input": {}}, role="assistant"),
    ),
    (
        "messages.0.content.0.input",
        blocks({"type": "tool_use", "id": "a", "name": "f", "input": DEEP}, role="assistant"),
    ),
    (
        "messages.0",
        blocks({"type": "tool_use", "id": "a", "name": "f", "input": {}}, role="assistant"),
    ),
    ("system", {"system": 5}),
    ("system.0.type", {"system": [{"type": "image", "source": SOURCE}]}),
    ("system.0.text", {"system": [{"type": "text", "text": None}]}),
    ("tools", {"tools": {}}),
    ("tools", {"tools": [MESSAGES_TOOL] * 129}),
    ("tools.0", {"tools": [{"type": "web_search_20250305", "name": "web_search"}]}),
    ("tools.0.name", {"tools": [{"input_schema": {}}]}),
    ("tools.0.name", {"tools": [{"name": "a b", "input_schema": {}}]}),
    ("tools.0.input_schema", {"tools": [{"name": "f"}]}),
    ("tools.0.input_schema", {"tools": [{"name": "f", "input_schema": DEEP}]}),
    ("tools.0.function", {"tools": [{**MESSAGES_TOOL, "function": {}}]}),
    ("tools.defer_loading", {"tools": [{**MESSAGES_TOOL, "defer_loading": True}]}),
    ("tool_choice", {"tool_choice": "auto"}),
    ("tool_choice.type", {"tool_choice": {"type": "required"}}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("tool_choice", {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "tool", "name": "g"}}),
    ("tool_choice", {"tools": [MESSAGES_TOOL], "tool_choice": {"type": "any"}}),
    ("tool_choice.name", {"tool_choice": {"type": "tool"}}),
    ("stop_sequences", {"stop_sequences": "a"}),
    ("stop_sequences.0", {"stop_sequences": [""]}),
    ("stop_sequences", {"stop_sequences": ["a"] * 17}),
    ("temperature", {"temperature": 3}),
    ("top_p", {"top_p": 0}),
    ("top_k", {"top_k": -2}),
    ("stream", {"stream": "yes"}),
    ("metadata.user_id", {"metadata": {"user_id": 5}}),
    ("thinking.type", {"thinking": {"type": "on"}}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled", "budget_tokens": 0}}),
    ("output_config.format", {"output_config": {"format": {"type": "json_schema", "schema": {}}}}),
    ("output_config.format.type", {"output_config": {"format": {"type": "text"}}}),
    ("mcp_servers", {"mcp_servers": [{"name": "a"}]}),
    ("context_management", {"context_management": {"edits": [{"type": "other"}]}}),
    ("no_such", {"no_such": 1}),
]


@pytest.mark.parametrize(("field", "fields"), BAD, ids=lambda value: repr(value)[:50])
def test_messages_invalid_field_returns_error_with_path(server, field, fields):
    body = {"model": "default", "max_tokens": 5, "messages": [USER], **fields}
    status, kind, message = error_of(server.post(MESSAGES, **body))
    assert (status, kind) == (400, "invalid_request_error"), message
    assert message.startswith(f"{field}: "), message
    assert len(message) < 400


def test_errors_before_and_after_routing_have_anthropic_schema(server, locked):
    def get(path: str, of: Server = server, **headers: str) -> tuple[int, str, str]:
        return error_of(httpx.get(of.url + path, headers=headers, timeout=30))

    long = {"x-more": "a" * (1 << 15)}
    assert get(MESSAGES, locked, **{"x-api-key": "wrong"})[:2] == (401, "authentication_error")
    assert get(MESSAGES, host="evil.example")[:2] == (403, "permission_error")
    assert get("/v1/messages/none")[:2] == (404, "not_found_error")
    assert get("/no_such", **{"anthropic-version": "2023-06-01"})[:2] == (404, "not_found_error")
    assert get(MESSAGES)[:2] == (405, "invalid_request_error")
    assert httpx.get(server.url + MESSAGES, headers=long).status_code in (400, 431)
    other = server.post(MESSAGES, **{**ASKED, "model": "claude", "messages": [USER]})
    assert error_of(other)[:2] == (404, "not_found_error")
    big = b'{"messages": "' + b"a" * (9 << 20) + b'"}'
    headers = {"content-type": "application/json"}
    answer = httpx.post(server.url + MESSAGES, content=big, headers=headers, timeout=60)
    assert error_of(answer)[:2] == (413, "request_too_large")
    plain = httpx.post(server.url + MESSAGES, content=b"{}", timeout=30)
    assert error_of(plain)[:2] == (415, "invalid_request_error")
    assert httpx.get(locked.url + "/v1/models").json()["error"]["code"] == "invalid_api_key"


def test_anthropic_client_raises_error_classes(server, locked, client):
    asked: Any = {"model": "default", "max_tokens": 5}
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=5, messages=[USER])
    with pytest.raises(anthropic.BadRequestError, match="messages.0.content"):
        client.messages.create(messages=[{"role": "user", "content": 5}], **asked)
    with (
        anthropic.Anthropic(base_url=locked.url, api_key="wrong", max_retries=0) as wrong,
        pytest.raises(anthropic.AuthenticationError),
    ):
        wrong.messages.create(messages=[USER], **asked)


def test_full_queue_returns_overloaded_error(server):
    with server.post_slowly(MAX_OPEN):
        answer = server.post(MESSAGES, **ASKED, messages=[USER])
    assert error_of(answer)[:2] == (529, "overloaded_error")
    assert answer.headers["retry-after"] == "1"


def test_tools_without_parser_return_error(tmp_path):
    save_tokenizer(tmp_path)
    with serving(["-m", "tests.support.http_fixtures", str(tmp_path)]) as plain:
        for path in (MESSAGES, COUNT):
            limit = {"max_tokens": 5} if path == MESSAGES else {}
            body = {"model": "default", "messages": [USER], "tools": [MESSAGES_TOOL], **limit}
            status, _, message = error_of(plain.post(path, **body))
            assert (status, message.startswith("tools: ")) == (400, True)
