"""Routing policies: known prefixes, bounded load, shared prefixes, bounded memory."""

import pytest

from shared.options.router import CACHE_AWARE, LEAST_LOAD, ROUND_ROBIN
from shared.router.policy import (
    BLOCK_CHARACTERS,
    BLOCK_TOKENS,
    MAX_CONTINUATIONS,
    MAX_KEYS,
    PrefixTable,
    RoutingPolicy,
    prefix_keys,
)

IDLE = dict.fromkeys(range(4), 0)


def chat(texts, **fields):
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return prefix_keys({"messages": messages, **fields})


def test_chat_keys_extend_keys_of_prefix():
    assert chat(["a", "b", "c"])[:2] == chat(["a", "b"])
    assert chat(["a", "b"])[0] != chat(["x", "b"])[0]
    assert chat(["a", "b"])[1] != chat(["x", "b"])[1]


@pytest.mark.parametrize("field", ["model", "user", "tools"])
def test_chat_keys_differ_by_cache_namespace(field):
    assert not {*chat(["a", "b"], **{field: "one"})} & {*chat(["a", "b"], **{field: "two"})}


@pytest.mark.parametrize("size", [BLOCK_CHARACTERS, BLOCK_TOKENS])
def test_prompt_keys_cover_whole_blocks(size):
    text = "x" * (2 * size + 1) if size == BLOCK_CHARACTERS else [7] * (2 * size + 1)
    keys = prefix_keys({"prompt": text})
    assert len(keys) == 2
    assert prefix_keys({"prompt": [text, text]}) == keys
    assert prefix_keys({"prompt": text[:size]}) == keys[:1]


@pytest.mark.parametrize("body", [{}, {"prompt": 3}, {"prompt": []}, {"messages": "hi"}])
def test_invalid_prompts_have_no_keys(body):
    assert prefix_keys(body) == []


def test_number_of_keys_is_bounded():
    assert len(chat([str(i) for i in range(2 * MAX_KEYS)])) == MAX_KEYS


def test_conversation_stays_on_its_replica():
    policy, texts, chosen = RoutingPolicy(CACHE_AWARE), ["hi"], set()
    for turn in range(8):
        policy.choose(chat([f"other {turn}"]), IDLE)
        chosen.add(policy.choose(chat(texts), IDLE))
        texts += [f"answer {turn}", f"question {turn}"]
    assert len(chosen) == 1
    assert policy.num_by_prefix == 7


def test_conversation_leaves_replica_above_load_bound():
    policy = RoutingPolicy(CACHE_AWARE)
    first = policy.choose(chat(["a"]), IDLE)
    loads = dict.fromkeys(range(4), 4)
    assert policy.choose(chat(["a", "b", "c"]), loads | {first: 7}) == first
    assert policy.choose(chat(["a", "b", "d"]), loads | {first: 8}) != first


def test_absent_replica_is_not_chosen():
    policy = RoutingPolicy(CACHE_AWARE)
    first = policy.choose(chat(["a"]), IDLE)
    others = {i: 0 for i in range(4) if i != first}
    assert policy.choose(chat(["a", "b", "c"]), others) in others


def test_shared_system_prompt_does_not_pin():
    policy, counts = RoutingPolicy(CACHE_AWARE), dict.fromkeys(range(4), 0)
    for user in range(200):
        counts[policy.choose(chat(["the system prompt", "hello", f"user {user}"]), IDLE)] += 1
    assert max(counts.values()) <= 50 + MAX_CONTINUATIONS + 1


def test_forgotten_replica_loses_prefixes():
    policy = RoutingPolicy(CACHE_AWARE)
    first = policy.choose(chat(["a"]), IDLE)
    policy.forget(first)
    policy.choose(chat(["b"]), IDLE)
    assert policy.num_by_prefix == 0
    policy.choose(chat(["a", "b", "c"]), IDLE)
    assert policy.num_by_prefix == 0


def test_prefix_table_evicts_least_recently_used():
    table = PrefixTable(max_prefixes=3)
    for key in (b"a", b"b", b"c", b"a", b"d"):
        table.add([key], 1)
    assert len(table) == 3
    assert [*table.replicas([b"b"])] == []
    assert [*table.replicas([b"a"])] == [[1]]


def test_round_robin_ignores_load():
    policy = RoutingPolicy(ROUND_ROBIN)
    assert [policy.choose((), {0: 9, 1: 0, 2: 0}) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_least_load_breaks_ties_in_turn():
    policy = RoutingPolicy(LEAST_LOAD)
    assert policy.choose((), {0: 1, 1: 0}) == 1
    assert [policy.choose((), {0: 1, 1: 1}) for _ in range(3)] == [0, 1, 0]
