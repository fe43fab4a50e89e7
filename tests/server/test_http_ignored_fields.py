"""Ignored fields: listed in the response and the log, rejected with `--strict-fields`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.options.unsupported_fields import UNSUPPORTED_FIELDS, UnsupportedField
from shared.server.api.request_parsing import parse
from shared.server.protocol.openai_types import ChatRequest
from tests.support.http_fixtures import CHAT, COMPLETIONS, Server, save_tokenizer, serving

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_tokenizer(made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def started(folder: Path, *flags: str) -> Any:
    more = ["--tool-call-parser", "hermes", *flags]
    return serving(["-m", "tests.support.http_fixtures", str(folder), *more])


@pytest.fixture(scope="module")
def lenient(folder) -> Iterator[Server]:
    with started(folder) as running:
        yield running


@pytest.fixture(scope="module")
def strict(folder) -> Iterator[Server]:
    with started(folder, "--strict-fields") as running:
        yield running


def body(endpoint: str) -> dict[str, Any]:
    """Returns a request with every object that may contain an ignored field."""
    if endpoint == "completions":
        return {"prompt": "ab", "temperature": 0, "max_tokens": 2}
    if endpoint == "messages":
        blocks = [{"type": "text", "text": "hi"}]
        tools = [{"name": "f", "input_schema": {}}]
        fields = {"messages": [{"role": "user", "content": blocks}], "tools": tools}
        return {**fields, "model": "default", "temperature": 0, "max_tokens": 2}
    if endpoint == "responses":
        function = {"type": "function", "name": "f"}
        namespace = {"type": "namespace", "name": "n", "tools": [{**function}]}
        call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
        fields = {"input": [{"role": "user", "content": "hi"}, call], "max_output_tokens": 2}
        return {**fields, "tools": [function, namespace], "temperature": 0}
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "4"},
    ]
    tools = [{"type": "function", "function": {"name": "f"}}]
    return {"messages": messages, "tools": tools, "temperature": 0, "max_tokens": 2}


def with_field(endpoint: str, path: str, value: Any) -> dict[str, Any]:
    made = body(endpoint)
    if path.startswith("stream_options"):
        made |= {"stream": True, "stream_options": {}}
    if path.startswith(("output_config", "reasoning.")):
        made |= {path.partition(".")[0]: {}}
    *parents, name = path.split(".")
    holders: list[Any] = [made]
    for parent in parents:
        below = [holder.get(parent.removesuffix("[]")) for holder in holders]
        parts = [part for each in below for part in (each if isinstance(each, list) else [each])]
        holders = [part for part in parts if isinstance(part, dict)]
    for holder in holders:
        holder[name] = value
    return made


def result(answer: httpx.Response) -> dict[str, Any]:
    """Returns a whole response, or the first event of a stream."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        data = next(line for line in answer.text.splitlines() if line.startswith("data: "))
        event = json.loads(data.removeprefix("data: "))
        return event.get("response", event)
    return answer.json()


ADVICE = [
    (field, endpoint)
    for field in UNSUPPORTED_FIELDS
    for endpoint in field.endpoints
    if field.is_advice and "image_url" not in field.name
]


PATHS = {
    "chat": CHAT,
    "completions": COMPLETIONS,
    "messages": "/v1/messages",
    "responses": "/v1/responses",
}


def answer_of(response: dict[str, Any]) -> Any:
    output = [item["content"] for item in response.get("output", ())]
    return response.get("choices") or response.get("content") or output


@pytest.mark.parametrize(("field", "endpoint"), ADVICE, ids=lambda of: getattr(of, "name", of))
def test_ignored_field_is_listed_or_rejected_if_strict(
    lenient, strict, field: UnsupportedField, endpoint: str
):
    path = PATHS[endpoint]
    asked = with_field(endpoint, field.name, field.example)
    response = result(lenient.post(path, **asked))
    assert response["ignored"] == [field.name]
    neutral = [
        result(lenient.post(path, **with_field(endpoint, field.name, value)))
        for value in (None, *field.neutral)
    ]
    assert not any("ignored" in each for each in neutral)
    assert all(answer_of(each) == answer_of(response) for each in neutral)
    refused = strict.post(path, **asked)
    assert refused.status_code == 400
    if endpoint != "messages":
        assert refused.json()["error"]["param"] == field.name
    assert "--strict-fields" in refused.json()["error"]["message"]
    for value in (None, *field.neutral):
        result(strict.post(path, **with_field(endpoint, field.name, value)))


def test_stream_lists_ignored_fields_in_first_event(lenient):
    asked = {**body("chat"), "n": 2, "store": True, "stream_options": {"include_usage": True}}
    first, *others = lenient.stream(CHAT, **asked, reasoning_effort="low")
    assert first["ignored"] == ["store", "reasoning_effort"]
    assert not any("ignored" in event for event in others)


def test_response_format_ignored_if_tool_call_required():
    """A required call leaves no text that the format could constrain."""
    asked = {**body("chat"), "response_format": {"type": "json_object"}}
    for choice, ignored in (("required", ("response_format",)), ("auto", ())):
        request = parse(json.dumps({**asked, "tool_choice": choice}).encode(), ChatRequest)
        assert request.ignored == ignored


def test_log_and_capabilities_list_ignored_fields(folder):
    with started(folder, "--log-format", "json") as server:
        lenient = httpx.get(server.url + "/capabilities").json()
        server.complete("a", max_tokens=1, metadata={"a": "b"}, store=True)
        server.complete("a", max_tokens=1)
    lines = [json.loads(line) for line in server.lines]
    ends = [line for line in lines if line["message"] == "request ended"]
    assert [line.get("ignored") for line in ends] == ["metadata,store", None]
    assert {"field": "store", "endpoints": ["completions", "chat"], "neutral": [False]} in (
        lenient["ignored"]
    )


def test_strict_server_capabilities_list_no_ignored_fields(strict):
    response = httpx.get(strict.url + "/capabilities").json()
    assert response["ignored"] == []
    assert any(entry["reason"].startswith("store ") for entry in response["unsupported"])


def test_chat_accepts_fields_of_litellm_agents(lenient):
    """Request fields of Claude Code and Codex behind the litellm proxy."""
    asked = {
        **body("chat"),
        "reasoning_effort": "high",
        "web_search_options": {"search_context_size": "medium"},
        "metadata": {"user_id": "a"},
        "store": False,
        "prompt_cache_key": "b",
        "client_metadata": {"version": "1"},
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "thinking": {"type": "adaptive"},
    }
    response = result(lenient.post(CHAT, **asked))
    assert set(response["ignored"]) == {
        *("reasoning_effort", "web_search_options", "metadata", "prompt_cache_key"),
        *("client_metadata", "thinking"),
    }
