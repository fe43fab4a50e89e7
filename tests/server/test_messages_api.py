"""Anthropic's Messages API: answers, streams and errors, with the unmodified anthropic package."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message, MessageTokensCount, ModelInfo

from shared.server.protocol import messages_response_types as types
from tests.support.api_conversations import (
    CALL,
    CONVERSATIONS,
    END,
    MESSAGES_TOOL,
    USER,
    serving_apis,
)
from tests.support.http_fixtures import CHAT, Server
from tests.support.sdk_types import message_events, message_of

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
ASKED: Any = {"model": "default", "max_tokens": 300, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    with serving_apis(tmp_path_factory.mktemp("model")) as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as made:
        yield made


def echoing(text: str) -> Any:
    return [{"role": "user", "content": text + END}]


def whole(server: Server, **fields: Any) -> Message:
    """Returns a message after strict validation by both sides' types."""
    answer = server.post(MESSAGES, **{**ASKED, **fields})
    assert answer.status_code == 200, answer.text
    return message_of(answer.content)


def param_of(message: Message) -> Any:
    """Returns a message as a client sends it back."""
    content = [block.model_dump(exclude_unset=True) for block in message.content]
    return {"role": "assistant", "content": content}


def events(server: Server, **fields: Any) -> list[Any]:
    """Returns the events of a stream after strict validation by both sides' types."""
    body = {**ASKED, **fields, "stream": True}
    answer = httpx.post(server.url + MESSAGES, json=body, timeout=60)
    assert answer.headers["content-type"].startswith("text/event-stream"), answer.text
    return message_events(answer.text)


def assembled(found: list[Any]) -> list[Any]:
    """Returns the blocks of a stream without signatures and ids."""
    blocks: list[Any] = []
    open_index = None
    for event in found:
        match event["type"]:
            case "content_block_start":
                assert open_index is None
                open_index = event["index"]
                assert open_index == len(blocks)
                blocks.append({**event["content_block"], "json": ""})
            case "content_block_delta":
                assert event["index"] == open_index
                delta = event["delta"]
                for field, key in (("text",) * 2, ("thinking",) * 2, ("partial_json", "json")):
                    if field in delta:
                        blocks[-1][key] += delta[field]
                if "signature" in delta:
                    blocks[-1]["signature"] = delta["signature"]
            case "content_block_stop":
                open_index = None
    assert open_index is None
    for block in blocks:
        if (text := block.pop("json")) or block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    return list(map(bare, blocks))


def bare(block: Any) -> Any:
    return {key: value for key, value in block.items() if key not in ("signature", "id")}


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_message_equals_chat(server, name):
    chat, fields, _ = CONVERSATIONS[name]
    want = server.post(CHAT, **chat, temperature=0, max_tokens=150).json()
    got = whole(server, **fields, max_tokens=150)
    text = "".join(block.text for block in got.content if block.type == "text")
    assert text == want["choices"][0]["message"]["content"]
    usage = got.usage
    assert (
        usage.input_tokens + (usage.cache_read_input_tokens or 0)
        == (want["usage"]["prompt_tokens"])
    )
    count = server.post(COUNT, model="default", **fields)
    found = MessageTokensCount.model_validate_json(count.content, strict=True)
    assert found.input_tokens == want["usage"]["prompt_tokens"]


