"""N-gram drafts of the host: torch = JAX = the numpy backend, and speculation = plain decoding.

The backends differ only in a step with trees in its plan. It runs on the contract's backends, with
a program of four nodes and two levels. The default shape of a start, whose width does not limit the
trees, runs on torch; on JAX it has the marker `matrix`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest

from shared.boundary.program import ProgramFeature, StepKind
from shared.spec.draft_tree import TreeShape
from tests.support.backends import make_backend
from tests.support.contract_host import (
    BATCH,
    PLAIN,
    contract_capacity,
    contract_model,
    either_sampling,
    emitted,
    prompt,
)
from tests.support.ngram_texts import drafted, plain

OVERLAPS = (0, 1, 2)


@lru_cache
def expected(sampled: bool) -> tuple[dict[int, list[int]], dict[int, list[int]]]:
    """Plain texts, and the drafts accepted in each step, both of the numpy backend."""
    config, weights = contract_model()
    backend = make_backend("reference", config, weights, contract_capacity(config), "NEXTN")
    texts = plain(backend, sampled)
    found = drafted(backend, sampled, 0, texts)
    backend.close()
    assert {n: outcome.tokens for n, outcome in found.items()} == texts
    return texts, {n: outcome.accepted for n, outcome in found.items()}


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_ngram_output_and_acceptance_match_spec(backend, sampled, overlap):
    texts, accepted = expected(sampled)
    found = drafted(backend, sampled, overlap, texts)
    assert {n: outcome.tokens for n, outcome in found.items()} == texts
    assert {n: outcome.accepted for n, outcome in found.items()} == accepted


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_plain_output_matches_spec(backend, sampled):
    assert plain(backend, sampled) == expected(sampled)[0]


@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.matrix)])
@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_ngram_default_shape_preserves_output_in_fewer_steps(framework, sampled):
    texts, accepted = expected(sampled)
    config, weights = contract_model()
    capacity = contract_capacity(config)
    shape = TreeShape.chain(7, BATCH)
    wide = [replace(p, shape=shape) for p in capacity.programs if p.has(ProgramFeature.HOST_DRAFT)]
    plain_ones = [p for p in capacity.programs if p.shape.is_plain and p.work is not StepKind.COUNT]
    capacity = replace(capacity, programs=(*plain_ones, *wide))
    backend = make_backend(framework, config, weights, capacity, "NEXTN")
    found = drafted(backend, sampled, 1, texts)
    backend.close()
    assert {n: outcome.tokens for n, outcome in found.items()} == texts
    steps = [
        sum(map(len, counts))
        for counts in (accepted.values(), [o.accepted for o in found.values()])
    ]
    assert steps[1] < steps[0]


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_ngram_drafts_accepted_to_every_depth(sampled):
    """Else the comparison would prove little."""
    counts = {count for counts in expected(sampled)[1].values() for count in counts}
    assert counts == {0, 1, 2}


@either_sampling
def test_ngram_step_without_drafts_after_full_acceptance(host, how):
    """The hybrid's trap (v#52942), where a tree is the text itself and then the root alone."""
    tokens = prompt(9, 20)
    want = host.alone(tokens, 24, **how)
    request = host.request(tokens, **how)
    text = emitted(host.prefill(request), 0)
    for num_drafts in (2, 0, 2, None, 1, 0, 0, 2, 0):
        if num_drafts is None:  # where no row of a batch has a match, the step is a plain one
            result = host.decode(request, shape=PLAIN)
        else:
            drafts = want[len(text) : len(text) + num_drafts]
            result = host.run(host.tree_plan(request, drafts, range(num_drafts)))
        assert result.counts[0] == 1 + (num_drafts or 0)
        text += emitted(result, 0)
    assert text == want[: len(text)]
