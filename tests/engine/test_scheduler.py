"""The scheduler: running requests, their order and their pages."""

import pytest

from shared.boundary.program import StepKind
from shared.engine.adapter_slots import AdapterSlots
from shared.engine.allocator import Allocator
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.prefix_cache import PrefixCache
from shared.engine.request import Request, SamplingParams
from shared.engine.scheduler import Scheduler
from tests.support.mutations import prover
from tests.support.toy_backend import toy_capacity


def make(num_pages: int = 400, overlap: int = 0, chunked_prefill_size: int = 128) -> Scheduler:
    capacity = toy_capacity(num_pages=num_pages, num_slots=5, overlap=overlap)
    allocator = Allocator(capacity)
    return Scheduler(
        capacity,
        allocator,
        PrefixCache(capacity, allocator, NO_CACHE, overlap),
        StaticController(capacity, nodes=4, depth=3, width=1),
        None,
        AdapterSlots(capacity),
        overlap=overlap,
        chunked_prefill_size=chunked_prefill_size,
    )


def request(number: int, num_prompt: int, max_tokens: int = 20) -> Request:
    return Request(
        request_id=number,
        prompt=(1,) * num_prompt,
        sampling=SamplingParams(max_tokens=max_tokens),
    )


def start(scheduler: Scheduler, *requests: Request) -> None:
    for each in requests:
        scheduler.add(each)
    scheduler.admit()


def test_prefill_and_decode_alternate():
    scheduler = make()
    start(scheduler, request(0, 10), request(1, 200))
    works = [scheduler.next_rows().work for _ in range(6)]
    # 10 + 64, then 128, then the last 8 tokens; decodes between.
    assert works == [StepKind.PREFILL, StepKind.DECODE] * 3
    assert scheduler.next_rows().work is StepKind.DECODE


def test_prefill_chunks_align_to_64_tokens():
    scheduler = make()
    start(scheduler, request(0, 10), request(1, 230), request(2, 5))
    chunks = []
    while len(chunks) < 5:
        rows = scheduler.next_rows()
        if rows.work is StepKind.PREFILL:
            chunks += [(c.request.request_id, c.first, c.end) for c in rows.chunks]
            assert sum(c.end - c.first for c in rows.chunks) <= 128
    # After 10 tokens 118 remain: request 1 gets 64 of them, and request 2 all its tokens.
    assert chunks == [(0, 0, 10), (1, 0, 64), (2, 0, 5), (1, 64, 192), (1, 192, 230)]


def test_prefill_bounded_by_chunked_prefill_size():
    scheduler = make(chunked_prefill_size=100)
    start(scheduler, request(0, 128))
    rows = scheduler.next_rows()
    assert rows.work is StepKind.PREFILL
    assert rows.chunks[0].end == 64


def test_chunked_prefill_size_below_chunk_raises():
    with pytest.raises(ValueError, match="chunked_prefill_size"):
        make(chunked_prefill_size=63)


def test_decode_rows_reserve_pages_for_in_flight_steps():
    scheduler = make(overlap=2)
    one = request(0, 16)
    start(scheduler, one)
    scheduler.next_rows()
    one.step_submitted(1)
    for in_flight in range(3):
        rows = scheduler.next_rows()
        assert rows.work is StepKind.DECODE
        held = int(scheduler.allocator.pages.num_pages[one.slot]) * 4
        # The prompt, the first token, 4 for each step in flight, and this step's scratch.
        assert held >= 16 + 1 + 4 * in_flight + rows.shape.scratch
        one.step_submitted(4)


def test_scheduler_skips_steps_beyond_max_tokens():
    scheduler = make(overlap=2)
    one = request(0, 16, max_tokens=2)
    start(scheduler, one)
    scheduler.next_rows()
    one.step_submitted(1)
    assert scheduler.next_rows().work is StepKind.DECODE
    one.step_submitted(4)
    assert scheduler.next_rows() is None


def test_admission_reserves_pages_for_widest_step():
    scheduler = make(num_pages=9)
    start(scheduler, request(0, 8), request(1, 8))
    # A request's next step may need 8 + 4 + 4 positions, 4 pages: two fit into 8 pages.
    assert len(scheduler.running) == 2
    scheduler = make(num_pages=8)
    start(scheduler, request(0, 8, max_tokens=12), request(1, 8, max_tokens=12))
    assert len(scheduler.running) == 1


def test_waiting_queue_preserves_arrival_order():
    scheduler = make(num_pages=12)
    start(scheduler, request(0, 20, 4), request(1, 20, 4), request(2, 1, 1))
    assert [r.request_id for r in scheduler.running] == [0]


def test_add_rejects_request_exceeding_all_pages():
    scheduler = make(num_pages=9)
    scheduler.add(request(0, 9, 20))  # 9 + 19 + 4 positions: 8 pages
    with pytest.raises(ValueError, match="9 pages of 4 tokens, and the server has 8"):
        scheduler.add(request(1, 10, 20))


def test_youngest_request_preempted_after_in_flight_steps():
    scheduler = make(num_pages=9)
    old, young = request(0, 8, 15), request(1, 8, 15)
    start(scheduler, old, young)
    assert scheduler.next_rows().work is StepKind.PREFILL
    young.step_submitted(4)
    old.output += [1] * 14  # its next step needs 7 pages; both hold 2 of 8
    assert scheduler.next_rows() is None, "neither may have a step"
    assert young.slot, "preempted with a step in flight"
    young.step_finished(4)
    rows = scheduler.next_rows()
    assert rows.work is StepKind.DECODE
    assert rows.requests == [old]
    assert not young.slot
    assert scheduler.waiting.head() is young
    assert scheduler.num_preemptions == 1
    scheduler.allocator.check()


def test_preempted_request_precedes_waiting_requests():
    scheduler = make(num_pages=9)
    old, young, waiting = request(0, 8, 15), request(1, 8, 15), request(2, 8, 15)
    start(scheduler, old, young, waiting)
    scheduler.next_rows()
    old.output += [1] * 14
    scheduler.next_rows()
    assert [r.request_id for r in scheduler.waiting] == [1, 2]
    assert scheduler.admit() == []


test_planted_fault_is_detected = prover("engine/test_scheduler", globals())