OUTPUTS = {
    "text": "It is fine.",
    "reasoning": "<think>\nhm\n</think>\n\nYes.",
    "call": CALL,
    "all": f"<think>hm</think>I look.{CALL}\n{CALL}",
    "empty": "",
    "no arguments": '<tool_call>{"name": "look", "arguments": {}}</tool_call>',
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_message_stream_equals_whole(server, name):
    fields = {"messages": echoing(OUTPUTS[name]), "tools": [MESSAGES_TOOL], "tool_choice": NONE}
    if "call" in OUTPUTS[name]:  # otherwise the prompt ends with the tools, which are repeated
        fields |= {"tool_choice": {"type": "auto"}}
    want, found = whole(server, **fields), events(server, **fields)
    blocks = [bare(block.model_dump(exclude_unset=True)) for block in want.content]
    assert assembled(found) == blocks
    first, *_, delta, last = found
    assert (first["type"], delta["type"], last["type"]) == (
        *("message_start", "message_delta", "message_stop"),
    )
    assert delta["delta"]["stop_reason"] == want.stop_reason
    assert delta["usage"]["output_tokens"] == want.usage.output_tokens


NONE = {"type": "none"}


def test_anthropic_client_runs_tool_round(client):
    """The answer is sent back as the client stores it."""
    asked: Any = {"model": "default", "max_tokens": 200, "tools": [MESSAGES_TOOL]}
    first = client.messages.create(
        messages=echoing(f"<think>hm</think>I look.{CALL}"), extra_body={"temperature": 0}, **asked
    )
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use"]
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert call.type == "tool_use"
    assert call.input == {"city": "Rome"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history: Any = [
        {"role": "user", "content": "q"},
        first.to_param(),
        {"role": "user", "content": [result]},
    ]
    second = client.messages.create(messages=history, extra_body={"temperature": 0}, **asked)
    text = "".join(block.text for block in second.content if block.type == "text")
    assert text.startswith("q[assistant](hm)I look.{ " + call.id)
    assert f"[tool]sunny@{call.id}" in text


def test_anthropic_stream_helper_assembles_message(client):
    asked: Any = {"model": "default", "max_tokens": 200, "tools": [MESSAGES_TOOL]}
    messages = echoing(f"<think>hm</think>Well.{CALL}")
    with client.messages.stream(messages=messages, extra_body={"temperature": 0}, **asked) as found:
        kinds = {event.type for event in found}
        final = found.get_final_message()
    assert {"text", "thinking", "input_json", "signature"} <= kinds
    assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_sequence_that_matched_is_reported(server, stream):
    fields = {"messages": echoing("one two three"), "stop_sequences": ["zz", "tw", "wo t"]}
    if stream:
        *_, delta, _ = events(server, **fields)
        found = delta["delta"]
    else:
        found = whole(server, **fields).model_dump()
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "tw")


def test_stop_reasons_report_end_limit_and_context(server):
    for fields, reason in (
        ({"messages": echoing("ab")}, "end_turn"),
        ({"messages": [USER], "max_tokens": 3}, "max_tokens"),
        ({"messages": [USER], "max_tokens": 10**6}, "model_context_window_exceeded"),
    ):
        found = whole(server, **fields)
        assert (found.stop_reason, found.stop_sequence) == (reason, None)


def test_cut_answer_keeps_complete_and_partial_calls(server):
    """A model that must call and may call again calls until its tokens end."""
    call = OUTPUTS["no arguments"]
    fields: Any = {"messages": echoing(call * 2), "tools": [MESSAGES_TOOL]}
    for limit, count in ((len(call) + 4, 1), (2 * len(call), 2), (2 * len(call) - 14, 2)):
        found = whole(server, **fields, max_tokens=limit)
        assert (found.stop_reason, len(found.content)) == ("max_tokens", count)
        assert found.content[0].input == {}
        again = [USER, param_of(found), USER]
        assert whole(server, messages=again, max_tokens=2).content


def test_reasoning_until_limit_has_no_text(server):
    found = whole(server, messages=echoing("<think>" + "a" * 50), max_tokens=20)
    assert [block.type for block in found.content] == ["thinking"]
    assert found.stop_reason == "max_tokens"
    assert found.usage.output_tokens_details.thinking_tokens == 20
    short = whole(server, messages=echoing("<think>hm</think>Yes"))
    assert short.usage.output_tokens_details.thinking_tokens == len("<think>hm</think>")


def test_omitted_thinking_returns_by_signature(server):
    thinking = {"type": "adaptive", "display": "omitted"}
    messages = echoing("<think>hm, well</think>Yes")
    found = whole(server, messages=messages, thinking=thinking)
    block = found.content[0]
    assert (block.type, block.thinking) == ("thinking", "")
    streamed = assembled(events(server, messages=messages, thinking=thinking))
    assert streamed[0]["thinking"] == ""
    history = [{"role": "user", "content": "q"}, param_of(found), USER]
    text = whole(server, messages=history, max_tokens=40).content[0].text
    assert text.startswith("q[assistant](hm, well)Yes")
    spoiled = {**block.model_dump(), "signature": block.signature[:-6] + "AAAA=="}
    history[1] = {"role": "assistant", "content": [spoiled]}
    answer = server.post(MESSAGES, **ASKED, messages=history)
    assert "messages.1.content.0.signature" in answer.json()["error"]["message"]


def test_thinking_switch_reaches_template(server):
    fields = {
        "messages": echoing("a</think>b"),
        "thinking": {"type": "enabled", "budget_tokens": 9},
    }
    found = whole(server, **fields)
    assert [block.type for block in found.content] == ["thinking", "text"]
    assert found.model_extra["ignored"] == ["thinking.budget_tokens"]
    fields["thinking"] = {"type": "disabled"}
    assert [block.type for block in whole(server, **fields).content] == ["text"]


def test_assistant_prefill_is_continued(server):
    fields = {"messages": [USER, {"role": "assistant", "content": "So it"}]}
    text = whole(server, **fields, max_tokens=18).content[0].text
    assert text == "hi[assistant]So it"


def test_error_result_and_redacted_thinking_are_accepted(server):
    answer = {
        "role": "assistant",
        "content": [
            {"type": "redacted_thinking", "data": "abc"},
            {"type": "tool_use", "id": "c1", "name": "look", "input": {}},
        ],
    }
    result = {"type": "tool_result", "tool_use_id": "c1", "content": "no net", "is_error": True}
    messages = [USER, answer, {"role": "user", "content": [result]}]
    text = whole(server, messages=messages, max_tokens=60).content[0].text
    assert "[tool]Error:;no net;@c1" in text


def test_cache_control_and_beta_headers_are_accepted(server):
    hint = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
    fields: Any = {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi" + END, **hint}]}],
        "system": [{"type": "text", "text": "a", **hint}],
        "tools": [{**MESSAGES_TOOL, **hint, "type": "custom"}],
        "tool_choice": NONE,
        "metadata": {"user_id": "u" * 400},
        **hint,
    }
    headers = {"anthropic-beta": "a-2025-01-01,b", "anthropic-version": "2023-06-01"}
    answer = httpx.post(
        server.url + MESSAGES + "?beta=true", json={**ASKED, **fields}, headers=headers, timeout=30
    )
    assert answer.status_code == 200, answer.text
    assert "ignored" not in answer.json()


def test_models_have_anthropic_schema(server, client):
    page = client.models.list()
    assert [model.id for model in page] == ["repeater"]
    assert client.models.retrieve("repeater").lifecycle == "active"
    answer = httpx.get(server.url + "/v1/models", headers={"anthropic-version": "2023-06-01"})
    types.ModelPage.model_validate(answer.json())
    card = ModelInfo.model_validate_json(json.dumps(answer.json()["data"][0]))
    assert card.max_input_tokens == 512
    assert httpx.get(server.url + "/v1/models").json()["object"] == "list"
