"""Rejection sampling from plan to output: equal backends, and the target distribution.

Acceptance is tested in `tests/spec/test_acceptance.py`, the distribution on a table of logits in
`tests/spec/test_rejection_distribution.py`. Here drafts come from a head and logits from a model.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from shared.boundary.program import StepKind
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.spec import logprobs, sampling
from shared.spec.draft_tree import TreeShape
from tests.support.backends import make_backend
from tests.support.closing_fixture import closing_fixture
from tests.support.equality import Oracle, spec_sampling
from tests.support.known_distribution_target import LIMIT, chi_square_deviation
from tests.support.rejection_sampling_hybrid import KINDS, PROMPT, Rejecting, requests
from tests.support.run_engine import drive
from tests.support.tree_subjects import CHAIN, DRAFTED, Served, request, tree_capacity

rejecting = closing_fixture(Rejecting)


# XLA compiles a rule for one backend only; the other rule differs by an operation that
# `tests/spec/test_acceptance.py` compares.
PAIRS = [("rejection", "torch"), ("rejection", "jax"), ("block", "torch")]


@pytest.mark.parametrize(("rule", "framework"), PAIRS)
def test_rejection_backends_match_spec(rule: str, framework: str, rejecting: Rejecting) -> None:
    want = rejecting.serve("reference", rule, requests(), overlap=0)
    got = rejecting.serve(framework, rule, requests(), overlap=2)
    for number, kind in enumerate(KINDS):
        assert got[number].tokens == want[number].tokens, kind
        assert got[number].accepted == want[number].accepted, kind
    accepted = {count for outcome in got.values() for count in outcome.accepted}
    assert accepted == {0, 1, 2, 3}


@pytest.mark.parametrize(
    "drafter",
    [
        *("EAGLE3", "DFLASH", "DFLASH2", "STANDALONE"),
        pytest.param("DSPARK", marks=pytest.mark.matrix),
    ],
)
def test_rejection_every_drafter_matches_spec(drafter: str, rejecting: Rejecting) -> None:
    want = rejecting.serve("reference", "rejection", requests(), 0, drafter)
    got = rejecting.serve("torch", "rejection", requests(), 2, drafter)
    for number, kind in enumerate(KINDS):
        assert got[number].tokens == want[number].tokens, kind
        assert got[number].accepted == want[number].accepted, kind
    assert len({count for outcome in got.values() for count in outcome.accepted}) > 1


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rejection_target_as_drafter_accepts_all(rule: str, rejecting: Rejecting) -> None:
    """It proves that q is that of the draft's own level, penalties and filters included."""
    served = rejecting.serve("torch", rule, requests(), 1, "the target itself")
    for number, (kind, how) in enumerate(KINDS.items()):
        most = how.get("max_draft_tokens", CHAIN.depth)
        assert set(served[number].accepted) == {most}, kind


# The other rule's texts are compared over two overlaps for every drafter above.
@pytest.mark.parametrize("rule", [pytest.param("rejection", marks=pytest.mark.matrix), "block"])
def test_rejection_output_independent_of_overlap_and_batch(rule: str, rejecting: Rejecting) -> None:
    together = rejecting.serve("torch", rule, requests(), overlap=1)
    for each in requests():
        alone = rejecting.serve("torch", rule, [each], overlap=0)[each.request_id]
        assert alone.tokens == together[each.request_id].tokens


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rejection_greedy_and_undrafted_output_equals_plain(
    rule: str, rejecting: Rejecting
) -> None:
    served = Served()
    kept = [{}, KINDS["greedy with penalties"], {"temperature": 1.0, "max_draft_tokens": 0}]
    asked = [request(number, (*PROMPT, number), **how) for number, how in enumerate(kept)]
    got = rejecting.serve("torch", rule, asked, overlap=1)
    for each in asked:
        assert got[each.request_id].tokens == served.plain("NEXTN", each).tokens
    served.close()


