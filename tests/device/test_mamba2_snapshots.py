"""State snapshots of Mamba2 hybrids: prefix hits at multiples of the track interval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from shared.boundary.backend import Backend
from shared.engine.cache_policy import NO_CACHE, CachePolicy
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.spec.draft_tree import TreeShape
from tests.support.backends import make_backend
from tests.support.cache_policies import policy_of
from tests.support.drafter_cases import (
    CHAIN,
    CHUNK,
    OVERLAP,
    PLAIN,
    TREE,
    capacity_of,
    controller_of,
    drafter_of,
    model_of,
)
from tests.support.equality import Oracle, assert_few_excused
from tests.support.run_engine import Outcome, drive

CASES = [
    ("nemotron_h", "NEXTN", CHAIN),
    ("nemotron_h", "NEXTN", TREE),
    ("granitemoehybrid", "STANDALONE", CHAIN),
    ("falcon_h1", "NGRAM", CHAIN),
    ("bamba", "none", PLAIN),
]
PROMPT, TOKENS, MORE = 150, 70, 9
HITS = {64: 192, 128: 128}
"""Cached tokens of the second round by track interval: 220 tokens are known after the first one.

A prompt has a snapshot at its last multiple of 64, and outputs at multiples of the interval.
"""
SAMPLINGS = (
    SamplingParams(max_tokens=TOKENS, temperature=0.0),
    SamplingParams(max_tokens=TOKENS, temperature=0.9, seed32=5),
)
Case = tuple[str, str, TreeShape]
Rounds = list[list[tuple[Request, Outcome]]]


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[tuple, Backend]]:
    made: dict[tuple, Backend] = {}
    yield made
    for backend in made.values():
        backend.close()


def rounds(backend: Backend, case: Case, cache: CachePolicy) -> Rounds:
    """Serves each request, and then its whole text with a few more tokens."""
    controller = controller_of(backend.capacity, *case[1:])
    engine = Engine(backend, controller, overlap=OVERLAP, chunked_prefill_size=CHUNK, cache=cache)
    rng, found = np.random.default_rng(4), []
    prompts = rng.integers(2, 250, (len(SAMPLINGS), PROMPT)).tolist()
    for turn in range(2):
        numbered = enumerate(zip(prompts, SAMPLINGS, strict=True), len(SAMPLINGS) * turn)
        asked = [
            Request(request_id=number, prompt=tuple(prompt), sampling=sampling)
            for number, (prompt, sampling) in numbered
        ]
        served = drive(engine, asked)
        found.append([(each, served[each.request_id]) for each in asked])
        more = rng.integers(2, 250, (len(SAMPLINGS), MORE)).tolist()
        texts = [[*each.prompt, *outcome.tokens] for each, outcome in found[-1]]
        prompts = [[*text, *words] for text, words in zip(texts, more, strict=True)]
    return found


def param(framework: str, case: Case):
    is_usual = (framework, case) == ("torch", CASES[0])
    name = f"{framework}-{case[0]}-{case[1]}-N{case[2].nodes}"
    return pytest.param(framework, case, id=name, marks=() if is_usual else pytest.mark.matrix)


@pytest.mark.parametrize("interval", HITS)
@pytest.mark.parametrize(
    ("framework", "case"), [param(each, case) for each in ("torch", "jax") for case in CASES]
)
def test_track_interval_sets_hits_and_preserves_output(framework, case, interval, backends):
    family, drafter, shape = case
    config, weights = model_of(family, drafter)
    if (framework, case) not in backends:
        capacity = capacity_of(family, drafter, shape)
        backends[framework, case] = make_backend(
            framework, config, weights, capacity, drafter_of(family, drafter)
        )
    serve = partial(rounds, backends[framework, case], case)
    policy = replace(policy_of(drafter, is_hybrid=True), track_interval=interval)
    for cold, warm, hit in zip(serve(NO_CACHE), serve(policy), (0, HITS[interval]), strict=True):
        for (asked, want), (request, outcome) in zip(cold, warm, strict=True):
            assert len(outcome.tokens) == TOKENS
            assert request.prompt == asked.prompt
            assert (request.cached_tokens or 0) == hit
            if outcome.tokens != want.tokens:
                Oracle(config, weights).check(request.prompt, outcome.tokens, request.sampling)
    assert_few_excused()
