"""Step traces of a request, in its stream and at `/v1/requests/ID/trace`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from shared.engine.request import DRAFT, NGRAM, PLAIN, PREFILL, StepTrace
from shared.server.completions.logprobs import TokenNames
from shared.server.completions.traces import MAX_TRACES, Traces, step_json
from shared.server.protocol import response_types as answers
from tests.support.http_fixtures import (
    CHAT,
    COMPLETIONS,
    FAIL,
    SLOW,
    TOKENS_PER_STEP,
    USER,
    Server,
    save_tokenizer,
    serving,
)
from tests.support.polling import wait_until


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    made = tmp_path_factory.mktemp("model")
    save_tokenizer(made)
    return str(made)


@pytest.fixture(scope="module")
def server(folder) -> Iterator[Server]:
    with serving(["-m", "tests.support.http_fixtures", folder]) as running:
        yield running


def trace_of(server: Server, name: str) -> dict[str, Any]:
    answer = httpx.get(f"{server.url}/v1/requests/{name}/trace")
    assert answer.status_code == 200, answer.text
    answers.RequestTrace.model_validate(answer.json())
    return answer.json()


def values_of(steps: list[dict[str, Any]], field: str) -> list[Any]:
    return [token[field] for step in steps for token in step["tokens"]]


def test_trace_steps_equal_text_tokens_and_totals(server):
    fields = {"prompt": "naïve ✓ text", "max_tokens": 40, "return_token_ids": True, "trace": True}
    whole = server.complete(**fields)
    trace = trace_of(server, whole["id"])
    (choice,) = trace["choices"]
    steps = choice["steps"]
    assert "".join(values_of(steps, "text")) == whole["choices"][0]["text"]
    assert values_of(steps, "token") == whole["choices"][0]["token_ids"]
    assert choice["finish_reason"] == whole["choices"][0]["finish_reason"] == "length"
    reported = whole["speculative"]
    verified = [step for step in steps if step["source"] != PREFILL]
    assert len(verified) == reported["verify_steps"]
    accepted = [sum(draft["accepted"] for draft in step["drafts"]) for step in verified[:-1]]
    assert set(accepted) == {TOKENS_PER_STEP - 1}
    assert steps[0]["source"] == PREFILL
    assert values_of(steps[:1], "origin") == ["target"]
    assert values_of(steps[1:2], "origin") == ["draft", "draft", "bonus"]
    assert values_of(steps[1:2], "depth") == [1, 2, 0]
    assert (trace["model"], trace["dropped_steps"]) == (whole["model"], 0)


def test_trace_text_equals_output_with_incomplete_character(server):
    whole = server.complete("a✓", max_tokens=6, temperature=0, trace=True)
    (choice,) = trace_of(server, whole["id"])["choices"]
    text = "".join(values_of(choice["steps"], "text"))
    assert text == whole["choices"][0]["text"] == "a✓a\ufffd"


def test_trace_stream_events_equal_stored_steps(server):
    events = server.stream(CHAT, messages=USER, max_tokens=20, temperature=0, trace=True)
    for event in events:
        answers.ChatEvent.model_validate(event)
    streamed = [event["choices"][0]["trace"] for event in events]
    trace = trace_of(server, events[0]["id"])
    assert streamed == trace["choices"][0]["steps"]
    text = "".join(event["choices"][0]["delta"]["content"] or "" for event in events)
    assert "".join(values_of(streamed, "text")) == text


def test_trace_absent_unless_requested(server):
    plain = server.complete("ab", max_tokens=4)
    answer = httpx.get(f"{server.url}/v1/requests/{plain['id']}/trace")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "trace_not_found"
    for event in server.stream(COMPLETIONS, prompt="ab", max_tokens=4, trace=False):
        assert "trace" not in event["choices"][0]


def test_trace_choices_have_own_steps(server):
    whole = server.complete(["ab", "cd"], n=2, max_tokens=5, seed=1, trace=True)
    trace = trace_of(server, whole["id"])
    for reported, choice in zip(trace["choices"], whole["choices"], strict=True):
        assert reported["index"] == choice["index"]
        assert "".join(values_of(reported["steps"], "text")) == choice["text"]


def test_trace_ends_at_stop_string(server):
    whole = server.complete(
        "abcdefgh", max_tokens=30, temperature=0, stop=["fg"], return_token_ids=True, trace=True
    )
    (choice,) = trace_of(server, whole["id"])["choices"]
    assert values_of(choice["steps"], "token") == whole["choices"][0]["token_ids"]
    assert "".join(values_of(choice["steps"], "text")) == whole["choices"][0]["text"] + "fg"
    assert choice["finish_reason"] == "stop"


def test_trace_without_speculation_has_plain_steps(server):
    whole = server.complete("abc", max_tokens=6, trace=True, speculative={"enabled": False})
    (choice,) = trace_of(server, whole["id"])["choices"]
    assert [step["source"] for step in choice["steps"]] == [PREFILL] + [PLAIN] * 5
    assert set(values_of(choice["steps"][1:], "origin")) == {"target"}


def test_trace_grows_during_request_and_reports_abort(server):
    body = {"prompt": [SLOW, 97], "max_tokens": 300, "stream": True, "trace": True}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        name = json.loads(next(lines).removeprefix("data: "))["id"]
        before = trace_of(server, name)["choices"][0]
        assert before["finish_reason"] is None
        for _ in range(20):
            next(lines)
        assert len(trace_of(server, name)["choices"][0]["steps"]) > len(before["steps"])
    assert wait_until(lambda: trace_of(server, name)["choices"][0]["finish_reason"] == "abort")


def test_trace_of_failed_request_keeps_steps(server):
    events = server.stream(COMPLETIONS, prompt=[FAIL, 97], max_tokens=20, trace=True)
    (choice,) = trace_of(server, events[0]["id"])["choices"]
    assert choice["finish_reason"] == "error"
    assert choice["steps"]


def test_trace_all_requests_stores_trace_without_streaming_it(folder):
    with serving(["-m", "tests.support.http_fixtures", folder, "--trace-all-requests"]) as server:
        events = server.stream(COMPLETIONS, prompt="ab", max_tokens=4)
        assert all("trace" not in event["choices"][0] for event in events)
        assert trace_of(server, events[0]["id"])["choices"][0]["steps"]


# Stored traces


def step(size: int) -> dict[str, Any]:
    return {"a": "x" * (size - len('{"a":""}'))}


def test_traces_keep_latest_max_traces():
    kept = Traces()
    for number in range(MAX_TRACES + 3):
        kept.open(f"r{number}", {}, 1).add(0, step(100), "stop")
    assert kept.find("r2") is None
    assert kept.find("r3") is not None
    assert kept.find(f"r{MAX_TRACES + 2}") is not None


def test_traces_bounded_in_bytes_report_dropped_steps():
    kept = Traces(max_traces=10, max_bytes=1000)
    old, new = kept.open("old", {}, 1), kept.open("new", {}, 2)
    for _ in range(5):
        old.add(0, step(100), None)
        new.add(1, step(100), None)
    assert kept.find("old") is old
    new.add(0, step(100), None)
    assert kept.find("old") is None
    old.add(0, step(100), None)  # still running, but evicted
    assert old.num_bytes == 0
    for _ in range(9):
        new.add(0, step(100), None)
    reported = json.loads(new.to_json())
    assert new.num_bytes == 1000
    assert reported["dropped_steps"] == 5
    assert [len(choice["steps"]) for choice in reported["choices"]] == [10, 0]


def test_step_json_reports_draft_sources():
    tree = StepTrace(
        number=3,
        source=NGRAM,
        num_rows=2,
        at_ms=5.0,
        host_ms=2.0,
        device_ms=None,
        drafts=[10, 11, 12],
        parents=[0, 0, 2],
        path=[2, 3],
        origins=["ngram", "ngram", "corpus"],
    )
    reported = step_json(tree, [11, 12, 13], ["a", "b", "c"], TokenNames(None))
    answers.TracedStep.model_validate(reported)
    assert [draft["origin"] for draft in reported["drafts"]] == ["ngram", "ngram", "corpus"]
    assert [draft["accepted"] for draft in reported["drafts"]] == [False, True, True]
    assert [draft["depth"] for draft in reported["drafts"]] == [1, 1, 2]
    tokens = [(token["origin"], token["node"], token["depth"]) for token in reported["tokens"]]
    assert tokens == [("ngram", 2, 1), ("corpus", 3, 2), ("bonus", 0, 0)]
    short = step_json(tree, [11], ["a"], TokenNames(None))
    assert [token["node"] for token in short["tokens"]] == [2]
    assert DRAFT not in {token["origin"] for token in reported["tokens"]}
