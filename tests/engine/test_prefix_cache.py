"""The prefix cache on the toy backend: equal outputs and no lost pages after any hit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings

from shared.engine.cache_policy import NO_CACHE
from shared.engine.radix_cache import RadixCache
from shared.engine.request import CacheNamespace, FinishReason
from tests.support.cached_traffic import (
    KINDS,
    UNIT,
    CachedTraffic,
    family,
    give_back_all,
    make,
    request,
    serve,
    tokens,
)
from tests.support.run_engine import checked_step, drive
from tests.support.toy_backend import POISON

# Chains with overlap 1, random shapes with overlap 0 and 2; other pairs are matrix tests.
STEPS = [(True, 0), (False, 1), (True, 2)]
STEPS += [pytest.param(not plain, n, marks=pytest.mark.matrix) for plain, n in STEPS]

BASE = CacheNamespace("")


@pytest.mark.parametrize(("any_shape", "overlap"), STEPS)
@pytest.mark.parametrize("num_pages", [65, 400])
@pytest.mark.parametrize("kind", KINDS)
def test_prefix_cache_output_equals_plain(kind, any_shape, num_pages, overlap):
    """The toy backend fails if pages, states, draft KV or counts are of another request."""
    engine = make(kind, num_pages=num_pages, overlap=overlap, any_shape=any_shape)
    for round_ in range(3):
        serve(engine, *family(round_, 30))
    found = engine.metrics.snapshot()
    assert found["prefix_cache_hits_total"] < found["prefix_cache_queries_total"]
    assert found["prefix_cache_hits_total"] > 0 or ("hybrid" in kind and num_pages == 65)
    assert (engine.scheduler.num_preemptions > 0) == (num_pages == 65)
    assert found["kv_cache_usage_perc"] == 0.0


# The snapshots of an output are in positions whose window pages are freed meanwhile.
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "windowed hybrid"])
def test_prefix_cache_reuses_chat_history(kind):
    """Full pages are reusable; in a hybrid, whole snapshot intervals of 64 tokens."""
    engine, text = make(kind), tokens(1, 70)
    known = found = reusable = 0
    for turn in range(8):
        one = request(text, max_tokens=31)
        (answer,) = serve(engine, one)
        found += one.cached_tokens
        unit = UNIT if kind == "hybrid" else 4
        reusable += known // unit * unit
        known = len(text) + len(answer) - 1  # the last token has no KV
        text = [*text, *answer, *tokens(turn, 12)]
    assert found >= 0.95 * reusable > 1000


def test_key_lookahead_costs_one_token_per_hit():
    """A draft KV row depends on the next token, which costs a hit one token on average."""
    text, found = tokens(2, 100), {}
    for kind in ("plain model", "head"):
        lengths = []
        for parting in range(40, 60):
            engine = make(kind)
            other = [*text[:parting], POISON - 1 - text[parting], *text[parting + 1 :]]
            serve(engine, request(text))
            second = request(other)
            serve(engine, second)
            lengths.append(second.cached_tokens)
            assert lengths[-1] == (parting - (kind == "head")) // 4 * 4
        found[kind] = sum(lengths) / len(lengths)
    assert found["plain model"] - found["head"] == 1.0


def test_repeated_prompt_prefills_only_last_page():
    for kind, least in (("plain model", 196), ("head", 196), ("hybrid", 192)):
        engine, prompt = make(kind), tokens(3, 200)
        serve(engine, request(prompt))
        again = request(prompt)
        serve(engine, again)
        assert again.cached_tokens == least
        assert engine.backend.num_fed == 200 + 200 - least


@pytest.mark.parametrize("kind", ["plain model", "head", "hybrid"])
@pytest.mark.parametrize("overlap", [0, 2])
def test_choices_of_prompt_prefill_once(kind, overlap):
    """They arrive together; all but the first wait until its prompt is cached."""
    engine, prompt = make(kind, overlap=overlap), tokens(3, 200)
    choices = [request(prompt, seed32=seed) for seed in range(4)]
    serve(engine, *choices)
    most = 192 if kind == "hybrid" else 196
    assert [each.cached_tokens for each in choices] == [0, most, most, most]
    assert engine.backend.num_fed == 200 + 3 * (200 - most)


@pytest.mark.parametrize("kind", ["plain model", "hybrid"])
def test_concurrent_prompts_share_common_prefix(kind):
    engine, system = make(kind), tokens(12, 150)
    asked = [request([*system, *tokens(40 + n, 60)]) for n in range(4)]
    serve(engine, *asked)
    # A plain model could reuse 148; the last 20 are not worth waiting for another chunk.
    assert [each.cached_tokens for each in asked] == [0, 128, 128, 128]


def test_duplicate_pages_of_concurrent_requests_not_pinned():
    """A pinned page that a request does not own is lost to both, until the pool is empty."""
    engine, prompt = make("plain model", overlap=0), tokens(13, 60)
    first, second = request(prompt, seed32=1), request(prompt, seed32=2)
    serve(engine, first, second)
    assert (first.cached_tokens, second.cached_tokens) == (0, 0)
    give_back_all(engine.cache)


def test_prompts_with_short_common_prefix_run_at_once():
    engine, system = make("plain model", overlap=0), tokens(12, 60)
    asked = [request([*system, *tokens(40 + n, 60)]) for n in range(3)]
    for each in asked:
        engine.add(each)
    checked_step(engine)
    assert len(engine.scheduler.running) == 3


def test_waiting_request_lookup_repeats_only_after_cache_change(monkeypatch):
    engine, looked_up = make("plain model", num_pages=52), []
    path = RadixCache.path

    def counted(tree: RadixCache, *args) -> list:
        looked_up.append(tree.num_changes)
        return path(tree, *args)

    monkeypatch.setattr(RadixCache, "path", counted)
    first, second = tokens(1, 120), tokens(2, 80)
    serve(engine, request(first))  # fills the cache
    engine.add(request(first, max_tokens=60))
    engine.add(request(first[:40] + second, max_tokens=4))
    engine.step()
    looked_up.clear()
    steps = 0
    while engine.scheduler.waiting:
        engine.step()
        steps += 1
    assert steps > 10
    assert looked_up == sorted(set(looked_up))  # once per change of the cache
    assert len(looked_up) < steps / 2


def test_prefix_cache_isolates_tenants():
    engine, prompt = make("head"), tokens(3, 100)
    one, other, again = (request(prompt, tenant=name) for name in ("a", "b", "a"))
    serve(engine, one)
    serve(engine, other)
    serve(engine, again)
    assert (other.cached_tokens, again.cached_tokens) == (0, 96)


def test_failed_request_adds_no_cache_pages():
    """Its pages may contain NaN; the pages of its cache hit stay."""
    engine, begin = make("hybrid"), tokens(4, 129)
    serve(engine, request(begin))
    kept = engine.cache.num_pages
    failing = request([*begin, *tokens(5, 30), POISON, *tokens(6, 10)])
    outcome = drive(engine, [failing])[failing.request_id]
    assert outcome.finish_reason is FinishReason.ERROR
    assert failing.cached_tokens == 128
    assert engine.cache.num_pages == kept


def test_failed_decode_caches_prompt_pages_only():
    engine = make("hybrid", overlap=0)
    one = request(tokens(4, 60), max_tokens=100)
    engine.add(one)
    while len(one.output) < 80:
        checked_step(engine)
    engine._fail(one)
    assert engine.cache.num_pages == 60 // 4 - 1, "the last page waits for the token after it"
    assert engine.cache.num_states == 0
    engine.cache.check([])


def test_preempted_request_resumes_from_cached_pages():
    fed = {}
    for kind in ("plain model", "off"):
        engine = make("plain model", num_pages=60, overlap=0)
        if kind == "off":
            engine.cache.policy = NO_CACHE
        asked = [request(tokens(n, 60), max_tokens=60, stop_token_ids=()) for n in range(3)]
        serve(engine, *asked)
        assert engine.scheduler.num_preemptions
        fed[kind] = engine.backend.num_fed
    assert fed["plain model"] < fed["off"]


def test_hybrid_snapshots_branch_point_from_second_request():
    """No request ends at the end of a common prefix, so its state is saved on purpose."""
    engine, system = make("hybrid"), tokens(7, 100)
    lengths = []
    for turn in range(3):
        one = request([*system, *tokens(100 + turn, 90)])
        serve(engine, one)
        lengths.append(one.cached_tokens)
    assert lengths == [0, 0, UNIT]


def test_hybrid_prompt_saves_branch_point_and_end():
    """A chunk saves one state, so a chunk ends at the branch point."""
    engine, system = make("hybrid"), tokens(7, 100)
    serve(engine, request([*system, *tokens(100, 70)]))
    text, cached = [*system, *tokens(101, 70)], []
    for turn in range(3):
        one = request(text, max_tokens=5)
        (answer,) = serve(engine, one)
        cached.append(one.cached_tokens)
        text = [*text, *answer, *tokens(200 + turn, 60)]
    assert cached == [0, 2 * UNIT, 3 * UNIT]


@pytest.mark.parametrize("kind", ["plain model", "head", "hybrid", "windowed hybrid"])
def test_disabled_output_caching_caches_prompts_alone(kind):
    engine, text, cached = make(kind, caches_outputs=False), tokens(11, 2 * UNIT + 1), []
    lengths = []
    for turn in range(3):
        one = request(text, max_tokens=UNIT + 9)
        (answer,) = serve(engine, one)
        lengths.append(len(text))
        cached.append(one.cached_tokens)
        text = [*text, *answer, *tokens(turn, 20)]
    unit = UNIT if "hybrid" in kind else 4
    assert cached == [0, *((length - 1) // unit * unit for length in lengths[:-1])]


@pytest.mark.parametrize("length", [UNIT, UNIT + 1, 2 * UNIT, 2 * UNIT + 1])
def test_hybrid_prompt_leaves_reusable_state(length):
    """The state is before the last token, or after it, where the next chat turn can use it."""
    engine, prompt = make("hybrid"), tokens(11, length)
    (answer,) = serve(engine, request(prompt, max_tokens=5))
    again, longer = request(prompt), request([*prompt, *answer])
    serve(engine, again, longer)
    assert again.cached_tokens == (length - 1) // UNIT * UNIT
    assert longer.cached_tokens == max((length - 1) // UNIT, 1) * UNIT


def test_evicted_state_makes_page_hit_unusable():
    """Trap (vLLM 53912, 47194): hits on pages with an evicted state corrupted hybrids."""
    engine = make("hybrid")
    first = request(tokens(8, 150))
    serve(engine, first)
    for turn in range(16):
        serve(engine, request(tokens(200 + turn, 65), max_tokens=1))
    again = request(list(first.prompt))
    assert len(engine.cache.tree.path(BASE, again.tokens())) * 4 >= 144, "its pages are cached"
    serve(engine, again)
    assert again.cached_tokens == 0


def test_state_pinned_until_restored(monkeypatch):
    """The chunk of another request runs before, and there is one snapshot."""
    monkeypatch.setitem(KINDS, "hybrid", (2, *KINDS["hybrid"][1:]))
    engine = make("hybrid", overlap=0)
    first = request(tokens(14, 129), max_tokens=1)
    serve(engine, first)
    long, second = request(tokens(15, 140)), request([*first.prompt, 1, 2])
    serve(engine, long, second)
    assert second.cached_tokens == 128


@pytest.mark.parametrize("cut", [3, 40])
def test_stop_string_keeps_state_before_truncation(cut):
    """The output may end before the last snapshot position, so the previous one is kept."""
    engine = make("hybrid", overlap=2)
    one = request(tokens(9, 100), max_tokens=200, stop_token_ids=())
    engine.add(one)
    while len(one.output) < 100:
        checked_step(engine)
    engine.finish(one.request_id, len(one.output) - cut)
    while engine.busy:
        checked_step(engine)
    text = [*one.prompt, *one.output]
    later = request([*text, *tokens(10, 10)])
    serve(engine, later)
    assert later.cached_tokens == (len(text) - 1) // UNIT * UNIT


def test_prefix_cache_evicts_lru_leaf_pages_first():
    engine = make("plain model", num_pages=60)
    prompts = [tokens(20 + n, 40) for n in range(4)]
    for prompt in prompts:
        serve(engine, request(prompt, max_tokens=1))
    serve(engine, request(prompts[0], max_tokens=1))  # used again: the second is the oldest now
    before = engine.cache.num_pages
    assert before == 40
    big = request(tokens(30, 110), max_tokens=1)
    serve(engine, big)
    held = [len(engine.cache.tree.path(BASE, np.array(prompt, np.int32))) for prompt in prompts]
    assert held[0] == 10
    assert held[3] == 10
    assert held[1] < 10
    assert held[1] <= held[2]


def test_priority_scheduling_without_starvation():
    engine = make("plain model", overlap=0)
    running: list[int] = []
    asked = [request(tokens(n, 5), max_tokens=2, stop_token_ids=()) for n in range(60)]
    for number, each in enumerate(asked):
        each.priority = 5 if number == 4 else 0
    order = []
    for each in asked:
        engine.add(each)
    while engine.busy:
        checked_step(engine)
        for each in engine.scheduler.running:
            if each.request_id not in running:
                running.append(each.request_id)
                order.append(each.request_id - asked[0].request_id)
    assert set(order) == set(range(60))
    place = order.index(4)
    assert 8 <= place < 8 + 4, "after 8 of higher priority and those of the same step"


CachedTraffic.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTraffic = CachedTraffic.TestCase
