"""Structured output: equal with every drafter, in batches with and without other grammars.

The plain output with a grammar is that of a backend without a drafter, with one node per step.
"""

from __future__ import annotations

import pytest

from shared.engine.cache_policy import NO_CACHE
from shared.engine.engine import Engine
from shared.engine.request import Event, FinishReason
from tests.support.cache_policies import policy_of
from tests.support.closing_fixture import closing_fixture
from tests.support.drafter_cases import CASES
from tests.support.grammar_cases import Backends, check_texts, engine_of, requests_of
from tests.support.mutations import prover
from tests.support.run_engine import drive

PREEMPTED_EVERY = 5
"""Steps after which the youngest request loses its slot as soon as it can, in one of the runs."""


class Preempting(Engine):
    """An engine that preempts its requests repeatedly, as if pages were short."""

    since = 0

    def step(self) -> list[Event]:
        self.since += 1
        running = self.scheduler.running
        if self.since >= PREEMPTED_EVERY and len(running) > 1 and running[-1].has_no_step_in_flight:
            self.scheduler.preempt(running[-1])
            self.since = 0
        return super().step()


backends = closing_fixture(Backends)


def test_grammar_output_reaches_stop(backends):
    case = next(case for case in CASES if case[1] == "NEXTN")
    backend = backends.get("torch", case)
    requests = [requests_of(backend.capacity.vocab)[number] for number in (0, 2)]
    outcomes = drive(engine_of(backend, case, NO_CACHE, overlap=2), requests)
    check_texts(requests, outcomes, backend.capacity.vocab)
    assert FinishReason.STOP in {outcome.finish_reason for outcome in outcomes.values()}
    assert sum(sum(outcome.accepted) for outcome in outcomes.values()) > 0


RUNS = [
    pytest.param(framework, case, id=f"{framework}-{case[0]}-{case[1]}", marks=marks)
    for framework, chosen in (
        ("torch", ("EAGLE3", "NGRAM")),
        ("jax", ()),
        ("reference", ()),
    )
    for case in CASES
    for marks in ([] if case[1] in chosen else [pytest.mark.matrix],)
]


@pytest.mark.parametrize(("framework", "case"), RUNS)
def test_grammar_with_every_drafter_preserves_plain_output(framework, case, backends):
    """Also with steps in flight, on hits of the prefix cache, and where requests are preempted."""
    family, drafter, _ = case
    backend = backends.get(framework, case)
    vocab = backend.capacity.vocab
    plain = backends.plain("torch", family, drafter)
    check_texts(requests_of(vocab), plain, vocab)
    ends = {number: outcome.finish_reason for number, outcome in plain.items()}
    assert FinishReason.STOP in {ends[number] for number in (0, 2, 3, 5)}
    assert ends[7] is FinishReason.STOP, "the thought came to no end"
    policy = policy_of(drafter, is_hybrid=family == "qwen3_5")
    accepted = 0
    for cache, made in ((NO_CACHE, Engine), (policy, Preempting)):
        engine = engine_of(backend, case, cache, overlap=2, made=made)
        requests = requests_of(vocab)
        outcomes = drive(engine, requests)
        assert (engine.scheduler.num_preemptions > 0) is (made is Preempting)
        for number, outcome in outcomes.items():
            assert outcome.tokens == plain[number].tokens, number
            assert outcome.finish_reason is plain[number].finish_reason
        accepted += sum(sum(outcomes[number].accepted) for number in (0, 2, 3, 5))
        prompts = engine.metrics.snapshot()["prompt_tokens_total"]
        assert prompts == sum(len(request.prompt) for request in requests)
    if drafter != "none":
        assert accepted > 0, "no draft of a text with a grammar was ever accepted"


test_planted_fault_is_detected = prover("device/test_grammar", globals())
