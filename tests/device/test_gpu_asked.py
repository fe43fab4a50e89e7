"""Structured output and prompt logprobs on an NVIDIA GPU, which need programs of their own.

python -m pytest -o addopts= -m gpu tests/device/test_gpu_asked.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.program import ProgramFeature, StepKind
from shared.engine.cache_policy import NO_CACHE
from shared.engine.request import Request, SamplingParams
from shared.spec.logprobs import PromptLogprobs
from tests.support.backends import GPU_FRAMEWORKS, make_backend, make_gpu_backend
from tests.support.drafter_cases import CASES, drafter_of, model_of
from tests.support.run_engine import drive

pytest.importorskip("llguidance", reason="grammars are those of llguidance")
from tests.support import grammar_cases as grammar
from tests.support.closing_fixture import closing_fixture

pytestmark = pytest.mark.gpu

ASKED = ("NEXTN", "EAGLE3", "DFLASH", "DSPARK", "DFLASH2", "NGRAM")
DRAFTERS = [each for each in CASES if each[1] in ASKED]
NUM_SCORES, CLOSE = 2, {"rtol": 1e-4, "atol": 1e-4}


backends = closing_fixture(lambda: grammar.Backends(make_gpu_backend))


@pytest.mark.parametrize("framework", GPU_FRAMEWORKS)
@pytest.mark.parametrize("case", DRAFTERS, ids=lambda case: f"{case[0]}-{case[1]}")
def test_gpu_grammar_preserves_plain_output(framework, case, backends):
    """Masks are read by the captured and the compiled step, at each node of a tree."""
    family, drafter, _ = case
    plain = backends.plain(framework, family, drafter)
    backend = backends.get(framework, case)
    engine = grammar.engine_of(backend, case, NO_CACHE, overlap=2)
    requests = grammar.requests_of(backend.capacity.vocab)
    outcomes = drive(engine, requests)
    grammar.check_texts(requests, outcomes, backend.capacity.vocab)
    for number, outcome in outcomes.items():
        assert outcome.tokens == plain[number].tokens, number
        assert outcome.finish_reason is plain[number].finish_reason
    assert sum(sum(outcomes[number].accepted) for number in (0, 2, 3, 5)) > 0


def scoring(capacity: BackendLimits) -> BackendLimits:
    """With a prefill that scores its tokens too."""
    prefill = next(program for program in capacity.programs if program.work is StepKind.PREFILL)
    programs = (*capacity.programs, prefill.with_features({ProgramFeature.PROMPT_LOGPROBS: True}))
    return replace(capacity, programs=programs, max_scores=NUM_SCORES)


def scores_of(backend: Backend, case: grammar.Case) -> dict[int, PromptLogprobs | None]:
    """Returns logprobs of prompts of one token, of a chunk plus one, and of chunks that share a
    step.
    """
    rng = np.random.default_rng(4)
    requests = [
        Request(
            request_id=number,
            prompt=tuple(rng.integers(2, 250, length).tolist()),
            sampling=SamplingParams(
                temperature=0.0, max_tokens=3, prompt_logprobs=number % (NUM_SCORES + 1)
            ),
        )
        for number, length in enumerate((1, grammar.CHUNK + 1, 40, 7, 100))
    ]
    engine = grammar.engine_of(backend, case, NO_CACHE, overlap=1)
    return {number: outcome.scores for number, outcome in drive(engine, requests).items()}


@pytest.mark.parametrize("framework", GPU_FRAMEWORKS)
def test_gpu_prompt_logprobs_match_spec(framework):
    case = next(each for each in CASES if each[1] == "NEXTN")
    family, drafter, shape = case
    capacity = scoring(grammar.capacity_of(family, drafter, shape))
    made_from = (*model_of(family, drafter), capacity, drafter_of(family, drafter))
    found = []
    for make, name in ((make_backend, "reference"), (make_gpu_backend, framework)):
        backend = make(name, *made_from)
        found.append(scores_of(backend, case))
        backend.close()
    (want, got), equal = found, []
    for number, scores in want.items():
        assert (got[number] is None) is (scores is None)
        if scores is None:
            continue
        np.testing.assert_allclose(got[number].chosen, scores.chosen, **CLOSE)
        np.testing.assert_allclose(got[number].top_values, scores.top_values, **CLOSE)
        # Two tokens may be as good as each other but for rounding.
        assert np.abs(got[number].ranks - scores.ranks).max() <= 1
        equal += [got[number].ranks == scores.ranks, (got[number].top_ids == scores.top_ids).all(1)]
    assert np.concatenate(equal).mean() > 0.95
