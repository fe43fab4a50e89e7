"""Logprobs over HTTP: formats, streams, stop strings, equal with and without speculation."""

from __future__ import annotations

import threading
from typing import Any

import openai
import pytest

from tests.support.echo_engine import FILLER
from tests.support.http_fixtures import (
    CHAT,
    COMPLETIONS,
    END,
    MAX_LOGPROBS,
    USER,
    Server,
    save_tokenizer,
    serving,
)
from tests.support.tiny_models import write_tiny

CHAIN = ["--speculative-algorithm", "NEXTN", "--speculative-num-steps", "3"]
CHAIN += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"]
LISTS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


def test_completion_logprobs_lists_equal_expected(server):
    body = server.complete(
        [*"aö".encode(), 299, END], temperature=0, logprobs=2, return_token_ids=True
    )
    choice = body["choices"][0]
    assert choice["token_ids"] == [*"aö".encode(), 299, END]
    assert choice["logprobs"] == {
        "tokens": ["a", r"bytes:\xc3", r"bytes:\xb6", "token_id:299", "<|end|>"],
        "token_logprobs": [-97 / 256, -195 / 256, -182 / 256, -299 / 256, -1.0],
        "top_logprobs": [
            {"a": -97 / 256, "b": -98 / 256},
            {r"bytes:\xc3": -195 / 256, r"bytes:\xc4": -196 / 256},
            {r"bytes:\xb6": -182 / 256, r"bytes:\xb7": -183 / 256},
            {"token_id:299": -299 / 256, "\x00": 0},
            {"<|end|>": -1.0, "<|user|>": -257 / 256},
        ],
        "text_offset": [0, 1, 1, 2, 2],
    }


def test_logprobs_0_returns_chosen_token_logprobs(server):
    choice = server.complete("ab", temperature=0, max_tokens=2, logprobs=0)["choices"][0]
    assert choice["logprobs"]["token_logprobs"] == [-97 / 256, -98 / 256]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -97 / 256}, {"b": -98 / 256}]
    assert server.complete("ab", max_tokens=2)["choices"][0]["logprobs"] is None


def test_chat_logprobs_have_one_entry_per_token(server):
    fields = {"messages": USER, "max_tokens": 2, "logit_bias": {str(0xC3): 100}}
    answer = server.post(CHAT, **fields, logprobs=True, top_logprobs=1).json()
    half = {"token": r"bytes:\xc3", "logprob": -195 / 256, "bytes": [0xC3]}
    want = {"content": [{**half, "top_logprobs": [half]}] * 2, "refusal": None}
    assert answer["choices"][0]["logprobs"] == want
    answer = server.post(CHAT, **fields, logprobs=True).json()
    assert answer["choices"][0]["logprobs"]["content"] == [{**half, "top_logprobs": []}] * 2
    assert server.post(CHAT, **fields).json()["choices"][0]["logprobs"] is None


def test_stop_string_truncates_logprobs_and_tokens(server):
    """Other servers truncate tokens, logprobs and usage differently (s#26163, s#39826)."""
    fields = {"temperature": 0, "stop": ["lo w"], "logprobs": MAX_LOGPROBS}
    body = server.complete("hello world", **fields, return_token_ids=True)
    choice = body["choices"][0]
    assert choice["text"] == "hel"
    assert "".join(choice["logprobs"]["tokens"]) == "hello w" == bytes(choice["token_ids"]).decode()
    assert {len(choice["logprobs"][name]) for name in LISTS} == {7}
    assert body["usage"]["completion_tokens"] == 7


def test_min_tokens_keeps_logprobs_aligned_with_tokens(server):
    fields = {"temperature": 0, "max_tokens": 9, "logprobs": 0}
    choice = server.complete([97, END], **fields, min_tokens=3)["choices"][0]
    assert choice["logprobs"]["tokens"] == ["a", chr(FILLER), "a", "<|end|>"]
    assert choice["text"] == "a-a"


def test_completion_stream_logprobs_equal_whole_response(server):
    fields = {"prompt": "grün 你好", "max_tokens": 30, "temperature": 0, "stop": "你好g"}
    whole = server.complete(**fields, logprobs=1)["choices"][0]["logprobs"]
    events = server.stream(COMPLETIONS, **fields, logprobs=1)
    parts = [event["choices"][0]["logprobs"] for event in events]
    assert [len(part["tokens"]) for part in parts][:2] == [1, 3]  # one step each
    assert {name: [x for part in parts for x in part[name]] for name in LISTS} == whole


def test_chat_stream_logprobs_equal_whole_response(server):
    fields = {"messages": USER, "max_tokens": 8, "seed": 5, "n": 3}
    fields |= {"logprobs": True, "top_logprobs": 2}
    whole = server.post(CHAT, **fields).json()["choices"]
    joined: dict[int, list] = {0: [], 1: [], 2: []}
    for event in server.stream(CHAT, **fields):
        choice = event["choices"][0]
        joined[choice["index"]] += choice["logprobs"]["content"]
    assert joined == {choice["index"]: choice["logprobs"]["content"] for choice in whole}


def test_openai_client_parses_completion_and_chat_logprobs(server):
    client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
    fields = {"model": "default", "max_tokens": 3, "temperature": 0}
    completion = client.completions.create(prompt="abc", logprobs=2, **fields)
    assert completion.choices[0].logprobs is not None
    assert completion.choices[0].logprobs.tokens == ["a", "b", "c"]
    chat = client.chat.completions.create(messages=USER, logprobs=True, top_logprobs=2, **fields)
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    assert [len(entry.top_logprobs) for entry in chat.choices[0].logprobs.content] == [2] * 3


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> list[str]:
    """Returns the command of a server with the reference backend."""
    folder = tmp_path_factory.mktemp("logprobs") / "tiny"
    write_tiny(folder, "qwen3_5", 3)
    save_tokenizer(folder)
    return ["-m", "tests.support.serve_reference", "--port", "0", "--model-path", str(folder)]


