"""Aborts: slot, pages and queue entry are freed at once in every state of the request."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from shared.engine.engine import Engine
from shared.engine.request import FinishReason, Request, SamplingParams
from tests.support.cache_policies import policy_of
from tests.support.random_traffic import plain_text
from tests.support.run_engine import Outcome, checked_step, drive
from tests.support.toy_backend import POISON, ToyBackend, toy_capacity
from tests.support.toy_engine import CHUNK, toy_engine

OVERLAP, SLOTS = 2, 4
STORM = 500


def made(num_pages: int) -> Engine:
    capacity = toy_capacity(num_pages=num_pages, num_slots=1 + SLOTS, overlap=OVERLAP)
    return toy_engine(ToyBackend(capacity), cache=policy_of("EAGLE3", is_hybrid=False))


def request(number: int, length: int, max_tokens: int = 20) -> Request:
    prompt = tuple((7 * number + i) % POISON for i in range(length))
    sampling = SamplingParams(seed32=number, max_tokens=max_tokens)
    return Request(request_id=number, prompt=prompt, sampling=sampling)


def free(engine: Engine) -> tuple[int, int, int]:
    """Free pages, free slots and the number of waiting requests."""
    slots = engine.allocator.num_free_slots
    return engine.cache.num_available, slots, len(engine.scheduler.waiting)


WHERE: dict[str, Callable[[Request], bool]] = {
    "before its first step": lambda request: True,
    "in its prompt": lambda request: request.prefilled >= CHUNK,
    "later in its prompt": lambda request: request.prefilled >= 2 * CHUNK,
    "decoding": lambda request: len(request.output) > 3,
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("has_neighbour", [False, True])
def test_abort_frees_request_resources_within_two_steps(where, has_neighbour):
    engine, neighbour = made(200), request(1, 9, max_tokens=60)
    outcome = Outcome()
    if has_neighbour:
        engine.add(neighbour)
    before = free(engine)
    gone = request(2, 200, max_tokens=50)
    engine.add(gone)
    while not WHERE[where](gone):
        for event in checked_step(engine):
            if event.request_id == neighbour.request_id:
                outcome.take(event)
    assert gone.decodes == (where == "decoding")
    engine.abort(2)
    if not has_neighbour:
        assert free(engine) == before
        for _ in range(2):
            assert checked_step(engine) == []
        assert not engine.busy
        return
    assert gone not in engine.scheduler.running
    assert gone not in engine.scheduler.waiting
    while engine.busy:
        for event in checked_step(engine):
            outcome.take(event)
    assert outcome.tokens == plain_text(neighbour)
    assert free(engine) == (199, SLOTS, 0)


def test_abort_removes_waiting_request_at_once():
    engine = made(200)
    requests = [request(number, 5) for number in range(SLOTS + 3)]
    for each in requests:
        engine.add(each)
    checked_step(engine)
    assert len(engine.scheduler.waiting) == 3
    for each in requests[-3:]:
        engine.abort(each.request_id)
    assert len(engine.scheduler.waiting) == 0
    while engine.busy:
        assert all(event.request_id < SLOTS for event in checked_step(engine))


@pytest.mark.parametrize("num_pages", [52, 400], ids=["few pages", "many pages"])
def test_abort_storm_of_500_requests_leaks_nothing(num_pages):
    """Finishes, aborts, stop strings, failures and preemptions occur in any order."""
    engine, rng = made(num_pages), random.Random(num_pages)
    outcomes: dict[int, Outcome] = {}
    requests, left = {}, set()
    while len(requests) < STORM or engine.busy:
        for _ in range(rng.randrange(6) if len(requests) < STORM else 0):
            number = len(requests)
            each = request(number, rng.randrange(1, 120), rng.randrange(1, 60))
            if rng.random() < 0.1:
                each.prompt = (*each.prompt, POISON)
            requests[number], outcomes[number] = each, Outcome()
            engine.add(each)
        for event in checked_step(engine):
            assert event.request_id not in left, "an event after the end"
            outcomes[event.request_id].take(event)
        open_ones = [*engine.scheduler.running, *engine.scheduler.waiting]
        for each in open_ones:
            if rng.random() < 0.03:
                left.add(each.request_id)
                if rng.random() < 0.5:
                    engine.abort(each.request_id)
                else:
                    engine.finish(each.request_id, rng.randrange(len(each.output) + 1))
    assert len(left) > STORM / 5
    for number, outcome in outcomes.items():
        if number in left:
            assert outcome.finish_reason is None
        elif POISON in requests[number].prompt:
            assert outcome.finish_reason is FinishReason.ERROR
        else:
            assert outcome.tokens == plain_text(requests[number])
    assert (engine.scheduler.num_preemptions > 0) == (num_pages == 52)
    assert free(engine) == (num_pages - 1, SLOTS, 0)
    ends = engine.metrics.snapshot()
    counted = [v for name, v in ends.items() if name.startswith("request_success_total")]
    assert sum(counted) == len(requests)
    # The next request can use all pages and slots.
    after = request(len(requests), 30)
    assert drive(engine, [after])[after.request_id].tokens == plain_text(after)
