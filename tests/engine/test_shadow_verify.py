"""Shadow verification: a divergence is located, and traffic is not affected."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from shared.boundary.backend import BackendLimits, Decode, StepPlan
from shared.boundary.program import ProgramFeature, StepKind
from shared.engine.cache_policy import NO_CACHE, CachePolicy
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.reference_run import Divergence
from shared.engine.request import FinishReason, Request, SamplingParams
from shared.engine.shadow_verify import MOST_STARTS, MOST_WAITING, ShadowVerifier, is_chosen
from tests.support.random_traffic import plain_text
from tests.support.run_engine import Outcome
from tests.support.toy_backend import POISON, ToyBackend, ToyFuture, toy_capacity

CACHE = CachePolicy(
    is_on=True, key_lookahead=1, may_skip_draft_kv=True, draft_reads_kv=False, track_interval=0
)
GAP = 0.75
"""Difference of the best two logits in every step of the toy backend."""


class RecordingBackend(ToyBackend):
    """Records submitted plans, and has logprobs with a margin."""

    def __init__(self, capacity: BackendLimits, draft_reach: int | None = 1) -> None:
        super().__init__(capacity, draft_reach)
        self.plans: list[StepPlan] = []

    def submit(self, plan: StepPlan) -> ToyFuture:
        self.plans.append(plan)
        return super().submit(plan)

    def run_next(self) -> None:
        _, future = self._queue[0]
        super().run_next()
        assert future.value is not None
        assert future.value.logprobs is not None
        future.value.logprobs.top_values[..., 1] -= GAP


class AcceptsAWrongDraft(RecordingBackend):
    """Accepts a wrong draft token at one length of the context."""

    LENGTH = 30

    def _next(self, plan: StepPlan, row: int, context: list[int]) -> int:
        token = super()._next(plan, row, context)
        verifies = isinstance(plan.work, Decode) and not plan.program.shape.is_plain
        return (token + 1) % POISON if verifies and len(context) == self.LENGTH else token


def capacity_of(num_pages: int = 400, **changed) -> BackendLimits:
    return replace(toy_capacity(num_pages=num_pages, num_slots=5, overlap=2), **changed)


class VerifiedEngine:
    """An engine with shadow verification, and its reports."""

    def __init__(
        self,
        backend: RecordingBackend | None = None,
        *,
        rate: float = 1.0,
        cache: CachePolicy = NO_CACHE,
        overlap: int = 1,
    ) -> None:
        self.backend = backend or RecordingBackend(capacity_of())
        controller = StaticController(self.backend.capacity, nodes=4, depth=3, width=1)
        self.engine = Engine(
            self.backend, controller, overlap=overlap, chunked_prefill_size=100, cache=cache
        )
        self.reports: list[Divergence] = []
        self.checked = ShadowVerifier(
            self.engine, self.backend, rate=rate, report=self.reports.append
        )
        self.outcomes: dict[int, Outcome] = {}

    def add(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.checked.add(request)
            self.outcomes[request.request_id] = Outcome()

    def step(self) -> None:
        for event in self.checked.step():
            self.outcomes[event.request_id].take(event)
        self.engine.cache.check(self.engine.scheduler.running)

    def serve(self, requests: Sequence[Request]) -> None:
        """Runs until all requests end; verifications may remain."""
        self.add(requests)
        while self.engine.busy:
            self.step()

    def end_checks(self) -> None:
        while self.checked.busy:
            self.step()
        capacity = self.backend.capacity
        assert self.engine.cache.usage == 0
        assert self.engine.allocator.num_free_slots == capacity.num_slots - 1

    def count(self, name: str) -> float:
        found = self.checked.metrics.snapshot()
        total = 'shadow_verify_requests_total{result="%s"}'
        return {
            "checks": found[total % "match"] + found[total % "mismatch"],
            "mismatch": found[total % "mismatch"],
            "dropped": found[total % "dropped"],
            "waiting": found["shadow_verify_requests_waiting"],
        }[name]

    def skipped(self) -> dict[str, float]:
        found = self.checked.metrics.snapshot()
        head = 'shadow_verify_skipped_total{reason="'
        return {
            name.removeprefix(head)[:-2]: value
            for name, value in found.items()
            if name.startswith(head) and value
        }


def request(number: int, prompt: Sequence[int] = (1, 2, 3), **sampling) -> Request:
    params = SamplingParams(**{"seed32": number, "max_tokens": 40} | sampling)
    return Request(request_id=number, prompt=tuple(prompt), sampling=params)


def of_many_kinds(count: int, first: int = 0) -> list[Request]:
    """Requests of all sampling kinds, two choices of each prompt."""
    rng, kinds = (
        random.Random(count),
        (
            {"temperature": 0.0},
            {"temperature": 0.8, "top_p": 0.9, "min_p": 0.1},
            {"repetition_penalty": 1.2, "frequency_penalty": 0.5},
            {"logit_bias": {3: 4.0}, "min_tokens": 9, "stop_token_ids": (5, 7)},
            {"max_draft_tokens": 2, "logprobs": 1},
        ),
    )
    found = []
    for number in range(first, first + count):
        if number % 2 == 0:
            prompt = [rng.randrange(POISON) for _ in range(rng.randrange(1, 150))]
        how = kinds[number // 2 % len(kinds)]
        found.append(request(number, prompt, max_tokens=rng.randrange(9, 50), **how))
    return found


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("cache", [NO_CACHE, CACHE], ids=["cold", "cached"])
def test_shadow_verify_of_plain_output_reports_nothing(cache, overlap):
    verified, requests = VerifiedEngine(cache=cache, overlap=overlap), of_many_kinds(30)
    verified.serve(requests)
    verified.end_checks()
    assert all(verified.outcomes[r.request_id].tokens == plain_text(r) for r in requests)
    assert (verified.count("checks"), verified.count("mismatch")) == (30, 0)
    assert not verified.reports
    assert not verified.skipped()


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_shadow_verify_reports_wrong_accepted_draft_position(overlap):
    verified = VerifiedEngine(AcceptsAWrongDraft(capacity_of()), overlap=overlap)
    wrong, short = request(1, max_tokens=60), request(2, max_tokens=20)
    verified.serve([wrong, short])
    verified.end_checks()
    position = AcceptsAWrongDraft.LENGTH - len(wrong.prompt)
    plain, served = plain_text(wrong), verified.outcomes[1].tokens
    assert served[:position] == plain[:position]
    assert verified.reports == [
        Divergence(
            request_id=1,
            position=position,
            served=served[position],
            plain=plain[position],
            margin=GAP,
        )
    ]
    assert str(verified.reports[0]) == (
        f"shadow check: request 1 has token {served[position]} at position {position} of its "
        f"output, but plain decoding has token {plain[position]}, with a margin of {GAP}"
    )
    assert (verified.count("checks"), verified.count("mismatch")) == (2, 1)


def test_shadow_verify_reports_output_past_end():
    verified = VerifiedEngine()
    one = request(1, max_tokens=20)
    verified.serve([one])
    end = plain_text(one)[7]
    assert end not in plain_text(one)[:7]
    one.sampling = replace(one.sampling, stop_token_ids=(end,))
    verified.end_checks()
    found = verified.reports[0]
    assert (found.position, found.plain, found.margin) == (8, None, None)
    assert "but plain decoding has no token" in str(found)


def test_shadow_verify_reports_failed_plain_run():
    verified = VerifiedEngine()
    one = request(1)
    verified.serve([one])
    one.prompt = (1, POISON, 3)
    verified.end_checks()
    assert [(found.position, found.plain) for found in verified.reports] == [(0, None)]


def test_shadow_verify_replay_ignores_prefix_cache():
    """A wrong page in the cache changes the output, and the replay must not use it."""
    # The toy compares draft KV with the context, so it has none here.
    verified = VerifiedEngine(
        RecordingBackend(capacity_of(), draft_reach=None), cache=replace(CACHE, key_lookahead=0)
    )
    prompt = tuple(range(1, 40))
    verified.serve([request(1, prompt)])
    verified.end_checks()
    assert not verified.reports
    page = int(np.argwhere(verified.backend._pages == 20)[0, 0])
    verified.backend._pages[page] = 0
    verified.serve([request(2, prompt)])
    hits, pages = verified.engine.cache.num_hit, verified.engine.cache.num_pages
    assert hits > 20
    verified.end_checks()
    assert [(found.request_id, found.position) for found in verified.reports] == [(2, 0)]
    assert (verified.engine.cache.num_hit, verified.engine.cache.num_pages) == (hits, pages)


def test_shadow_verify_evicts_only_lru_pages():
    verified = VerifiedEngine(RecordingBackend(capacity_of(num_pages=70)), cache=CACHE)
    prompts = [tuple((7 * number + i) % POISON for i in range(30)) for number in range(8)]
    verified.serve([request(number, prompt) for number, prompt in enumerate(prompts)])
    assert verified.engine.allocator.pages.num_free < 10
    newest = verified.engine.cache.find(request(99, prompts[-1]))
    left = []
    while verified.checked.busy:
        waiting = verified.count("waiting")
        while verified.count("waiting") == waiting:
            verified.step()
        left.append(verified.engine.cache.num_pages)
    assert len(set(left)) == 1, "a replay of equal size reuses the pages of the previous one"
    assert verified.engine.cache.find(request(99, prompts[-1])).length == newest.length > 0
    assert (verified.count("checks"), verified.count("mismatch")) == (8, 0)


def steps_of_traffic(rate: float) -> list:
    """Device steps of request waves that interrupt the verifications of earlier waves."""
    verified, seen = VerifiedEngine(rate=rate, cache=CACHE), []
    for wave in range(8):
        before = len(verified.backend.plans)
        verified.serve(of_many_kinds(5, first=10 * wave))
        seen += verified.backend.plans[before:]
        before = len(verified.backend.plans)
        for _ in range(9 * wave):
            verified.step()
        idle = verified.backend.plans[before:]
        assert bool(idle) == bool(rate and wave)
        assert all(np.count_nonzero(plan.slots) == 1 for plan in idle)
        assert all(plan.program.shape.is_plain for plan in idle)
    return [(p.program, p.slots.tolist(), tokens_of(p)) for p in seen]


def tokens_of(plan: StepPlan) -> list[int]:
    return [] if isinstance(plan.work, Decode) else plan.work.tokens.tolist()


def test_shadow_verify_leaves_traffic_steps_unchanged():
    assert steps_of_traffic(rate=1.0) == steps_of_traffic(rate=0.0)


def test_new_request_interrupts_and_restarts_shadow_verify():
    verified = VerifiedEngine()
    verified.serve([request(1)])
    for _ in range(5):
        verified.step()
    assert verified.engine.cache.usage > 0
    verified.add([request(2)])
    assert verified.engine.cache.usage == 0
    assert verified.engine.allocator.num_free_slots == 4
    verified.end_checks()
    assert (verified.count("checks"), verified.count("mismatch")) == (2, 0)


def test_shadow_verify_dropped_after_too_many_interruptions():
    verified = VerifiedEngine(rate=0.1)
    verified.serve([request(3)])
    assert verified.count("waiting") == 1
    for number in range(4, 4 + MOST_STARTS):  # none of them is verified
        assert verified.count("dropped") == 0
        verified.step()
        verified.serve([request(number, max_tokens=1)])
    assert (verified.count("dropped"), verified.count("waiting")) == (1, 0)
    assert not verified.checked.busy


def test_interrupted_shadow_verifies_rotate():
    verified = VerifiedEngine()
    verified.serve([request(number) for number in range(MOST_STARTS + 1)])
    for number in range(MOST_STARTS + 1):
        verified.step()
        verified.serve([request(10 + number, max_tokens=1)])
    verified.end_checks()
    assert (verified.count("checks"), verified.count("dropped")) == (2 * MOST_STARTS + 2, 0)


def test_shadow_verify_counts_sum_to_chosen_requests():
    verified, rng = VerifiedEngine(rate=0.7), random.Random(3)
    chosen = 0
    for number in range(400):
        prompt = (1, POISON if rng.random() < 0.1 else 2)
        verified.add([request(number, prompt, max_tokens=rng.randrange(1, 30))])
        chosen += is_chosen(number, 0.7)
        for _ in range(rng.choice((0, 1, 2))):
            verified.step()
        running = verified.engine.scheduler.running
        if running and rng.random() < 0.3:
            one = rng.choice(running)
            if rng.random() < 0.5:
                verified.checked.abort(one.request_id)
            else:
                verified.checked.finish(one.request_id, len(one.output))
    while verified.engine.busy:
        verified.step()
    waiting = verified.count("waiting")
    assert waiting == MOST_WAITING
    counts = [verified.count(name) for name in ("checks", "dropped")]
    assert sum(counts) + sum(verified.skipped().values()) + waiting == chosen
    assert verified.count("dropped") > 0
    assert set(verified.skipped()) == {"aborted", "failed", "empty"}
    verified.end_checks()
    assert verified.count("checks") == counts[0] + waiting
    assert not verified.reports


def test_shadow_verify_ignores_tokens_after_stop_string():
    verified = VerifiedEngine(AcceptsAWrongDraft(capacity_of()), overlap=0)
    one = request(1, max_tokens=60)
    verified.add([one])
    while one.length <= AcceptsAWrongDraft.LENGTH:
        verified.step()
    verified.checked.finish(1, AcceptsAWrongDraft.LENGTH - len(one.prompt))
    assert one.finish_reason is FinishReason.STOP
    verified.end_checks()
    assert verified.count("checks") == 1
    assert not verified.reports


def test_is_chosen_is_deterministic_at_given_rate():
    for rate in (0.01, 0.25, 0.5):
        share = sum(is_chosen(number, rate) for number in range(20_000)) / 20_000
        assert share == pytest.approx(rate, abs=0.012)  # three standard deviations
    assert all(is_chosen(number, 1.0) and not is_chosen(number, 0.0) for number in range(99))
    assert [number for number in range(40) if is_chosen(number, 0.1)] == [3, 27]


def test_shadow_verify_skips_sampled_requests_under_rejection():
    verified = VerifiedEngine(RecordingBackend(capacity_of(accept_rule="rejection")))
    sampled = [request(n, temperature=0.5) for n in range(3)]
    kept = [request(3, temperature=0.0), request(4, temperature=0.5, max_draft_tokens=0)]
    verified.serve([*sampled, *kept])
    verified.end_checks()
    assert verified.skipped() == {"rejection": 3}
    assert verified.count("checks") == 2


@pytest.mark.parametrize("lacking", ["plain steps", "logprobs", "second logprob"])
def test_shadow_verify_rejects_backend_without_plain_logprobs(lacking):
    capacity = capacity_of()
    programs = [
        p.with_features(
            {ProgramFeature.LOGPROBS: p.has(ProgramFeature.LOGPROBS) and lacking != "logprobs"}
        )
        for p in capacity.programs
        if not (lacking == "plain steps" and p.work is StepKind.DECODE and p.shape.is_plain)
    ]
    most = 1 if lacking == "second logprob" else 2
    with pytest.raises(ValueError, match="shadow checks require programs"):
        VerifiedEngine(
            RecordingBackend(replace(capacity, programs=tuple(programs), max_logprobs=most))
        )


def test_shadow_verify_rejects_simulated_acceptance():
    with pytest.raises(ValueError, match="simulated acceptance"):
        VerifiedEngine(RecordingBackend(capacity_of(accept_rates=(0.5, 0.5, 0.5))))
