"""Response messages are accepted as input, in every shape in which clients store them.

The engine repeats the prompt, and the template writes the first user message unchanged, so the
user message of a test sets the model's output.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.support.http_fixtures import CHAT, Server, save_tokenizer, serving

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}"
    "[{{ m.reasoning_content }}|{{ m.content }}|"
    "{% for call in m.tool_calls %}{{ call | tojson(sort_keys=true) }}{% endfor %}]"
    "{% endif %}{% endfor %}"
    "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}"
)
CALL = '<tool_call>{"name": "f", "arguments": {"a": "Eß", "b": [1, null]}}</tool_call>'
OUTPUTS = {
    "text": "Hello",
    "reasoning": "<think>hm</think>Hello",
    "truncated reasoning": "<think>hm, well",
    "call": CALL,
    "reasoning and call": f"<think>hm</think>{CALL}",
    "text and two calls": f"Well: {CALL}{CALL}",
    "truncated call": CALL[:52],
    "call truncated before its arguments": CALL[:32],
}
"""Outputs of the model; truncated ones have reached `max_tokens`."""

TOOLS: Any = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
GREEDY: dict[str, Any] = {"model": "default", "temperature": 0, "tools": TOOLS}
Message = dict[str, Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("model")
    save_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    flags = ["--reasoning-parser", "qwen3", "--tool-call-parser", "hermes"]
    with serving(["-m", "tests.support.http_fixtures", str(folder), *flags]) as running:
        yield running


@pytest.fixture(scope="module")
def client(server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=server.url + "/v1", api_key="x", max_retries=0, timeout=30
    ) as running:
        yield running


def request_of(output: str) -> dict[str, Any]:
    tokens = {"max_completion_tokens": len(output.encode())}
    return {**GREEDY, **tokens, "messages": [{"role": "user", "content": output}]}


def whole(client: openai.OpenAI, output: str) -> Any:
    return client.chat.completions.create(**request_of(output), logprobs=True).choices[0].message


def streamed(client: openai.OpenAI, output: str) -> Any:
    """Returns the message that the openai package assembles from a stream."""
    state = ChatCompletionStreamState()
    for chunk in client.chat.completions.create(**request_of(output), stream=True):
        state.handle_chunk(chunk)
    return state.current_completion_snapshot.choices[0].message


def added(client: openai.OpenAI, output: str) -> Message:
    """Returns the sum of a stream's deltas without the openai package."""
    message: Message = {}
    for chunk in client.chat.completions.create(**request_of(output), stream=True):
        for choice in chunk.choices:
            add(message, choice.delta.model_dump(exclude_unset=True))
    return message


def add(message: Message, delta: Message) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls = message.setdefault(name, [])
            for part in value:
                if part["index"] == len(calls):
                    calls.append(part)
                else:
                    begun = calls[part["index"]]["function"]
                    begun["arguments"] += part["function"]["arguments"]
        elif message.get(name) is None:
            message[name] = value
        elif value is not None and name != "role":
            message[name] += value


def of_litellm(message: Message) -> Message:
    nothing = dict.fromkeys(("tool_calls", "function_call", "provider_specific_fields", "refusal"))
    return {**nothing, **message}


def of_langchain(message: Message) -> Message:
    """Drops the reasoning and unknown fields of calls, like LangChain."""
    kept: Message = {"content": message["content"], "role": "assistant"}
    if calls := message.get("tool_calls"):
        kept["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {n: call["function"][n] for n in ("name", "arguments")},
            }
            for call in calls
        ]
    return kept


def renamed(message: Message) -> Message:
    """Renames `reasoning_content` to `reasoning`, vLLM's newer name."""
    names = {"reasoning_content": "reasoning"}
    return {names.get(name, name): value for name, value in message.items()}


def doubled(message: Message) -> Message:
    """Adds both names of the reasoning."""
    return {**message, **renamed(message)}


def in_parts(message: Message) -> Message:
    """Converts the text to a content part with a cache hint."""
    if not message["content"]:
        return message
    part = {"type": "text", "text": message["content"], "cache_control": {"type": "ephemeral"}}
    return {**message, "content": [part]}