def bodies() -> list[dict[str, Any]]:
    """Returns greedy and sampled requests, with and without logprobs, penalties and biases."""
    common = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.2}
    return [
        {**common, "prompt": "one two", "temperature": 0, "logprobs": 3},
        {**common, "prompt": "three", "temperature": 1.0, "seed": 4, "logprobs": 20, **penalties},
        {**common, "prompt": "four five six", "temperature": 0.8, "seed": 5, "top_p": 0.9},
        {**common, "prompt": "7", "temperature": 0, "logprobs": 0, "logit_bias": {"65": 4}},
    ]


def pack(server: Server) -> list[dict[str, Any]]:
    """Returns the choices of all requests, sent at the same time."""
    found: dict[int, dict[str, Any]] = {}

    def ask(index: int, body: dict[str, Any]) -> None:
        found[index] = server.complete(**body)["choices"][0]

    threads = [threading.Thread(target=ask, args=pair) for pair in enumerate(bodies())]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[index] for index in range(len(threads))]


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got["token_ids"] == want["token_ids"]
    if want["logprobs"] is None:
        assert got["logprobs"] is None
        return
    for name in ("tokens", "text_offset"):
        assert got["logprobs"][name] == want["logprobs"][name]
    # The order of float32 sums depends on the number of rows in a step.
    close = {"abs": 1e-4}
    chosen = want["logprobs"]["token_logprobs"]
    assert got["logprobs"]["token_logprobs"] == pytest.approx(chosen, **close)
    pairs = zip(got["logprobs"]["top_logprobs"], want["logprobs"]["top_logprobs"], strict=True)
    for got_best, want_best in pairs:
        assert got_best == pytest.approx(want_best, **close)


def assert_raw(choices: list[dict[str, Any]]) -> None:
    """Checks that greedy tokens have the highest logprob, and the number of top logprobs."""
    found = [choice["logprobs"] for choice in choices]
    greedy = [max(best.values()) for best in found[0]["top_logprobs"]]
    assert found[0]["token_logprobs"] == greedy
    assert [len(best) in (20, 21) for best in found[1]["top_logprobs"]] == [True] * 12
    assert all(len(best) == 1 for best in found[3]["top_logprobs"])


def assert_biased(server: Server) -> None:
    """A bias changes tokens but no logprob; `min_tokens` delays a stop token."""
    fields = {"temperature": 1, "seed": 1, "max_tokens": 9, "logit_bias": {"65": 100}}
    biased = server.complete("one", **fields, logprobs=0)["choices"][0]
    assert biased["text"] == "A" * 9
    assert max(biased["logprobs"]["token_logprobs"]) < -0.5
    body = server.complete(
        "one", **fields, stop_token_ids=[65], min_tokens=3, logprobs=0, return_token_ids=True
    )
    tokens = body["choices"][0]["token_ids"]
    assert len(tokens) == 4 == len(body["choices"][0]["logprobs"]["tokens"])
    assert tokens.index(65) == 3


def assert_refused(server: Server) -> None:
    """Checks that prompt logprobs without their flag return 400 with its name."""
    for fields in ({"logprobs": 0, "echo": True}, {"prompt_logprobs": 2}):
        answer = server.post(COMPLETIONS, prompt="ab", max_tokens=1, **fields)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, next(iter(fields)))
        assert "--max-prompt-logprobs" in error["message"]


def assert_echoed(server: Server, alone: dict[str, Any]) -> None:
    """Checks that output tokens, sent as a prompt, have the same logprobs."""
    tokens, prompt = alone["token_ids"], [*b"one two"]
    scored = {"prompt": [*prompt, *tokens], "echo": True, "logprobs": 3, "max_tokens": 0}
    for _ in range(2):  # the second time with a cached prompt
        reported = server.complete(**scored)["choices"][0]["logprobs"]
        got = {name: reported[name][len(prompt) :] for name in LISTS}
        got["text_offset"] = [at - len(prompt) for at in got["text_offset"]]
        assert_same({**alone, "logprobs": got}, alone)


def test_logprobs_equal_with_and_without_speculation(tiny: list[str]):
    with serving([*tiny, "--overlap-depth", "0"]) as server:
        alone = [server.complete(**body)["choices"][0] for body in bodies()]
        assert_refused(server)
        fields = {"messages": USER, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        fields |= {"logprobs": True, "top_logprobs": 2}
        plain_chat = server.post(CHAT, **fields).json()["choices"][0]["logprobs"]["content"]
    assert_raw(alone)
    scores = ["--max-prompt-logprobs", "3"]
    with serving([*tiny, *CHAIN, *scores, "--overlap-depth", "1"]) as server:
        for index, body in enumerate(bodies()):
            assert_same(server.complete(**body)["choices"][0], alone[index])
        assert_echoed(server, alone[0])
        for got, want in zip(pack(server), alone, strict=True):
            assert_same(got, want)
        events = server.stream(CHAT, **fields)
        assert server.metrics()["tandem:spec_decode_num_accepted_tokens_total"] > 0
        assert_biased(server)
    chat = [entry for event in events for entry in event["choices"][0]["logprobs"]["content"]]
    assert [entry["bytes"] for entry in chat] == [entry["bytes"] for entry in plain_chat]
    for got, want in zip(chat, plain_chat, strict=True):
        assert got["logprob"] == pytest.approx(want["logprob"], abs=1e-4)
        assert [t["token"] for t in got["top_logprobs"]] == [
            t["token"] for t in want["top_logprobs"]
        ]
