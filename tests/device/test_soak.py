"""Soak over few pages: every output equals plain decoding, nothing leaks."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import product

import pytest

from shared.boundary.backend import Backend
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import FinishReason, Request, SamplingParams
from shared.spec.gumbel_noise import derive_seed
from tests.support.backends import make_backend
from tests.support.cache_policies import policy_of
from tests.support.drafter_cases import (
    CASES,
    CHAIN,
    CHUNK,
    Fewer,
    capacity_of,
    controller_of,
    drafter_of,
    model_of,
)
from tests.support.equality import Oracle, assert_few_excused
from tests.support.run_engine import Outcome, checked_step, drive

CHATS, TURNS, MOST_TOKENS, OVERLAP = 8, 3, 24, 2
QUEUED = 12
FEW_PAGES = 20
"""For what takes up to 11 pages each, three at a time."""

DELTA = (CASES[1], CASES[3])
MAMBA2 = ("nemotron_h", "NEXTN", CHAIN)
RUNS = [("torch", MAMBA2, 100, 0)]
"""Framework, case, number of requests, and number of the draw."""

MATRIX = [(framework, case, 5000, 1) for framework, case in product(("torch", "jax"), DELTA)]
MATRIX += [
    (framework, MAMBA2, 500, number) for framework in ("torch", "jax") for number in range(1, 5)
]


def kinds_of(backend: Backend) -> list[tuple[Request, list[int]]]:
    """The rounds of all chats, each with its plain output."""
    rng, kinds = random.Random(3), []
    system = [rng.randrange(2, 250) for _ in range(30)]
    texts = [[*system, *(rng.randrange(2, 250) for _ in range(20))] for _ in range(CHATS)]
    for turn in range(TURNS):
        asked = [_request(number, text, number) for number, text in enumerate(texts)]
        controller = StaticController(backend.capacity, nodes=1, depth=0, width=0)
        engine = Engine(backend, controller, overlap=1, chunked_prefill_size=CHUNK, cache=NO_CACHE)
        served = drive(engine, asked)
        kinds += [(each, served[each.request_id].tokens) for each in asked]
        more = [rng.randrange(2, 250) for _ in range(9 + turn)]
        texts = [[*each.prompt, *served[each.request_id].tokens, *more] for each in asked]
    return kinds


def _request(number: int, prompt: list[int], chat: int) -> Request:
    """Greedy, sampled and penalised requests alternate."""
    how = [{"temperature": 0.0}, {"temperature": 0.9}, {"repetition_penalty": 1.1}][chat % 3]
    params = SamplingParams(max_tokens=MOST_TOKENS, seed32=derive_seed(9, chat), **how)
    return Request(request_id=number, prompt=tuple(prompt), sampling=params)


def param(run: tuple, marks: tuple = ()):
    framework, case, count, number = run
    name = f"{framework}-{case[0]}-{case[1]}-{count}-{number}"
    return pytest.param(framework, case, count, number, id=name, marks=marks)


@pytest.mark.parametrize(
    ("framework", "case", "count", "number"),
    [*map(param, RUNS), *(param(run, (pytest.mark.matrix,)) for run in MATRIX)],
)
def test_soak_preserves_output_and_pages(framework, case, count, number):
    made = (*model_of(*case[:2]), capacity_of(*case), drafter_of(*case[:2]))
    backend = make_backend(framework, *made)
    kinds = kinds_of(backend)
    few = Fewer(backend, FEW_PAGES)
    engine = Engine(
        few,
        controller_of(few.capacity, case[1], case[2]),
        overlap=OVERLAP,
        chunked_prefill_size=CHUNK,
        cache=policy_of(case[1], is_hybrid=True),
    )
    rng, usage = random.Random(number), []
    asked: dict[int, tuple[int, Request, Outcome]] = {}
    left: set[int] = set()
    while engine.busy or len(asked) < count:
        while len(asked) < count and len(engine.scheduler.waiting) < QUEUED:
            kind = rng.randrange(len(kinds))
            new = replace(
                kinds[kind][0],
                request_id=len(asked),
                output=[],
                slot=0,
                cached_tokens=None,
                finish_reason=None,
                tenant=rng.choice(("", "", "other")),
                priority=rng.choice((0, 0, 1)),
            )
            asked[new.request_id] = kind, new, Outcome()
            engine.add(new)
        for event in checked_step(engine):
            asked[event.request_id][2].take(event)
        usage.append(1 - engine.allocator.pages.num_free / (FEW_PAGES - 1))
        if rng.random() < 0.02 and engine.scheduler.running:
            gone = rng.choice(engine.scheduler.running)
            left.add(gone.request_id)
            engine.abort(gone.request_id)
    oracle, num_hit = Oracle(*model_of(*case[:2])), engine.cache.num_hit
    ties, accepted = 0, Counter[int]()
    for kind, request, outcome in asked.values():
        text = kinds[kind][1]
        accepted.update(outcome.accepted)
        if request.request_id in left:
            assert outcome.tokens == text[: len(outcome.tokens)] or outcome.finish_reason
            continue
        assert outcome.finish_reason in (FinishReason.LENGTH, FinishReason.STOP)
        if outcome.tokens != text:
            oracle.check(request.prompt, outcome.tokens, request.sampling)
            ties += 1
    assert_few_excused()
    assert sum(usage) / len(usage) > 0.95
    assert engine.scheduler.num_preemptions > 0
    with_hit = sum(bool(request.cached_tokens) for _, request, _ in asked.values())
    assert with_hit > len(asked) / 20
    assert {0, 1, 2, 3} <= accepted.keys()
    engine.cache.tree.evict(engine.cache.num_pages)
    engine.cache.check([])
    assert engine.allocator.pages.num_free == FEW_PAGES - 1
    assert engine.allocator.num_free_slots == few.capacity.num_slots - 1
    assert engine.cache.tree.snapshots.num_free == few.capacity.num_snapshots - 1
    print(
        f"{framework} {case[0]} {case[1]}: {len(asked)} requests, {len(left)} aborted, "
        f"{ties} with a near tie, {engine.scheduler.num_preemptions} preemptions, "
        f"{with_hit} with prefix hits of {num_hit / engine.cache.num_queried:.1%} of all prompt "
        "tokens, "
        f"{1 + sum(n * k for n, k in accepted.items()) / accepted.total():.2f} tokens a step, "
        f"pages in use {sum(usage) / len(usage):.1%}"
    )
    backend.close()
