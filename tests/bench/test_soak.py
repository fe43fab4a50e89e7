"""Soak benchmark: growth of resources, scripts of agent sessions, and their checks."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from bench.soak import agents
from bench.soak.__main__ import main
from bench.soak.clients import BODIES, Answer, Call
from bench.soak.resources import MODEL, Growth, Sample, judge, metrics
from bench.soak.runs import (
    UNIT,
    CacheModel,
    Record,
    Run,
    fault_of,
    next_messages,
    prefix_keys,
    quarters,
    results,
)
from bench.soak.sessions import APIS, SCHEMA, TENANTS, Round, edited, sessions

MINUTES = 10
RNG = random.Random(1)
RECORD = Record(
    session=0,
    round=0,
    output="",
    fault="",
    prompt_tokens=1,
    cached_tokens=0,
    at_least=0,
    at_most=0,
    seconds=0.0,
)


def steady(count: int = 80) -> list[Sample]:
    """A server with caches that fill in the first quarter, and noise afterwards."""
    return [
        Sample(
            at_s=2.0 * i,
            rss_bytes=(400 << 20) + min(i, count // 4) * (4 << 20) + RNG.randrange(3 << 20),
            threads=13,
            files=33 + RNG.randrange(7),
            acceptance=2.5 + RNG.uniform(-0.1, 0.1),
        )
        for i in range(count)
    ]


def test_judge_accepts_noise_and_initial_growth():
    assert set(judge(steady())) == {"rss_bytes", "threads", "files", "acceptance"}


@pytest.mark.parametrize(
    ("name", "grown"),
    [
        ("rss_bytes", lambda s, i: s.rss_bytes + i * (1 << 20)),
        ("threads", lambda s, i: s.threads + i // 6),
        ("files", lambda s, i: s.files + i // 8),
        ("acceptance", lambda s, i: s.acceptance - i / 400),
    ],
)
def test_judge_detects_slow_growth(name, grown):
    samples = [replace(s, **{name: grown(s, i)}) for i, s in enumerate(steady())]
    with pytest.raises(Growth, match=f"^{name} went from"):
        judge(samples)


def test_metrics_summed_by_name():
    page = '# HELP a\ntandem:a_total{model_name="x",k="1"} 2.0\ntandem:a_total{k="2"} 3.0\nb 1\n'
    assert metrics(page) == {"a_total": 5.0, "b": 1.0}


@pytest.mark.matrix
def test_soak_of_mixed_traffic_has_no_growth(tmp_path):
    assert main(["--minutes", str(MINUTES), "--out", str(tmp_path / "soak.json")]) == 0


def test_sessions_mix_apis_tenants_and_rounds():
    made = sessions(12, (30, 60), 1)
    assert made == sessions(12, (30, 60), 1) != sessions(12, (30, 60), 2)
    assert {(each.api, each.tenant) for each in made} == {(a, t) for a in APIS for t in TENANTS}
    assert all(30 <= len(each.rounds) <= 60 for each in made)
    rounds = [round for each in made for round in each.rounds]
    for is_present in (
        lambda round: round.kind == "call",
        lambda round: round.kind == "schema",
        lambda round: round.dropped,
        lambda round: round.aborts_after,
        lambda round: round.is_streamed,
        lambda round: round.temperature,
    ):
        assert 0 < sum(map(bool, map(is_present, rounds))) < len(rounds)
    for schema in (each.schemas[round.tool] for each in made for round in each.rounds):
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema["additionalProperties"] is False
        assert schema["required"] == list(schema["properties"])


CALL = Call("c1", "find_order", {"city": "Oslo"})


def conversation() -> list[dict[str, Any]]:
    answers = [Answer("I look.", (CALL,), 9, 0, True), Answer("Fine.", (), 9, 0, True)]
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Find it."},
        answers[0].message,
        *results(answers[0], round_of()),
        answers[1].message,
    ]


def round_of(**fields: Any) -> Round:
    return replace(sessions(1, (1, 1), 0)[0].rounds[0], result="found", text="so?", **fields)


def test_edit_ends_before_user_message():
    messages = conversation()
    assert edited(messages, 0) is messages
    for dropped in range(1, 9):
        assert edited(messages, dropped) == messages[:1]
    more = [*messages, {"role": "user", "content": "more"}, messages[-1]]
    assert edited(more, 1) == edited(more, 2) == messages
    assert edited(more, 3) == messages[:1]


def test_round_after_results_adds_no_user_message():
    messages = conversation()[:-1]
    assert next_messages(messages, round_of(dropped=0)) == messages
    assert next_messages(messages, round_of(dropped=2))[-1] == {"role": "user", "content": "so?"}
    assert next_messages(conversation(), round_of(dropped=0))[-1]["content"] == "so?"


def test_bodies_convert_conversation_to_each_api():
    session, messages = (
        sessions(1, (1, 1), 0)[0],
        [*conversation(), {"role": "user", "content": "?"}],
    )
    round = round_of(kind="schema")
    items = BODIES["responses"](session, messages, round)["input"]
    kinds = [item.get("type", item.get("role")) for item in items]
    assert kinds == [
        *("system", "user", "assistant", "function_call", "function_call_output"),
        *("assistant", "user"),
    ]
    body = BODIES["messages"](session, messages, round)
    assert body["system"] == "Be brief."
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["user", "assistant", "user", "assistant", "user"]
    assert [block["type"] for block in body["messages"][1]["content"]] == ["text", "tool_use"]
    assert body["messages"][2]["content"][0]["tool_use_id"] == "c1"
    assert body["tool_choice"] == {"type": "none"}
    chat = BODIES["chat"](session, messages, round)
    assert chat["tool_choice"] == "none"
    assert chat["messages"] == messages
    assert chat["response_format"]["json_schema"]["schema"] == SCHEMA


@pytest.mark.parametrize(
    ("kind", "text", "calls", "is_complete", "fault"),
    [
        ("text", "anything", (), False, ""),
        ("schema", '{"color": "red", "is_done": true, "count": 3}', (), True, ""),
        ("schema", '{"color": "pink", "is_done": true, "count": 3}', (), True, "'pink' is not one"),
        ("schema", "{", (), True, "schema: "),
        ("schema", "{", (), False, "schema ended by the token limit"),
        ("call", "", (), True, "call: not enough values"),
        ("call", "", (Call("c", "other", {}),), True, "call: 'other'"),
    ],
)
def test_fault_of_names_invalid_output(kind, text, calls, is_complete, fault):
    session = sessions(1, (1, 1), 0)[0]
    answer = Answer(text, calls, 1, 0, is_complete)
    found = fault_of(session, round_of(kind=kind), answer)
    assert (found == "") == (fault == "")
    assert fault in found


def test_fault_of_rejects_missing_argument():
    session = sessions(1, (1, 1), 0)[0]
    answer = Answer("", (Call("c", session.rounds[0].tool, {}),), 1, 0, True)
    round = replace(session.rounds[0], kind="call")
    assert "is a required property" in fault_of(session, round, answer)


def test_cache_bounds_follow_session_and_tenant():
    one, *others = sessions(8, (1, 1), 0)
    same = next(each for each in others if each.tenant == one.tenant)
    other = next(each for each in others if each.tenant != one.tenant)
    cache, prompt = CacheModel(), list(range(3 * UNIT + 5))
    assert cache.bounds(one, prompt) == (0, 0)
    cache.add_text(one, prompt)
    cache.add_prompt(one, prompt)
    cache.add_text(one, [*prompt, *range(UNIT)])
    longer = [*prompt, *range(UNIT), 9]
    assert cache.bounds(one, longer) == (3 * UNIT, 4 * UNIT)
    assert cache.bounds(same, longer) == (0, 4 * UNIT)
    assert cache.bounds(other, longer) == (0, 0)
    assert cache.bounds(one, [7, *longer]) == (0, 0)
    assert cache.bounds(one, prompt[: 3 * UNIT]) == (0, 2 * UNIT)  # the last token is computed
    assert len(prefix_keys(longer)) == 4


def test_cache_bound_requires_token_after_prefix():
    """A page of an EAGLE-like head is cached under its tokens and the one after them."""
    session = sessions(1, (1, 1), 0)[0]
    cache, prompt = CacheModel(), list(range(2 * UNIT + 1))
    cache.add_text(session, prompt)
    cache.add_prompt(session, prompt)
    other = [*prompt[:-1], -1, -2]
    assert cache.bounds(session, [*prompt, -2]) == (2 * UNIT, 2 * UNIT)
    assert cache.bounds(session, other) == (0, 2 * UNIT)


def test_quarters_of_latencies_are_medians():
    found = [replace(RECORD, round=i, seconds=float(i // 2)) for i in range(8)]
    assert quarters(found) == [0.0, 1000.0, 2000.0, 3000.0]


def test_agent_results_written_after_each_drafter(tmp_path, monkeypatch):
    """A run that ends early keeps the results of the drafters before."""
    out, runs = tmp_path / "soak.json", []

    def played(args, played, draft, cached, plain):
        if len(runs) == 2:
            raise RuntimeError("the server ended")
        runs.append(draft)
        record = replace(RECORD, output="a", prompt_tokens=64, seconds=0.1)
        run = Run("http://unused", MODEL, 1, lambda: None, plain)
        run.records.append(record)
        return run, [], 1.0

    monkeypatch.setattr(agents, "play", played)
    words = ["--sessions", "1", "--drafts", "NEXTN:S=3", "NGRAM:N=8", "--out", str(out)]
    assert main(words) == 2
    lines = json.loads(out.read_text(encoding="utf-8"))["lines"]
    assert [line["drafts"] for line in lines] == ["none", "NEXTN:S=3"]


@pytest.mark.matrix
def test_agent_sessions_with_drafts_equal_plain_decoding(tmp_path, capsys):
    out = tmp_path / "soak.json"
    size = ["--sessions", "2", "--rounds", "2", "3", "--at-once", "2", "--context-length", "2048"]
    assert main([*size, "--drafts", "NEXTN:S=3", "--out", str(out)]) == 0
    report = json.loads(out.read_text(encoding="utf-8"))
    plain, drafted = report["lines"]
    assert (plain["cached"], drafted["cached"]) == (False, True)
    assert drafted["accept_length"] > 1
    assert plain["hit_rate"] == 0 < drafted["hit_rate"] <= drafted["most_rate"]
    assert "| NEXTN:S=3 | on |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--sessions", "1", "--rounds", "3", "2"], "LOW at most HIGH"),
        (["--sessions", "-1"], "must be positive"),
        (["--sessions", "1", "--flags=--nothing"], "the server did not start"),
    ],
)
def test_invalid_sessions_exit_with_message(words, fault, capsys):
    assert main(words) == 2
    assert fault in capsys.readouterr().err
