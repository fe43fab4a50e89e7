"""The prefix cache on the toy backend: equal outputs and no lost pages after any hit."""

from __future__ import annotations

import random
import zlib
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from shared.boundary.backend import BackendLimits
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.prefix_cache import PrefixCache
from shared.engine.radix_cache import RadixCache
from shared.engine.request import FinishReason, Request, SamplingParams
from shared.spec.draft_tree import TreeShape
from tests.support.random_traffic import TrafficMachine, plain_text
from tests.support.run_engine import Outcome, checked_step, drive
from tests.support.toy_backend import POISON, ToyBackend, toy_capacity

UNIT = 64
"""Interval of state snapshots in tokens, with pages of 4 tokens."""

_ON = replace(NO_CACHE, is_on=True)
KINDS = {
    "plain model": (1, _ON),
    "head": (1, replace(_ON, key_lookahead=1, may_skip_draft_kv=True)),
    "small model": (1, replace(_ON, may_skip_draft_kv=True, draft_reads_kv=True)),
    "hybrid": (16, replace(_ON, key_lookahead=1, may_skip_draft_kv=True, track_interval=UNIT)),
}
"""Number of device snapshots and cache policy by kind of model and drafter."""

NUMBERS = count()


class AnyShape(StaticController):
    """A controller that switches between a chain and plain steps at random intervals."""

    def __init__(self, capacity: BackendLimits, seed: int) -> None:
        super().__init__(capacity, nodes=4, depth=3, width=1)
        self._rng, self._left, self._depth = random.Random(seed), 0, 3

    def shape_for(self, num_rows: int) -> TreeShape:
        if not self._left:
            self._left, self._depth = self._rng.randrange(1, 9), self._rng.choice((0, 3))
        self._left -= 1
        return TreeShape.chain(self._depth, 2 if num_rows <= 2 else 4)


def make(kind: str, *, num_pages: int = 400, overlap: int = 1, any_shape: bool = False) -> Engine:
    num_snapshots, policy = KINDS[kind]
    capacity = toy_capacity(
        num_pages=num_pages,
        num_slots=5,
        overlap=2,
        num_snapshots=num_snapshots,
        context_length=1024 if num_pages > 200 else 256,
    )
    chain = StaticController(capacity, nodes=4, depth=3, width=1)
    return Engine(
        ToyBackend(capacity, policy.key_lookahead if policy.may_skip_draft_kv else None),
        AnyShape(capacity, overlap) if any_shape else chain,
        overlap=overlap,
        chunked_prefill_size=128,
        cache=policy,
    )


def request(prompt: list[int], **sampling) -> Request:
    tenant = sampling.pop("tenant", "")
    number = next(NUMBERS)
    given = {"seed32": zlib.crc32(str(prompt).encode()), "max_tokens": 20} | sampling
    params = SamplingParams(**given)
    return Request(request_id=number, prompt=tuple(prompt), sampling=params, tenant=tenant)


def tokens(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(POISON) for _ in range(length)]


def serve(engine: Engine, *requests: Request) -> list[list[int]]:
    """The outputs of requests, which must equal plain decoding."""
    outcomes = drive(engine, requests)
    for each in requests:
        assert outcomes[each.request_id].tokens == plain_text(each)
    return [outcomes[each.request_id].tokens for each in requests]


def family(seed: int, number: int) -> list[Request]:
    """Requests with prompts that begin with parts of other prompts and outputs."""
    rng, texts, found = random.Random(seed), [tokens(seed, 90)], []
    for _ in range(number):
        begin = rng.choice(texts)
        prompt = begin[: rng.randrange(1, len(begin) + 1)] + tokens(rng.randrange(99), 9)
        penalty = rng.choice((1.0, 1.0, 1.3))
        longest = rng.randrange(1, 50)
        found.append(request(prompt[:150], max_tokens=longest, repetition_penalty=penalty))
        texts.append([*found[-1].prompt, *plain_text(found[-1])])
    return found


# Chains with overlap 1, random shapes with overlap 0 and 2; other pairs are matrix tests.
STEPS = [(True, 0), (False, 1), (True, 2)]
STEPS += [pytest.param(not plain, n, marks=pytest.mark.matrix) for plain, n in STEPS]


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
    assert found["prefix_cache_hits_total"] > 0 or (kind == "hybrid" and num_pages == 65)
    assert (engine.scheduler.num_preemptions > 0) == (num_pages == 65)
    assert found["kv_cache_usage_perc"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
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
            engine.cache._policy = NO_CACHE
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
    assert len(engine.cache.tree.path("", again.tokens())) * 4 >= 144, "its pages are cached"
    serve(engine, again)
    assert again.cached_tokens == 0


def test_state_pinned_until_restored(monkeypatch):
    """The chunk of another request runs before, and there is one snapshot."""
    monkeypatch.setitem(KINDS, "hybrid", (2, KINDS["hybrid"][1]))
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
    held = [len(engine.cache.tree.path("", np.array(prompt, np.int32))) for prompt in prompts]
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


class Traffic(TrafficMachine):
    """Requests with common prefixes arrive, abort and stop at any time, with few pages."""

    @initialize(
        overlap=st.integers(0, 2),
        kind=st.sampled_from(sorted(KINDS)),
        pages=st.integers(50, 90),
        any_shape=st.booleans(),
    )
    def start(self, overlap, kind, pages, any_shape):
        self.serve_on(make(kind, num_pages=pages, overlap=overlap, any_shape=any_shape))
        self.texts = [tokens(1, 100)]

    @rule(
        which=st.integers(0, 100),
        length=st.integers(1, 140),
        more=st.integers(1, 20),
        max_tokens=st.integers(1, 60),
        poisoned=st.integers(0, 9),
        penalty=st.sampled_from((1.0, 1.0, 1.5)),
        priority=st.sampled_from((0, 0, 1)),
        tenant=st.sampled_from(("", "", "other")),
    )
    def add(self, which, length, more, max_tokens, poisoned, penalty, priority, tenant):
        prompt = [*self.texts[which % len(self.texts)][:length], *tokens(which, more)]
        prompt[len(prompt) // 2] = POISON if poisoned == 0 else prompt[len(prompt) // 2]
        new = request(prompt, max_tokens=max_tokens, repetition_penalty=penalty, tenant=tenant)
        new.priority = priority
        try:
            self.engine.add(new)
        except ValueError:
            return
        self.requests[new.request_id], self.outcomes[new.request_id] = new, Outcome()
        if POISON not in prompt:
            self.texts.append([*prompt, *plain_text(new)])

    @rule(steps=st.integers(1, 8))
    def step(self, steps):
        self.go_on(steps)

    @rule(which=st.integers(0, 100), stops=st.booleans())
    def leave(self, which, stops):
        if not self.requests:
            return
        number = list(self.requests)[which % len(self.requests)]
        if stops:
            self.engine.finish(number, max(0, len(self.outcomes[number].tokens) - which % 3))
        else:
            self.engine.abort(number)
        self.end(number)

    def teardown(self):
        if hasattr(self, "engine"):
            self.drain()
            give_back_all(self.engine.cache)


def give_back_all(cache: PrefixCache) -> None:
    """Evicts all entries; each page and each snapshot must be free afterwards."""
    cache.tree.evict(cache.num_pages)
    cache.check([])
    assert cache.allocator.pages.num_free == cache.allocator.capacity.num_pages - 1
    assert cache.tree.snapshots.num_free == cache.allocator.capacity.num_snapshots - 1
    assert not cache.tree.roots


Traffic.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase
