"""Exhausted pages and slots with steps in flight, and shrinking batches: plain outputs."""

from __future__ import annotations

from collections import Counter

import pytest

from shared.boundary.backend import BackendLimits, StepPlan
from shared.boundary.program import StepKind
from shared.engine.cache_policy import NO_CACHE, CachePolicy
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import FinishReason, Request, SamplingParams
from tests.support.random_traffic import plain_text
from tests.support.run_engine import Outcome, checked_step, drive
from tests.support.toy_backend import POISON, ToyBackend, ToyFuture, toy_capacity

CACHE = CachePolicy(
    is_on=True, key_lookahead=1, may_skip_draft_kv=True, draft_reads_kv=False, track_interval=0
)
BUCKETS = (1, 2, 4, 8, 16, 32)


def request(number: int, max_tokens: int) -> Request:
    prompt = tuple((7 * number + i) % POISON for i in range(20))
    params = SamplingParams(seed32=number, max_tokens=max_tokens)
    return Request(request_id=number, prompt=prompt, sampling=params)


class RecordingBackend(ToyBackend):
    """Records the batch and the number of rows of each decode step."""

    def __init__(self, capacity: BackendLimits) -> None:
        super().__init__(capacity)
        self.decodes: list[tuple[int, int]] = []

    def submit(self, plan: StepPlan) -> ToyFuture:
        if plan.program.work is StepKind.DECODE:
            self.decodes.append((plan.program.batch, int((plan.slots > 0).sum())))
        return super().submit(plan)


def engine_of(backend: ToyBackend, overlap: int, depth: int, cache: CachePolicy) -> Engine:
    controller = StaticController(
        backend.capacity, nodes=depth + 1, depth=depth, width=min(depth, 1)
    )
    return Engine(backend, controller, overlap=overlap, chunked_prefill_size=128, cache=cache)


@pytest.mark.parametrize("depth", [0, 3], ids=["plain", "drafts"])
@pytest.mark.parametrize("cache", [NO_CACHE, CACHE], ids=["cold", "cached"])
@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("lacks", ["pages", "slots"])
def test_output_equals_plain_when_pages_or_slots_exhausted(lacks, overlap, cache, depth):
    """Trap: a page was reused while a step in flight still wrote to it."""
    pages = 45 if lacks == "pages" else 400
    engine = engine_of(
        ToyBackend(toy_capacity(num_pages=pages, num_slots=5, overlap=2)), overlap, depth, cache
    )
    requests = [request(number, max_tokens=30 + number % 3) for number in range(24)]
    outcomes = {each.request_id: Outcome() for each in requests}
    for each in requests:
        engine.add(each)
    num_short = Counter[str]()
    while engine.busy:
        preempted = engine.scheduler.num_preemptions
        in_flight, waiting = len(engine.flights), len(engine.scheduler.waiting)
        for event in checked_step(engine):
            outcomes[event.request_id].take(event)
        if in_flight:
            num_short["pages"] += engine.scheduler.num_preemptions > preempted
            num_short["slots"] += bool(waiting) and not engine.allocator.num_free_slots
    assert num_short[lacks] > 0, "nothing ran out with a step in flight"
    for each in requests:
        assert outcomes[each.request_id].tokens == plain_text(each)
        assert outcomes[each.request_id].finish_reason is FinishReason.LENGTH
    assert engine.cache.usage == 0


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("depth", [0, 3], ids=["plain", "drafts"])
def test_batch_shrinks_through_every_bucket(overlap, depth):
    capacity = toy_capacity(num_pages=1200, num_slots=33, overlap=2, batch_sizes=BUCKETS)
    backend = RecordingBackend(capacity)
    engine = engine_of(backend, overlap, depth, NO_CACHE)
    requests = [request(number, max_tokens=12 + 5 * number) for number in range(32)]
    outcomes = drive(engine, requests)
    for each in requests:
        assert outcomes[each.request_id].tokens == plain_text(each)
    used = [batch for batch, _ in backend.decodes]
    full = used.index(max(BUCKETS))
    assert used[full:] == sorted(used[full:], reverse=True), "a batch grew that could only shrink"
    assert set(used[full:]) == set(BUCKETS)
    if depth == 0:  # with drafts some requests end in the same step
        rows = {count for _, count in backend.decodes[full:]}
        assert rows == set(range(1, 33)), "they did not end one by one"
    for batch, count in backend.decodes:
        assert batch == min(each for each in BUCKETS if each >= count)