def test_rejection_logprobs_equal_target(rejecting: Rejecting) -> None:
    (asked,) = [each for each in requests() if each.sampling.logprobs]
    got = rejecting.serve("torch", "rejection", [asked], overlap=1)[asked.request_id]
    oracle = Oracle(rejecting.config, rejecting.weights)
    text = np.array([*asked.prompt, *got.tokens], np.int32)
    logits = oracle.logits(text[:-1])[len(asked.prompt) - 1 :]
    want = logprobs.chosen(logits, text[len(asked.prompt) :])
    # Float32 on both sides; sums of another order move a logit by up to 6e-5.
    np.testing.assert_allclose([chosen for chosen, _ in got.logprobs], want, atol=2e-4)


def test_accept_rule_block_rejects_trees() -> None:
    with pytest.raises(ValueError, match="accept_rule block requires draft chains"):
        replace(tree_capacity(272), accept_rule="block")


TOKENS, TEXTS, WIDE = 4, 800, 64
HOW = {"temperature": 1.0, "top_k": 3, "max_tokens": TOKENS, "presence_penalty": 0.5}


# The distributions of both rules are compared in `tests/spec/test_rejection_distribution.py`.
@pytest.mark.parametrize("rule", [pytest.param("rejection", marks=pytest.mark.matrix), "block"])
def test_rejection_output_follows_target_distribution(rule: str, rejecting: Rejecting) -> None:
    """Three tokens may follow any text, so that 81 texts can be counted."""
    asked = [request(number, PROMPT, seed32=number, **HOW) for number in range(TEXTS)]
    got = drive(wide_engine(rejecting, rule), asked)
    counts = Counter(tuple(outcome.tokens) for outcome in got.values())
    law = exact_law()
    assert counts.keys() <= law.keys()
    seen = np.array([counts[text] for text in law])
    assert chi_square_deviation(seen, TEXTS * np.array(list(law.values()))) < LIMIT
    drafted = [count for outcome in got.values() for count in outcome.accepted]
    assert {0, 1, 2} <= set(drafted)


def wide_engine(rejecting: Rejecting, rule: str) -> Engine:
    """Serves many requests at once, so that many texts take seconds."""
    capacity, shape = tree_capacity(rejecting.config.vocab), TreeShape.chain(3, WIDE)
    like = replace(capacity.programs[0], batch=WIDE, tokens=512, pages=16)
    programs = (like, replace(like, work=StepKind.DECODE, tokens=0, shape=shape))
    sizes = {"num_slots": WIDE + 2, "num_pages": 1 + 16 * (WIDE + 1), "context_length": 40}
    capacity = replace(capacity, programs=programs, accept_rule=rule, **sizes)
    backend = make_backend("torch", rejecting.config, rejecting.weights, capacity, "NEXTN")
    rejecting.backends["torch", rule, "many requests"] = backend
    controller = StaticController(capacity, nodes=4, depth=3, width=1)
    return Engine(backend, controller, overlap=1, chunked_prefill_size=512, cache=NO_CACHE)


@cache
def exact_law() -> dict[tuple[int, ...], float]:
    """The probability of each text by the specification."""
    config, weights = DRAFTED["NEXTN"].model()
    oracle, laws = Oracle(config, weights), {(): 1.0}
    for _ in range(TOKENS):
        laws = dict(
            itertools.chain.from_iterable(
                (((*text, v), before * after) for v, after in _next(oracle, text))
                for text, before in laws.items()
            )
        )
    return laws


def _next(oracle: Oracle, output: tuple[int, ...]) -> list[tuple[int, float]]:
    text = np.array([*PROMPT, *output], np.int32)
    params = request(0, PROMPT, **HOW).sampling
    logits = oracle.logits(text)[-1:]
    seen = np.zeros(logits.shape, np.int32)
    seen[0, list(PROMPT)] = 1
    for token in output:
        seen[0, token] += 2
    rows = spec_sampling(params, len(PROMPT), logits.shape[1], 1)
    row, positions = np.zeros(1, np.int32), np.array([len(text)], np.int32)
    alone = sampling.counts_alone(seen, row)
    scores = sampling.processed(logits, alone, positions, rows, row, None)
    (law,) = sampling.probabilities(scores)
    return [(int(v), float(law[v])) for v in np.flatnonzero(law)]
