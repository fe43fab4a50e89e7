"""Reasoning, tool calls and `chat_template_kwargs`, also with the openai package.

The model-free test engine repeats the prompt, so the first message sets the output.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.http_fixtures import CHAT, SPECIAL, USER, Server, save_tokenizer, serving

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %} {{ k }}={{ v }}{% endfor %}]{% endfor %}"
    "{% if m.role == 'tool' %}({{ m.tool_call_id }}){% endif %}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
    "{% if enable_thinking is defined and enable_thinking %}<think>\n{% endif %}"
)
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": False,
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
END = SPECIAL[0]
GREEDY: Any = {"model": "default", "temperature": 0}


def echoing(text: str) -> Any:
    return [{"role": "user", "content": text + END}]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    flags = ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]
    with serving(["-m", "tests.support.http_fixtures", str(folder), *flags]) as running:
        yield running


@pytest.fixture(scope="module")
def plain_server(tmp_path_factory) -> Iterator[Server]:
    """Starts a server without parsers, with a template without tools."""
    folder = tmp_path_factory.mktemp("plain")
    save_tokenizer(folder)
    with serving(["-m", "tests.support.http_fixtures", str(folder)]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none")


def test_chat_returns_tool_call_with_reasoning(client):
    answer = client.chat.completions.create(
        messages=echoing(f"<think>\nhm\n</think>\n\nI look.\n{CALL}"), tools=[WEATHER], **GREEDY
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.model_extra == {"reasoning_content": "hm"}
    (call,) = choice.message.tool_calls or ()
    assert (call.type, call.function.name) == ("function", "weather")
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert call.id.startswith("call_")


def test_tool_call_stream_sends_name_then_arguments(client):
    chunks = client.chat.completions.create(
        messages=echoing(f"Well.{CALL}\n{CALL}"), tools=[WEATHER], stream=True, **GREEDY
    )
    choices = [chunk.choices[0] for chunk in chunks]
    assert choices[-1].finish_reason == "tool_calls"
    assert "".join(choice.delta.content or "" for choice in choices) == "Well."
    parts = [part for choice in choices for part in choice.delta.tool_calls or ()]
    for index in (0, 1):
        first, *rest = [part for part in parts if part.index == index]
        assert first.id is not None
        assert (first.type, first.function.name) == ("function", "weather")
        assert len(rest) > 2
        assert all(part.id is None and part.function.name is None for part in rest)
        arguments = "".join(part.function.arguments for part in [first, *rest])
        assert arguments == '{"city": "Rome"}'
    assert len({part.id for part in parts} - {None}) == 2


def test_openai_stream_helper_assembles_tool_call(client):
    with client.chat.completions.stream(
        messages=echoing(f"<think>hm</think>{CALL}"), tools=[WEATHER], **GREEDY
    ) as stream:
        for _ in stream:
            pass
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rome"}')
    assert not message.content


def test_async_openai_client_returns_same_output(server):
    async def ask(stream: bool) -> str:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
            asked = {"messages": echoing(CALL), "tools": [WEATHER], **GREEDY}
            if not stream:
                answer = await client.chat.completions.create(**asked)
                return answer.choices[0].message.tool_calls[0].function.arguments
            chunks = await client.chat.completions.create(**asked, stream=True)
            deltas = [chunk.choices[0].delta async for chunk in chunks]
            parts = [part for delta in deltas for part in delta.tool_calls or ()]
            return "".join(part.function.arguments for part in parts)

    for stream in (False, True):
        assert asyncio.run(ask(stream)) == '{"city": "Rome"}'


def test_conversation_continues_after_tool_call(client):
    """The message is sent back as the client stores it."""
    first = client.chat.completions.create(messages=echoing(CALL), tools=[WEATHER], **GREEDY)
    message = first.choices[0].message
    call_id = message.tool_calls[0].id
    result = {"role": "tool", "tool_call_id": call_id, "content": "sunny" + END}
    messages: Any = [message, result]
    second = client.chat.completions.create(messages=messages, tools=[WEATHER], **GREEDY)
    assert second.choices[0].message.content == f"[{call_id} weather city=Rome]sunny"
    whole = message.model_dump() | {"refusal": None, "annotations": [], "audio": None}
    again = client.chat.completions.create(messages=[whole, result], **GREEDY)
    assert again.choices[0].message.content == f"[{call_id} weather city=Rome]sunny"


def test_reasoning_opened_by_template_is_separated(server):
    messages = echoing("hm</think>Yes")
    for thinking, reasoning, text in ((True, "hm", "Yes"), (False, None, "hm</think>Yes")):
        more = {"chat_template_kwargs": {"enable_thinking": thinking}}
        answer = server.post(CHAT, messages=messages, temperature=0, **more).json()
        message = answer["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, text)
        events = server.stream(CHAT, messages=messages, temperature=0, **more)
        deltas = [event["choices"][0]["delta"] for event in events]
        assert "".join(d.get("reasoning_content", "") for d in deltas) == (reasoning or "")
        assert "".join(d["content"] or "" for d in deltas) == text


def test_tool_choice_none_without_grammars_omits_tools(server):
    fields = {"messages": [{"role": "user", "content": "x"}], "temperature": 0, "max_tokens": 30}
    for choice, is_listed in (("auto", True), (None, True), ("none", False)):
        answer = server.post(CHAT, **fields, tools=[WEATHER], tool_choice=choice).json()
        text = answer["choices"][0]["message"]["content"]
        assert text.startswith("xweather") is is_listed
    answer = server.post(CHAT, messages=echoing(CALL), tools=[WEATHER], tool_choice="none").json()
    assert "tool_calls" not in answer["choices"][0]["message"]


def test_parallel_tool_calls_false_returns_one_call(server):
    fields = {"messages": echoing(CALL + CALL), "temperature": 0, "tools": [WEATHER]}
    choice = server.post(CHAT, **fields, parallel_tool_calls=False).json()["choices"][0]
    assert len(choice["message"]["tool_calls"]) == 1
    assert choice["message"]["content"] == CALL


def test_tool_call_cut_by_max_tokens_reports_length(server):
    fields = {"messages": echoing(CALL), "temperature": 0, "tools": [WEATHER], "max_tokens": 50}
    choice = server.post(CHAT, **fields).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert (
        CALL.encode()[:50]
        .decode()
        .endswith(choice["message"]["tool_calls"][0]["function"]["arguments"])
    )


def test_tool_call_cut_by_stop_string_reports_stop(server):
    """Its arguments are invalid JSON, so the finish reason is not `tool_calls`."""
    for output, reason in (
        (CALL, "stop"),
        (CALL + CALL[:-18], "stop"),
        (CALL + "stop", "tool_calls"),
    ):
        fields = {"messages": echoing(output + "stop"), "temperature": 0, "tools": [WEATHER]}
        fields["stop"] = ["ome"] if output == CALL else ["stop"]
        choice = server.post(CHAT, **fields).json()["choices"][0]
        assert choice["finish_reason"] == reason, output
        assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
        *_, last = server.stream(CHAT, **fields)
        assert last["choices"][0]["finish_reason"] == reason


def test_cut_response_drops_partial_delimiter_after_call(server):
    fields = {"messages": echoing(f"{CALL}\n{CALL}"), "temperature": 0, "tools": [WEATHER]}
    for more in (3, 6, 14):
        fields["max_tokens"] = len(CALL) + more
        choice = server.post(CHAT, **fields).json()["choices"][0]
        assert choice["finish_reason"] == "length"
        assert len(choice["message"]["tool_calls"]) == 1
        assert not choice["message"]["content"]
        deltas = [event["choices"][0]["delta"] for event in server.stream(CHAT, **fields)]
        assert not any(delta["content"] for delta in deltas)


def test_tool_call_within_open_reasoning_is_returned(server):
    fields = {
        "messages": echoing(f"I use <tool_call> now.\n{CALL}"),
        "tools": [WEATHER],
        "temperature": 0,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    choice = server.post(CHAT, **fields).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["reasoning_content"] == "I use <tool_call> now."
    assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {
        "city": "Rome"
    }
    events = server.stream(CHAT, **fields)
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "I use <tool_call> now."
    parts = [part for d in deltas for part in d.get("tool_calls", [])]
    assert json.loads("".join(part["function"]["arguments"] for part in parts)) == {"city": "Rome"}
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"


def tool_of(**function: object) -> Any:
    return {"type": "function", "function": function}


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


LIST_CALL = {"id": "a", **tool_of(name="f", arguments="[1]")}
DEEP_CALL = {"id": "a", **tool_of(name="f", arguments=json.dumps(nested(300)))}
ALLOWED = {
    "type": "allowed_tools",
    "allowed_tools": {
        "mode": "auto",
        "tools": [{"type": "function", "function": {"name": "weather"}}],
    },
}
DEEP_ANSWER = {"role": "assistant", "tool_calls": [DEEP_CALL]}
BAD = [
    ("tool_choice", {"tools": [WEATHER], "tool_choice": "required"}),
    ("tool_choice", {"tools": [WEATHER], "tool_choice": ALLOWED}),
    ("tool_choice", {"tool_choice": {"type": "function", "function": {"name": "weather"}}}),
    ("tools[0].function", {"tools": [{"type": "function"}]}),
    ("tools[0].function.name", {"tools": [tool_of(name="a b")]}),
    ("tools", {"tools": [tool_of(name="f", strict=True)]}),
    ("tools[0].type", {"tools": [{"type": "web_search"}]}),
    ("tools", {"tools": [WEATHER] * 129}),
    ("parallel_tool_calls", {"parallel_tool_calls": 1}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"no_such": 1}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
    ("chat_template_kwargs", {"chat_template_kwargs": {str(i): i for i in range(33)}}),
    ("chat_template_kwargs", {"chat_template_kwargs": [1]}),
    ("tools[0].function.parameters", {"tools": [tool_of(name="f", parameters=nested(65))]}),
    ("tools[0].function.parameters", {"tools": [tool_of(name="f", parameters=nested(900))]}),
    ("chat_template_kwargs", {"chat_template_kwargs": {"enable_thinking": nested(400)}}),
    ("messages[0].tool_calls[0].function.arguments", {"messages": [DEEP_ANSWER]}),
    ("messages[0].tool_call_id", {"messages": [{"role": "tool", "content": "x"}]}),
    ("messages[0]", {"messages": [{"role": "assistant"}]}),
    ("messages[0]", {"messages": ["hi"]}),
    (
        "messages[0].tool_calls[0].function.arguments",
        {"messages": [{"role": "assistant", "tool_calls": [LIST_CALL]}]},
    ),
]


@pytest.mark.parametrize(("param", "fields"), BAD, ids=lambda value: repr(value)[:40])
def test_tools_invalid_field_returns_400_with_param(server, param, fields):
    answer = server.post(CHAT, **{"messages": USER, **fields})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    assert len(answer.json()["error"]["message"]) < 300


@pytest.mark.parametrize(
    ("param", "fields"),
    [
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("guided_regex", {"guided_regex": "a"}),
        ("structured_outputs", {"structured_outputs": {"choice": ["a"]}}),
        ("tool_choice", {"tools": [WEATHER], "tool_choice": "required"}),
        ("tools", {"tools": [tool_of(name="f", strict=True)]}),
    ],
    ids=str,
)
def test_grammar_fields_without_backend_name_flag(server, param, fields):
    error = server.post(CHAT, messages=USER, **fields).json()["error"]
    assert error["param"] == param
    assert "--grammar-backend llguidance" in error["message"]


def test_tools_without_parser_return_400(plain_server):
    answer = plain_server.post(CHAT, messages=USER, tools=[WEATHER])
    assert answer.status_code == 400
    assert "--tool-call-parser" in answer.json()["error"]["message"]
    assert plain_server.post(CHAT, messages=USER, tools=[WEATHER], tool_choice="none").is_success
    messages = [{"role": "tool", "tool_call_id": "a", "content": "x"}]
    answer = plain_server.post(CHAT, messages=messages)
    assert "does not support tool messages" in answer.json()["error"]["message"]
    answer = plain_server.post(CHAT, messages=USER, chat_template_kwargs={"enable_thinking": False})
    assert answer.json()["error"]["param"] == "chat_template_kwargs"


def test_server_without_parsers_returns_plain_text(plain_server):
    text = f"<think>hm</think>{CALL}"
    answer = plain_server.post(CHAT, messages=echoing(text), temperature=0).json()
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": text}
    assert httpx.get(plain_server.url + "/health").is_success
