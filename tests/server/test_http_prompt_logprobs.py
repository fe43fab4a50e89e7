"""Prompt logprobs over HTTP: with `echo`, keyed by id like vLLM's, and streamed."""

from __future__ import annotations

from typing import Any

import openai

from tests.support.http_fixtures import (
    CHAT,
    COMPLETIONS,
    END,
    MAX_PROMPT_LOGPROBS,
    USER,
)

LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
ECHO: dict[str, Any] = {"echo": True, "temperature": 0, "return_token_ids": True}


def at(token: int, *others: int) -> dict[str, Any]:
    """Returns the entry of a prompt token in vLLM's format, with other candidates."""
    name = {END: "<|end|>"}
    return {
        str(each): {
            "logprob": -each / 256,
            "rank": token + 1 if each == token and not others else 1 + (each - token),
            "decoded_token": name.get(each, chr(each)),
        }
        for each in (token, *others)
    }


def test_echo_returns_prompt_logprobs_before_output(server):
    choice = server.complete("abc", **ECHO, max_tokens=2, logprobs=2)["choices"][0]
    assert (choice["text"], choice["token_ids"]) == ("abcab", [*b"ab"])
    a, b, c = -97 / 256, -98 / 256, -99 / 256
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "a", "b"],
        "token_logprobs": [None, b, c, a, b],
        "top_logprobs": [
            None,
            {"b": b, "c": c},
            {"c": c, "d": -100 / 256},
            {"a": a, "b": b},
            {"b": b, "c": c},
        ],
        "text_offset": [0, 1, 2, 3, 4],
    }
    assert "prompt_logprobs" not in choice


def test_echo_with_max_tokens_0_scores_prompt(server):
    """Evaluation harnesses request no output token, or one that they drop."""
    for prompt in ("abc", [*b"abc"]):
        nothing = server.complete(prompt, **ECHO, max_tokens=0, logprobs=1)
        one = server.complete(prompt, **ECHO, max_tokens=1, logprobs=1)
        choice = nothing["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
        assert choice["token_ids"] == []
        assert nothing["usage"]["completion_tokens"] == 0
        for name in LISTS:
            assert one["choices"][0]["logprobs"][name][:-1] == choice["logprobs"][name]
            assert len(choice["logprobs"][name]) == 3


def test_echo_text_offsets_index_returned_text(server):
    """Cases: partial characters, special tokens named in the text, ids without text."""
    logprobs = {**ECHO, "max_tokens": 1, "logprobs": 0}
    choice = server.complete("a<|end|>ö!", **logprobs)["choices"][0]
    assert choice["text"] == "a<|end|>ö!a"
    assert choice["logprobs"]["text_offset"] == [0, 1, 8, 8, 9, 10]
    choice = server.complete([97, END, 299, *"ö!".encode()], **logprobs)["choices"][0]
    assert choice["text"] == "aö!a"
    assert choice["logprobs"]["tokens"][1:3] == ["<|end|>", "token_id:299"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 1, 2, 3]


def test_echo_logprobs_belong_to_each_prompt(server):
    found = server.complete(["ab", "cde"], **ECHO, n=2, max_tokens=1, logprobs=0)["choices"]
    reported = [choice["logprobs"]["token_logprobs"][:-1] for choice in found]
    ab, cde = [None, -98 / 256], [None, -100 / 256, -101 / 256]
    assert reported == [ab, ab, cde, cde]


def test_prompt_logprobs_keyed_by_id_with_ranks(server):
    """Same as vLLM: in each choice of a completion, and next to the choices of a chat."""
    body = server.complete("ab", temperature=0, max_tokens=1, n=2, prompt_logprobs=2)
    for choice in body["choices"]:
        assert choice["text"] == "a"
        assert choice["logprobs"] is None
        assert choice["prompt_logprobs"] == [None, at(98, 99)]
    body = server.complete([97, END], temperature=0, max_tokens=1, prompt_logprobs=0)
    assert body["choices"][0]["prompt_logprobs"] == [None, at(END)]
    assert server.complete("a", max_tokens=1, prompt_logprobs=1)["choices"][0][
        "prompt_logprobs"
    ] == [None], "the first token has no logprob"
    answer = server.post(CHAT, messages=USER, max_tokens=1, prompt_logprobs=1, n=2).json()
    first, *others = answer["prompt_logprobs"]
    assert first is None
    assert all(len(each) == 1 for each in others)
    assert len(others) == answer["usage"]["prompt_tokens"] - 1
    assert not any("prompt_logprobs" in choice for choice in answer["choices"])
    assert "prompt_logprobs" not in server.post(CHAT, messages=USER, max_tokens=1).json()


def test_echo_logprobs_and_prompt_logprobs_counts_are_independent(server):
    for echoed, reported in ((0, 3), (3, 0), (2, 2)):
        body = server.complete(
            "ab", **ECHO, max_tokens=0, logprobs=echoed, prompt_logprobs=reported
        )
        choice = body["choices"][0]
        assert len(choice["logprobs"]["top_logprobs"][1]) == max(echoed, 1)
        assert len(choice["prompt_logprobs"][1]) == max(reported, 1)


def test_completion_stream_sends_prompt_logprobs_in_first_event(server):
    fields = {**ECHO, "prompt": "grün", "max_tokens": 8, "logprobs": 1, "prompt_logprobs": 2}
    whole = server.complete(**fields)["choices"][0]
    events = [event["choices"][0] for event in server.stream(COMPLETIONS, **fields)]
    parts = [event["logprobs"] for event in events]
    assert len(parts) > 2
    assert {name: [x for part in parts for x in part[name]] for name in LISTS} == whole["logprobs"]
    assert events[0]["prompt_logprobs"] == whole["prompt_logprobs"]
    assert not any("prompt_logprobs" in event for event in events[1:])


def test_chat_stream_sends_prompt_logprobs_once(server):
    fields = {"messages": USER, "max_tokens": 5, "seed": 1, "n": 2, "prompt_logprobs": 1}
    whole = server.post(CHAT, **fields).json()["prompt_logprobs"]
    reported = [
        e["prompt_logprobs"] for e in server.stream(CHAT, **fields) if "prompt_logprobs" in e
    ]
    assert reported == [whole]


def test_openai_client_parses_echo_logprobs(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    answer = client.completions.create(
        model="default", prompt=["abc", "d"], echo=True, max_tokens=0, logprobs=1
    )
    found = [choice.logprobs.token_logprobs for choice in answer.choices]
    assert found == [[None, -98 / 256, -99 / 256], [None]]


def test_prompt_logprobs_above_limit_is_rejected(server):
    asked = {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": MAX_PROMPT_LOGPROBS + 1}
    assert (
        f"prompt_logprobs must be 0 to {MAX_PROMPT_LOGPROBS} "
        in server.post(COMPLETIONS, **asked).text
    )


def test_max_tokens_0_without_echo_returns_error(server):
    error = server.post(COMPLETIONS, prompt="ab", max_tokens=0).json()["error"]
    assert error["param"] == "max_tokens"
    assert "echo" in error["message"]
