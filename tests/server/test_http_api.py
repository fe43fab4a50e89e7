"""HTTP routes of a real server process with the model-free test engine."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.support.echo_engine import HELD
from tests.support.field_requests import post_field
from tests.support.http_fixtures import (
    CHAT,
    COMPLETIONS,
    CONFIG_END,
    END,
    FAIL,
    POOL_TOKENS,
    REJECTED,
    SLOTS,
    SLOW,
    USER,
    Server,
    post_head,
    serving,
)

STOPPED = 'tandem:request_success_total{finished_reason="stop"}'
ABORTED = 'tandem:request_success_total{finished_reason="abort"}'


@pytest.fixture(scope="module")
def bare_server(tmp_path_factory) -> Iterator[Server]:
    """Starts a server without a tokenizer in its model folder."""
    with serving(
        ["-m", "tests.support.http_fixtures", str(tmp_path_factory.mktemp("bare"))]
    ) as running:
        yield running


def usage(prompt: int, completion: int) -> dict:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": 0, "image_tokens": 0},
    }


def test_completion_returns_text_tokens_usage_and_speculative(server):
    body = server.complete("wörld", max_tokens=8, temperature=0, return_token_ids=True)
    assert body["object"] == "text_completion"
    assert body["model"] == "repeater"
    choice = body["choices"][0]
    assert choice["text"] == "wörldw\ufffd"
    assert choice["token_ids"] == [*"wörld".encode(), *"wö".encode()[:2]]
    assert choice["finish_reason"] == "length"
    assert body["usage"] == usage(6, 8)
    # One token of the prefill, then 7 tokens in steps of 3.
    want = {"verify_steps": 3, "accept_length": 3.0, "accept_length_histogram": [0, 0, 3]}
    assert body["speculative"] == want


def test_one_token_completion_has_no_verify_steps(server):
    body = server.complete("x", max_tokens=1)
    want = {"verify_steps": 0, "accept_length": 1.0, "accept_length_histogram": [0, 0, 0]}
    assert body["speculative"] == want


@pytest.mark.parametrize(
    ("asked", "histogram"),
    [
        ({"enabled": False}, [6, 0, 0]),
        ({"enabled": False, "max_draft_tokens": 2}, [6, 0, 0]),
        ({"max_draft_tokens": 0}, [6, 0, 0]),
        ({"enabled": True, "max_draft_tokens": 1}, [0, 3, 0]),
        ({"max_draft_tokens": 1 << 16}, [0, 0, 2]),
        ({"enabled": True}, [0, 0, 2]),
        ({}, [0, 0, 2]),
        (None, [0, 0, 2]),
    ],
)
def test_speculative_field_limits_drafts_per_request(server, asked, histogram):
    fields = {"temperature": 0, "max_tokens": 7, "speculative": asked}
    body = server.complete("abc", **fields)
    assert body["choices"][0]["text"] == "abcabca"
    assert body["speculative"]["accept_length_histogram"] == histogram
    chat = server.post(CHAT, messages=USER, **fields).json()
    assert chat["speculative"]["accept_length_histogram"] == histogram


@pytest.mark.parametrize("end", [END, CONFIG_END], ids=["tokenizer", "config"])
def test_eos_token_ends_completion_unless_ignore_eos(server, end):
    prompt = [*b"ab", end, *b"cd"]
    plain = server.complete(prompt, temperature=0, max_tokens=9, return_token_ids=True)
    assert plain["choices"][0]["text"] == "ab"
    assert plain["choices"][0]["token_ids"] == [*b"ab", end]
    assert plain["choices"][0]["finish_reason"] == "stop"
    ignoring = server.complete(prompt, temperature=0, max_tokens=9, ignore_eos=True)
    assert ignoring["choices"][0]["text"] == "abcdabc"
    stopped = server.complete(prompt, temperature=0, ignore_eos=True, stop_token_ids=[100])
    assert stopped["choices"][0]["text"] == "abc"


def test_stop_string_truncates_text_tokens_and_usage(server):
    stopped = server.metrics()[STOPPED]
    prompt = [SLOW, *b"hello world"]  # slow enough to be aborted before max_tokens
    fields = {"temperature": 0, "max_tokens": 200, "stop": ["o w"], "return_token_ids": True}
    body = server.complete(prompt, **fields)
    choice = body["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hell", "stop")
    assert choice["token_ids"] == [SLOW, *b"hello w"]
    assert body["usage"]["completion_tokens"] == 8
    assert body["speculative"]["verify_steps"] == 3
    server.wait_for_metric(STOPPED, stopped + 1)  # the engine aborted the request


def test_n_choices_of_one_seed_differ(server):
    """The first choice equals the choice of a request with `n` 1."""
    alone = server.complete("abc", seed=7, max_tokens=4)
    body = server.complete("abc", seed=7, n=8, max_tokens=4)
    texts = [choice["text"] for choice in body["choices"]]
    assert [choice["index"] for choice in body["choices"]] == list(range(8))
    assert texts[0] == alone["choices"][0]["text"]
    assert len(set(texts)) > 1
    assert body["usage"] == usage(3, 32)
    assert body["speculative"]["verify_steps"] == 8
    below = server.complete("abc", seed=-(2**63), max_tokens=4)  # minimum of signed 64 bits
    assert len(below["choices"]) == 1


def test_equal_prompts_differ_unless_seeded(server):
    prompts = ["abc"] * 8
    texts = [choice["text"] for choice in server.complete(prompts, max_tokens=1)["choices"]]
    assert len(set(texts)) > 1
    seeded = server.complete(prompts, seed=7, n=2, max_tokens=1)["choices"]
    alone = server.complete("abc", seed=7, n=2, max_tokens=1)["choices"]
    assert [choice["text"] for choice in seeded] == [choice["text"] for choice in alone] * 8


def test_prompt_list_choices_keep_prompt_order(server):
    body = server.complete(["ab", "cd"], n=2, temperature=0, max_tokens=2)
    assert [choice["text"] for choice in body["choices"]] == ["ab", "ab", "cd", "cd"]
    assert body["usage"]["prompt_tokens"] == 4
    ids = server.complete([[97, 98], [99]], temperature=0, max_tokens=2)
    assert [choice["text"] for choice in ids["choices"]] == ["ab", "cc"]


def test_completion_stream_equals_whole_response(server):
    fields = {"prompt": "grün 你好", "max_tokens": 30, "temperature": 0, "stop": "你好g"}
    whole = server.complete(**fields, return_token_ids=True)
    events = server.stream(COMPLETIONS, **fields, return_token_ids=True)
    choices = [event["choices"][0] for event in events]
    assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"]
    tokens = [token for choice in choices for token in choice["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"]
    assert [len(c["token_ids"]) for c in choices][:2] == [1, 3]  # one step each
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["stop"]
    assert events[-1]["usage"] == whole["usage"]
    assert events[-1]["speculative"] == whole["speculative"]
    assert all("usage" not in event for event in events[:-1])
    assert len({event["id"] for event in events}) == 1


def test_completion_stream_ends_with_total_usage(server):
    events = server.stream(COMPLETIONS, prompt="abc", n=3, max_tokens=5, temperature=0)
    ends = [e["choices"][0]["index"] for e in events if e["choices"][0]["finish_reason"]]
    assert sorted(ends) == [0, 1, 2]
    assert events[-1]["usage"]["completion_tokens"] == 15
    assert events[-1]["speculative"]["verify_steps"] == 6


def test_include_usage_sends_separate_last_event(server):
    options = {"include_usage": True}
    events = server.stream(CHAT, messages=USER, max_tokens=2, stream_options=options)
    assert events[-1]["choices"] == []
    assert events[-1]["usage"]["completion_tokens"] == 2
    assert events[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "usage" not in events[-2]


def test_chat_stream_choices_begin_with_role(server):
    """Also if the first token of a choice has no text yet."""
    messages = [{"role": "user", "content": "h"}]
    fields = {"logit_bias": {"195": 100}, "max_tokens": 4, "n": 3}  # first half of a character
    events = server.stream(CHAT, messages=messages, **fields)
    firsts: dict[int, dict] = {}
    for choice in (event["choices"][0] for event in events):
        firsts.setdefault(choice["index"], choice["delta"])
    assert [firsts[i]["role"] for i in range(3)] == ["assistant"] * 3


def test_logit_bias_and_min_tokens_change_output(server):
    body = server.complete("abc", logit_bias={"120": 50.5, "98": -100}, max_tokens=3)
    assert body["choices"][0]["text"] == "xxx"
    prompt, fields = [97, END], {"temperature": 0, "max_tokens": 8}
    body = server.complete(prompt, **fields, min_tokens=4)
    assert body["choices"][0]["text"] == "a-a-a"
    assert body["choices"][0]["finish_reason"] == "stop"


def test_chat_uses_template_and_remaining_context(server):
    body = server.post(CHAT, messages=USER, temperature=0, stop="hihi").json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": ""}
    assert body["usage"]["prompt_tokens"] == 4  # <|user|>hi<|assistant|>
    body = server.post(CHAT, messages=USER, temperature=0, ignore_eos=True).json()
    assert body["usage"]["total_tokens"] == POOL_TOKENS
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    again = server.post(CHAT, messages=parts, temperature=0, max_completion_tokens=3).json()
    assert again["usage"]["completion_tokens"] == 3


def test_engine_rejection_returns_400(server):
    for stream in (False, True):
        answer = server.post(COMPLETIONS, prompt=[REJECTED], n=2, stream=stream)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["message"], error["param"]) == ("the engine refuses this prompt", "prompt")
    answer = server.post(CHAT, messages=USER, logit_bias={str(REJECTED): 1})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    server.wait_for_metric("tandem:num_requests_running", 0)


def test_failed_row_returns_500_and_neighbours_continue(server):
    results: list[dict] = []
    slow = {"temperature": 0, "max_tokens": 60}
    neighbour = threading.Thread(
        target=lambda: results.append(server.complete([SLOW, *b"abc"], **slow))
    )
    neighbour.start()
    prompt = [FAIL, *b"abc"]
    answer = server.post(COMPLETIONS, prompt=prompt)
    assert answer.status_code == 500
    assert answer.json()["error"]["message"] == "the logits are not finite"
    events = server.stream(COMPLETIONS, prompt=prompt)
    assert events[-1]["error"]["message"] == "the logits are not finite"
    neighbour.join()
    assert results[0]["usage"]["completion_tokens"] == 60


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts_request(server, stream):
    """Non-streaming handlers are not cancelled by the framework (s#36333)."""
    before = server.metrics()
    aborted = before[ABORTED]
    with server.post_and_leave(prompt=HELD, max_tokens=200, n=2, stream=stream):
        server.wait_for_metric("tandem:num_requests_running", 2)
    server.wait_for_metric("tandem:num_requests_running", 0)
    server.wait_for_metric(ABORTED, aborted + 2)
    # Aborted requests are not counted in the latency histogram.
    ended = "tandem:e2e_request_latency_seconds_count"
    assert server.metrics()[ended] == before[ended]


def test_disconnect_removes_waiting_requests(server):
    with server.post_and_leave(prompt=HELD, max_tokens=100, n=20):
        server.wait_for_metric("tandem:num_requests_waiting", 20 - SLOTS)
    server.wait_for_metric("tandem:num_requests_waiting", 0)


def test_capabilities_list_drafters_and_unsupported_fields(server):
    found = httpx.get(server.url + "/capabilities").json()
    assert "NEXTN" in found["drafters"]
    for entry in found["unsupported"]:
        assert entry.keys() == {"reason", "hint", "example"}
        assert entry["example"]["drafter"] in found["drafters"]
        endpoints = entry["example"].get("endpoints", ["completions", "chat"])
        for name, value in entry["example"]["request"].items():
            for endpoint in endpoints:
                answer = post_field(server, endpoint, name, value)
                assert answer.status_code == 400, (endpoint, name)
                error = answer.json()["error"]
                if endpoint == "messages":
                    assert error["message"].startswith(name.replace("[]", "") + ": ")
                else:
                    assert error["param"] == name


def test_health_and_metrics_return_values(server):
    assert httpx.get(server.url + "/health").status_code == 200
    server.complete("a")
    metrics = server.metrics()
    assert metrics["tandem:request_slots_free"] == 4
    assert metrics["tandem:e2e_request_latency_seconds_count"] >= 1
    assert metrics["tandem:time_to_first_token_seconds_count"] >= 1


def test_server_without_tokenizer_accepts_only_token_ids(bare_server):
    body = bare_server.complete([1, 2], temperature=0, max_tokens=3, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == [1, 2, 1]
    assert body["choices"][0]["text"] == ""
    ended = bare_server.complete([1, CONFIG_END], temperature=0, max_tokens=3)
    assert ended["choices"][0]["finish_reason"] == "stop"
    for path, fields, param in (
        (COMPLETIONS, {"prompt": "text"}, "prompt"),
        (COMPLETIONS, {"prompt": [1], "stop": "x"}, "stop"),
        (CHAT, {"messages": USER}, "messages"),
    ):
        answer = bare_server.post(path, **fields)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def test_slow_reader_does_not_block_other_requests(server):
    host, port = server.url.removeprefix("http://").split(":")
    fields = {"prompt": "abc", "max_tokens": 250, "stream": True, "n": 64, "temperature": 0}
    body = json.dumps(fields)
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect((host, int(port)))
        connection.sendall(post_head(COMPLETIONS, len(body)) + body.encode())
        started = time.monotonic()
        server.complete("a", max_tokens=2)
        assert time.monotonic() - started < 10


def test_generation_config_sets_sampling_defaults(tmp_path):
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.0}')
    with serving(["-m", "tests.support.http_fixtures", str(tmp_path)]) as own:
        fields = {"n": 16, "max_tokens": 1, "return_token_ids": True}
        greedy = own.complete([SLOW, 97], **fields)["choices"]
        assert [choice["token_ids"] for choice in greedy] == [[SLOW]] * 16
        sampled = own.complete([SLOW, 97], **fields, temperature=1)["choices"]
        assert len({tuple(choice["token_ids"]) for choice in sampled}) > 1
