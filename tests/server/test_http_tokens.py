"""`/tokenize`, `/detokenize`, and `echo`."""

from __future__ import annotations

import openai
import pytest

from tests.support.http_fixtures import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    END,
    USER,
    VOCAB,
)

TOOL = {"type": "function", "function": {"name": "f"}}
MARK = 257  # <|user|>; the assistant's turn begins after 258


def test_tokenize_prompt_returns_tokens(server):
    found = server.post("/tokenize", model="repeater", prompt="hé").json()
    want = {"count": 3, "max_model_len": CONTEXT, "tokens": [*"hé".encode()], "token_strs": None}
    assert found == want
    asked = {"prompt": "hé", "return_token_strs": True, "add_special_tokens": False}
    found = server.post("/tokenize", **asked).json()
    assert found["token_strs"] == ["h", r"bytes:\xc3", r"bytes:\xa9"]


def test_tokenize_messages_returns_chat_prompt_tokens(server):
    found = server.post("/tokenize", messages=USER, add_generation_prompt=True).json()
    assert found["tokens"] == [MARK, *b"hi", MARK + 1]
    assert found["count"] == 4


def test_tokenize_applies_generation_prompt_and_continue_final_message(server):
    found = server.post("/tokenize", messages=USER, add_generation_prompt=False).json()
    assert found["tokens"] == [MARK, *b"hi"]
    begun = [*USER, {"role": "assistant", "content": "so "}]
    for more in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None}):
        asked = {"messages": begun, "continue_final_message": True, **more}
        found = server.post("/tokenize", **asked).json()
        assert found["tokens"] == [MARK, *b"hi", MARK + 1, *b"so "]
        answer = server.post(CHAT, **asked, max_tokens=1).json()
        assert answer["usage"]["prompt_tokens"] == found["count"]


def test_detokenize_returns_text_with_special_tokens(server):
    found = server.post("/detokenize", tokens=[*"hé".encode(), END, VOCAB - 1]).json()
    assert found == {"prompt": "hé<|end|>"}
    assert server.post("/detokenize", tokens=[]).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "param", "fields"),
    [
        ("tokenize", "prompt", {}),
        ("tokenize", "prompt", {"prompt": [1]}),
        ("tokenize", "prompt", {"prompt": "x" * 13 * CONTEXT}),
        ("tokenize", "messages", {"messages": []}),
        ("tokenize", "prompt", {"messages": USER, "prompt": "a"}),
        ("tokenize", "tools", {"messages": USER, "tools": [TOOL]}),
        ("tokenize", "add_generation_prompt", {"messages": USER, "add_generation_prompt": 0}),
        ("tokenize", "continue_final_message", {"messages": USER, "continue_final_message": True}),
        ("tokenize", "more", {"prompt": "a", "more": 1}),
        ("detokenize", "tokens", {}),
        ("detokenize", "tokens", {"tokens": "a"}),
        ("detokenize", "tokens", {"tokens": [VOCAB]}),
        ("detokenize", "tokens", {"tokens": [0] * (CONTEXT + 1)}),
        ("detokenize", "tokens[0]", {"tokens": [-1]}),
        ("detokenize", "tokens[1]", {"tokens": [1, 10**30]}),
    ],
)
def test_invalid_field_returns_400_with_param(server, path, param, fields):
    answer = server.post("/" + path, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
    answer = server.post("/" + path, **fields, model="other")
    assert answer.status_code in (400, 404)


def test_echo_returns_prompt_before_output(server):
    fields = {"temperature": 0, "max_tokens": 3, "stop": "b"}  # not those in the prompt
    for prompt, text in (("abc", "abca"), ([*b"abc"], "abca"), ("cab", "cabca")):
        choice = server.complete(prompt, echo=True, **fields)["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == (text, "stop")
        events = server.stream(COMPLETIONS, prompt=prompt, echo=True, **fields)
        assert "".join(event["choices"][0]["text"] for event in events) == text
    several = server.complete(["ab", "cd"], n=2, echo=True, temperature=0, max_tokens=1)
    assert [choice["text"] for choice in several["choices"]] == ["aba", "aba", "cdc", "cdc"]
    assert server.complete("abc", echo=False, **fields)["choices"][0]["text"] == "a"


def test_openai_client_receives_echoed_prompt(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    answer = client.completions.create(
        model="default", prompt="abc", echo=True, max_tokens=2, temperature=0
    )
    assert answer.choices[0].text == "abcab"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2
