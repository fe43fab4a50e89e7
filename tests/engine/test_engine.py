"""The engine on the toy backend: plain outputs, and exactly one end per request."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from shared.boundary.backend import BackendLimits
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import FinishReason, Request, SamplingParams
from shared.spec.draft_tree import TreeShape
from tests.support.mutations import prover
from tests.support.random_traffic import TrafficMachine, plain_text
from tests.support.run_engine import Outcome, checked_step, drive
from tests.support.toy_backend import POISON, VOCAB, ToyBackend, toy_capacity

STOP = (5,)


def make(
    *, num_pages: int = 400, overlap: int = 1, depth: int = 3, device_overlap: int = 2
) -> Engine:
    backend = ToyBackend(toy_capacity(num_pages=num_pages, num_slots=5, overlap=device_overlap))
    controller = StaticController(
        backend.capacity, nodes=depth + 1, depth=depth, width=min(depth, 1)
    )
    return Engine(backend, controller, overlap=overlap, chunked_prefill_size=100, cache=NO_CACHE)


def request(number: int, prompt: tuple[int, ...] = (1, 2, 3), **sampling) -> Request:
    given = {"seed32": number, "stop_token_ids": STOP} | sampling
    return Request(request_id=number, prompt=prompt, sampling=SamplingParams(**given))


def random_requests(seed: int, count: int) -> list[Request]:
    rng = random.Random(seed)
    return [
        request(
            number,
            tuple(rng.randrange(POISON) for _ in range(rng.randrange(1, 80))),
            max_tokens=rng.randrange(1, 60),
            seed32=rng.getrandbits(32),
        )
        for number in range(count)
    ]


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("num_pages", [38, 400])
def test_output_equals_plain_for_overlap_drafts_and_pages(overlap, depth, num_pages):
    engine = make(num_pages=num_pages, overlap=overlap, depth=depth)
    requests = random_requests(seed=overlap, count=40)
    outcomes = drive(engine, requests)
    for each in requests:
        assert outcomes[each.request_id].tokens == plain_text(each)
        assert outcomes[each.request_id].finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert (engine.scheduler.num_preemptions > 0) == (num_pages == 38)
    assert engine.metrics.snapshot()["kv_cache_usage_perc"] == 0.0


def test_acceptance_independent_of_overlap_and_preemption():
    """Trap: acceptance fell with overlap for an unknown reason (SGLang 20547)."""
    requests = [random_requests(seed=1, count=30) for _ in range(3)]
    alone, overlapped, crowded = (
        drive(make(num_pages=pages, overlap=overlap), each)
        for each, overlap, pages in zip(requests, (0, 2, 2), (400, 400, 38), strict=True)
    )
    accepted = {number: outcome.accepted for number, outcome in alone.items()}
    assert {n: o.accepted for n, o in overlapped.items()} == accepted
    assert {n: o.accepted for n, o in crowded.items()} == accepted


class AnyShape(StaticController):
    """A controller that chooses a random shape for every step."""

    def __init__(self, capacity: BackendLimits, seed: int) -> None:
        super().__init__(capacity, nodes=4, depth=3, width=1)
        self._rng = random.Random(seed)

    def shape_for(self, num_rows: int) -> TreeShape:
        return TreeShape.chain(self._rng.choice((0, 3)), 2 if num_rows <= 2 else 4)


@pytest.mark.parametrize("overlap", [0, 2])
def test_output_independent_of_changing_draft_shapes(overlap):
    backend = ToyBackend(toy_capacity(num_pages=45, num_slots=5, overlap=2))
    engine = Engine(
        backend,
        AnyShape(backend.capacity, overlap),
        overlap=overlap,
        chunked_prefill_size=64,
        cache=NO_CACHE,
    )
    requests = random_requests(seed=7, count=30)
    outcomes = drive(engine, requests)
    assert all(outcomes[each.request_id].tokens == plain_text(each) for each in requests)


class Traffic(TrafficMachine):
    """Requests arrive, abort and stop at any time, with few pages."""

    @initialize(overlap=st.integers(0, 2), depth=st.sampled_from([0, 3]), pages=st.integers(24, 60))
    def start(self, overlap, depth, pages):
        self.serve_on(make(num_pages=pages, overlap=overlap, depth=depth))

    @rule(length=st.integers(1, 70), max_tokens=st.integers(1, 40), poisoned=st.integers(0, 9))
    def add(self, length, max_tokens, poisoned):
        number = len(self.requests)
        prompt = [(number + i) % POISON for i in range(length)]
        prompt[length // 2] = POISON if poisoned == 0 else 0
        new = request(number, tuple(prompt), max_tokens=max_tokens)
        self.requests[number], self.outcomes[number] = new, Outcome()
        try:
            self.engine.add(new)
        except ValueError:
            self.ended_by_us.add(number)

    @rule(steps=st.integers(1, 6))
    def step(self, steps):
        self.go_on(steps)

    @rule(which=st.integers(0, 100))
    def abort(self, which):
        if self.requests:
            number = which % len(self.requests)
            self.engine.abort(number)
            self.end(number)

    @rule(which=st.integers(0, 100))
    def finish(self, which):
        if self.requests:
            number = which % len(self.requests)
            count = len(self.outcomes[number].tokens)
            self.engine.finish(number, count)
            self.end(number)

    @invariant()
    def nothing_is_lost(self):
        if hasattr(self, "engine"):
            self.engine.allocator.check()

    def teardown(self):
        if hasattr(self, "engine"):
            self.drain()
            assert self.engine.cache.usage == 0.0


Traffic.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTraffic = Traffic.TestCase


def test_prompt_tokens_total_counts_preempted_prompts_once():
    engine, requests = make(num_pages=38), random_requests(seed=1, count=30)
    drive(engine, requests)
    assert engine.scheduler.num_preemptions
    total = sum(len(each.prompt) for each in requests)
    assert engine.metrics.snapshot()["prompt_tokens_total"] == total


def test_stale_rows_are_dropped():
    engine = make(overlap=2, depth=0)
    one = next(
        each
        for each in random_requests(3, 200)
        if 2 < len(plain_text(each)) < each.sampling.max_tokens - 4
    )
    outcome = drive(engine, [one])[one.request_id]
    assert outcome.tokens == plain_text(one)
    assert outcome.finish_reason is FinishReason.STOP
    assert engine.metrics.snapshot()["overlap_stale_rows_total"] == 2


def test_logprobs_trimmed_to_output_tokens():
    """Trap: tokens, logprobs and usage were trimmed to different lengths (SGLang 26163, 39826)."""
    engine = make()
    requests = [request(n, (n + 1,), max_tokens=n % 9 + 1, logprobs=n % 3) for n in range(12)]
    outcomes = drive(engine, requests)
    for each in requests:
        outcome = outcomes[each.request_id]
        assert outcome.tokens == plain_text(each)
        assert [chosen for chosen, _ in outcome.logprobs] == [-float(t) for t in outcome.tokens]
        best = each.sampling.logprobs
        assert [top for _, top in outcome.logprobs] == [
            [(token, -float(token))] * best for token in outcome.tokens
        ]
    total = sum(len(outcome.tokens) for outcome in outcomes.values())
    assert engine.metrics.snapshot()["generation_tokens_total"] == total


def test_logprobs_absent_unless_requested():
    engine = make()
    engine.add(request(0))
    engine.add(request(1, logprobs=0))
    events = [event for _ in range(4) for event in engine.step()]
    assert {event.request_id: event.logprobs is None for event in events} == {0: True, 1: False}


def test_accepted_counts_drafts_before_trimming():
    engine = make(depth=3)
    one = request(0, (4, 4), max_tokens=40, stop_token_ids=())
    outcome = drive(engine, [one])[0]
    # One token of the prefill, and of each step its accepted drafts and one; a few are trimmed.
    given = 1 + sum(accepted + 1 for accepted in outcome.accepted)
    assert 40 <= given <= 43
    assert max(outcome.accepted) > 0
    found = engine.metrics.snapshot()
    assert found["spec_decode_num_drafts_total"] == len(outcome.accepted)
    assert found["spec_decode_num_accepted_tokens_total"] == sum(outcome.accepted)


def test_accepted_of_plain_steps_equals_zero():
    outcome = drive(make(depth=0), [request(0, max_tokens=6, stop_token_ids=())])[0]
    assert outcome.accepted == [0] * 5


def test_nonfinite_row_fails_only_its_request():
    engine = make()
    poisoned, healthy = request(0, (1, POISON, 2)), request(1)
    outcomes = drive(engine, [poisoned, healthy])
    assert outcomes[0].finish_reason is FinishReason.ERROR
    assert "finite" in outcomes[0].error
    assert outcomes[1].tokens == plain_text(healthy)


def test_abort_frees_pages_with_steps_in_flight():
    engine = make(overlap=2)
    engine.add(request(0, (1,) * 50))
    engine.step()
    engine.step()
    assert engine.allocator.num_free_slots == 3
    engine.abort(0)
    assert engine.cache.usage == 0.0
    assert engine.busy, "steps in flight have to be drained"
    while engine.busy:
        assert checked_step(engine) == []


def test_slot_reuse_with_stale_row_preserves_output():
    """Trap: a finished request in flight overwrote a recycled slot (SGLang 19415, 28484)."""
    engine = make(overlap=2)
    for number in range(4):
        engine.add(request(number, (number + 1,) * 10, max_tokens=60, stop_token_ids=()))
    for _ in range(5):
        engine.step()
    engine.abort(3)
    heir = request(9, (9,) * 10, max_tokens=30, stop_token_ids=())
    outcomes = {number: Outcome() for number in (0, 1, 2)}
    engine.add(heir)
    outcomes[9] = Outcome()
    while engine.busy:
        for event in checked_step(engine):
            outcomes[event.request_id].take(event)
    assert outcomes[9].tokens == plain_text(heir)


def test_finish_truncates_output_and_ends_request():
    engine = make(overlap=0)
    one = request(0, max_tokens=30, stop_token_ids=())
    engine.add(one)
    while len(one.output) < 5:
        engine.step()
    engine.finish(0, 4)
    assert len(one.output) == 4
    assert one.finish_reason is FinishReason.STOP
    assert not engine.busy
    engine.finish(0, 4)
    engine.abort(0)
    ends = engine.metrics.snapshot()
    assert ends['request_success_total{finished_reason="stop"}'] == 1
    assert ends['request_success_total{finished_reason="abort"}'] == 0


@pytest.mark.parametrize(
    ("prompt", "sampling", "words"),
    [
        ((), {}, "prompt must not be empty"),
        ((VOCAB,), {}, "prompt contains token id"),
        ((-1,), {}, "prompt contains token id"),
        ((1,), {"max_tokens": -1}, "max_tokens"),
        ((1,) * 200, {"max_tokens": 57}, "the context of 256 tokens"),
        ((1,) * 256, {"max_tokens": 1}, "prompt has 256 tokens"),
        ((1,), {"min_tokens": 9, "max_tokens": 8}, "min_tokens must not exceed max_tokens"),
        ((1,), {"stop_token_ids": (1, 2, 3)}, "stop_token_ids must have at most 2"),
        ((1,), {"stop_token_ids": (VOCAB,)}, "stop_token_ids contains token id"),
        ((1,), {"logit_bias": {1: 1.0, 2: 1.0}}, "logit_bias must have at most 1"),
        ((1,), {"logprobs": 3}, "logprobs must be 0 to 2"),
        ((1,), {"prompt_logprobs": 0}, "start the server with --max-prompt-logprobs"),
    ],
)
def test_engine_add_rejects_invalid_request(prompt, sampling, words):
    engine = make()
    with pytest.raises(ValueError, match=words):
        engine.add(request(0, prompt, **sampling))
    assert not engine.busy


def test_longest_accepted_request_finishes():
    engine = make(num_pages=40, overlap=2)
    longest = 39 * 4 - 8 - 4 + 1  # pages minus the growth of in-flight steps and the scratch
    one = request(0, (1,) * 100, max_tokens=longest - 100, stop_token_ids=())
    assert drive(engine, [one])[0].tokens == plain_text(one)
    with pytest.raises(ValueError, match="pages"):
        engine.add(request(1, (1,) * 101, max_tokens=longest - 100))


def test_engine_rejects_overlap_beyond_backend():
    with pytest.raises(ValueError, match="overlap"):
        make(overlap=2, device_overlap=1)


def test_static_controller_rejects_shape_without_program():
    with pytest.raises(ValueError, match="5 nodes"):
        make(depth=4)


def test_engine_close_ends_requests_and_frees_pages():
    engine = make()
    engine.add(request(0))
    engine.step()
    engine.close()
    assert not engine.busy
    assert engine.cache.usage == 0.0


def test_engine_steps_total_counts_by_kind_and_launch():
    engine = make()
    drive(engine, [request(0)])
    found = engine.metrics.snapshot()
    steps = {name: value for name, value in found.items() if name.startswith("engine_steps_total")}
    assert steps['engine_steps_total{kind="prefill",launch="eager"}'] == 1
    assert steps['engine_steps_total{kind="decode",launch="eager"}'] >= 1
    assert not any(value for name, value in steps.items() if 'launch="eager"' not in name)


test_planted_fault_is_detected = prover("engine/test_engine", globals())
