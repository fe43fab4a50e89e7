"""Prompt logprobs on the toy backend: one value per token for any prefill schedule."""

from __future__ import annotations

import random

import numpy as np
import pytest

from shared.boundary.backend import StepPlan
from shared.boundary.program import ProgramFeature
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import FinishReason, Request, SamplingParams
from shared.spec.gated_delta import CHUNK
from shared.spec.logprobs import PromptLogprobs
from tests.support.cache_policies import policy_of
from tests.support.random_traffic import plain_text
from tests.support.run_engine import Outcome, checked_step, drive
from tests.support.toy_backend import POISON, ToyBackend, ToyFuture, toy_capacity

K = 2


class RecordingBackend(ToyBackend):
    """Records for each prefill whether it computes prompt logprobs."""

    def __init__(self, *, num_pages: int, draft_reach: int | None) -> None:
        capacity = toy_capacity(num_pages=num_pages, num_slots=5, overlap=2, max_scores=K)
        super().__init__(capacity, draft_reach)
        self.scored: list[bool] = []

    def submit(self, plan: StepPlan) -> ToyFuture:
        if plan.program.tokens:
            self.scored.append(plan.program.has(ProgramFeature.PROMPT_LOGPROBS))
        return super().submit(plan)


def make(
    *,
    num_pages: int = 400,
    overlap: int = 1,
    depth: int = 3,
    chunk: int = CHUNK,
    caches: bool = True,
) -> tuple[Engine, RecordingBackend]:
    backend = RecordingBackend(num_pages=num_pages, draft_reach=1 if depth else None)
    controller = StaticController(
        backend.capacity, nodes=depth + 1, depth=depth, width=min(depth, 1)
    )
    policy = policy_of("NEXTN" if depth else "none", is_hybrid=False)
    cache = policy if caches else NO_CACHE
    how = {"overlap": overlap, "chunked_prefill_size": chunk, "cache": cache}
    return Engine(backend, controller, **how), backend


def request(number: int, prompt: tuple[int, ...], **sampling) -> Request:
    given = {"seed32": number, "prompt_logprobs": K, "max_tokens": 8} | sampling
    return Request(request_id=number, prompt=prompt, sampling=SamplingParams(**given))


def prompt_of(seed: int, length: int) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(POISON) for _ in range(length))


def assert_scored(asked: Request, outcome: Outcome) -> None:
    """Asserts the toy's logprobs of every token but the first, by id and position."""
    count = asked.sampling.prompt_logprobs
    if count is None or len(asked.prompt) == 1:
        assert outcome.scores is None
        return
    found, later = outcome.scores, np.array(asked.prompt[1:])
    assert found is not None
    want = -(later + np.arange(1, len(asked.prompt)) / 1000)
    np.testing.assert_array_equal(found.chosen, want.astype(np.float32))
    np.testing.assert_array_equal(found.ranks, later + 1)
    np.testing.assert_array_equal(found.top_ids, later[:, None] + np.arange(count))
    np.testing.assert_array_equal(found.top_values, -found.top_ids)


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("num_pages", [52, 400])
def test_prompt_logprobs_scored_once_for_overlap_and_preemption(overlap, depth, num_pages):
    """Covers preemption within and after the prompt."""
    rng = random.Random(overlap)
    engine, _ = make(num_pages=num_pages, overlap=overlap, depth=depth, chunk=64 + 64 * (depth > 0))
    requests = [
        request(
            number,
            prompt_of(number % 7, rng.choice((1, 2, 64, 65, 100, 130, 150))),
            max_tokens=rng.randrange(0, 40),
            prompt_logprobs=rng.choice((None, 0, 1, 2)),
        )
        for number in range(40)
    ]
    outcomes = drive(engine, requests)
    for each in requests:
        assert_scored(each, outcomes[each.request_id])
        assert outcomes[each.request_id].tokens == plain_text(each)
    assert (engine.scheduler.num_preemptions > 0) == (num_pages == 52)


def test_prompt_logprobs_bypass_cache_hits_and_fill_cache():
    engine, backend = make()
    prompt = prompt_of(1, 150)
    for number, count in enumerate((None, K, None)):
        before = backend.num_fed
        asked = request(number, prompt, prompt_logprobs=count, max_tokens=0)
        assert_scored(asked, drive(engine, [asked])[number])
        assert backend.num_fed - before == (2 if number == 2 else 150), number


def test_prompt_logprobs_choices_prefill_independently():
    engine, backend = make(chunk=128)
    asked = [request(number, prompt_of(1, 100), max_tokens=0) for number in range(2)]
    outcomes = drive(engine, asked)
    assert backend.num_fed == 200
    for each in asked:
        assert_scored(each, outcomes[each.request_id])


def test_prompt_logprobs_program_used_only_when_requested():
    engine, backend = make()
    drive(engine, [request(0, prompt_of(1, 100), prompt_logprobs=None)])
    assert not any(backend.scored)
    drive(engine, [request(1, prompt_of(2, 100))])
    assert all(backend.scored[-2:])


def test_prompt_logprobs_not_recomputed_after_preemption():
    """A request that has its prompt logprobs uses cache hits like every other one."""
    engine, backend = make(depth=0, overlap=0)
    asked = request(0, prompt_of(1, 150), max_tokens=20)
    outcome = Outcome()
    engine.add(asked)
    while len(asked.output) < 5 or not asked.has_no_step_in_flight:
        for event in checked_step(engine):
            outcome.take(event)
    before = backend.num_fed
    engine.scheduler.preempt(asked)
    while engine.busy:
        for event in checked_step(engine):
            outcome.take(event)
    assert backend.num_fed - before < 10
    assert_scored(asked, outcome)
    assert outcome.tokens == plain_text(asked)


@pytest.mark.parametrize("caches", [False, True])
def test_prompt_logprobs_complete_after_preemption_within_prompt(caches):
    """Evicted parts of the prompt are prefilled and scored again."""
    engine, backend = make(overlap=0, caches=caches)
    asked, outcome = request(0, prompt_of(1, 150)), Outcome()
    engine.add(asked)
    checked_step(engine)
    assert asked.num_scored == CHUNK
    engine.scheduler.preempt(asked)
    while engine.busy:
        for event in checked_step(engine):
            outcome.take(event)
    assert backend.num_fed == 150 + (0 if caches else CHUNK)
    assert_scored(asked, outcome)


@pytest.mark.parametrize("overlap", [0, 2])
def test_max_tokens_zero_ends_after_prefill(overlap):
    engine, _ = make(overlap=overlap)
    asked = [request(n, prompt_of(n, 100), max_tokens=0, prompt_logprobs=1 - n) for n in range(2)]
    for number, outcome in drive(engine, asked).items():
        assert (outcome.tokens, outcome.finish_reason) == ([], FinishReason.LENGTH)
        assert_scored(asked[number], outcome)
    assert engine.metrics.snapshot()["prompt_tokens_total"] == 200
    assert engine.metrics.snapshot()["generation_tokens_total"] == 0


def test_nan_prompt_logprob_fails_only_its_request(monkeypatch):
    engine, backend = make()
    original = backend._scores

    def broken(plan: StepPlan) -> PromptLogprobs:
        found = original(plan)
        found.chosen[plan.work.tokens == 7] = np.nan
        return found

    monkeypatch.setattr(backend, "_scores", broken)
    asked = [request(0, (1, 2, 7, 3)), request(1, (1, 2, 4, 3))]
    outcomes = drive(engine, asked)
    assert outcomes[0].finish_reason is FinishReason.ERROR
    assert_scored(asked[1], outcomes[1])
    assert outcomes[1].tokens == plain_text(asked[1])