def nulled(message: Message) -> Message:
    """Adds the missing fields of an OpenAI message as null."""
    names = ("refusal", "annotations", "audio", "function_call", "tool_calls", "name")
    return {**dict.fromkeys(names), **message}


SHAPES: dict[str, Callable[[Any], Message]] = {
    "object": lambda message: message,
    "model_dump": lambda message: message.model_dump(),
    "without null": lambda message: message.model_dump(exclude_none=True),
    "without unset": lambda message: message.model_dump(exclude_unset=True),
    "to_dict": lambda message: message.to_dict(),
    "litellm": lambda message: of_litellm(message.model_dump(exclude_unset=True)),
    "langchain": lambda message: of_langchain(message.model_dump()),
    "reasoning": lambda message: renamed(message.model_dump()),
    "both names": lambda message: doubled(message.model_dump()),
    "parts": lambda message: in_parts(message.model_dump(exclude_unset=True)),
    "nulls": lambda message: nulled(message.model_dump(exclude_unset=True)),
}


def prompt_of(server: Server, message: Any) -> str:
    """Returns the prompt text of a response that is sent back."""
    body = json.loads(json.dumps(message, default=lambda value: value.to_dict()))
    prompt = [{"role": "user", "content": "Q"}, body, {"role": "user", "content": "A"}]
    tokens = server.post("/tokenize", messages=prompt, tools=TOOLS)
    assert tokens.status_code == 200, (body, tokens.text)
    return server.post("/detokenize", tokens=tokens.json()["tokens"]).json()["prompt"]


def raw_message(server: Server, output: str) -> Message:
    """Returns the message of the raw response."""
    answer = server.post(CHAT, **request_of(output))
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]


def comparable(prompt_text: str, shape: str) -> str:
    """Removes the ids of calls, which differ in each response, and fields that a client drops."""
    if shape == "langchain":
        prompt_text = re.sub(r"\[[^|]*\|", "[|", prompt_text)
    return re.sub('"id": "[^"]*"', "", prompt_text)


@pytest.mark.parametrize("case", OUTPUTS)
def test_response_message_round_trips_for_client_shapes(server, client, case):
    output = OUTPUTS[case]
    raw = raw_message(server, output)
    calls = raw.get("tool_calls", [])
    first = prompt_of(server, raw)
    assert ("[hm" in first) == ("<think>hm" in output)
    assert first.count('"function": {') == len(calls)
    answers = whole(client, output), streamed(client, output)
    for shape, keep in SHAPES.items():
        if shape == "langchain" and raw["content"] is None and not calls:
            continue  # LangChain has dropped everything
        for answer in answers:
            back = keep(answer)
            assert comparable(prompt_of(server, back), shape) == comparable(first, shape), shape
            turns: Any = [{"role": "user", "content": "Q"}, back, {"role": "user", "content": "A"}]
            client.chat.completions.create(messages=turns, max_tokens=1, **GREEDY)
    assert comparable(prompt_of(server, added(client, output)), "") == comparable(first, "")


def test_truncated_tool_arguments_are_accepted_and_repaired(server, client):
    cut = CALL[: CALL.index(", null")]
    message = whole(client, cut)
    (call,) = message.tool_calls
    with pytest.raises(ValueError, match="Expecting|Unterminated"):
        json.loads(call.function.arguments)
    assert '"arguments": {"a": "E' in prompt_of(server, message.model_dump())


@pytest.mark.parametrize("arguments", ["{]", '{"a": 1} x', "[1", "x", '{"a": 1}}', "{a"])
def test_invalid_tool_arguments_return_400(server, arguments):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    answer = server.post(CHAT, messages=messages, tools=TOOLS)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].endswith("arguments")


def test_reasoning_and_reasoning_content_must_match(server):
    message = {"role": "assistant", "reasoning": "a", "reasoning_content": "b"}
    error = server.post(CHAT, messages=[message]).json()["error"]
    assert error["param"] == "messages[0]"
    assert error["message"].startswith(
        "messages[0] has different reasoning_content and reasoning; send one of them, got "
    )
