"""Step traces: the steps of a request sum to its output, other requests are unaffected."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from shared.boundary.backend import BackendLimits
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.ngram.corpus import SEPARATOR, Corpus
from shared.engine.ngram.index import NgramIndex
from shared.engine.ngram.tree import corpus_nodes
from shared.engine.request import DRAFT, MERGED, NGRAM, PLAIN, PREFILL, Request, SamplingParams
from shared.engine.step_trace import accepted_path
from shared.options.ngram import NgramConfig
from shared.spec.draft_tree import TreeShape
from tests.support import random_requests
from tests.support.closing_fixture import closing_fixture
from tests.support.random_requests import CHAIN, TREE, Asked, Server
from tests.support.random_serving import Backends, check, serve
from tests.support.run_engine import Outcome, drive
from tests.support.toy_backend import ToyBackend, toy_capacity
from tests.support.traces import check_trace

SLOTS = 5


class Changing(StaticController):
    """Alternates a chain and a plain step."""

    def __init__(self, capacity: BackendLimits) -> None:
        super().__init__(capacity, nodes=4, depth=3, width=1)
        self._steps = 0

    def shape_for(self, num_rows: int) -> TreeShape:
        self._steps += 1
        return TreeShape.chain(3 * (self._steps % 2), 2 if num_rows <= 2 else 4)


def engine_of(*, num_pages: int, overlap: int) -> Engine:
    backend = ToyBackend(toy_capacity(num_pages=num_pages, num_slots=SLOTS, overlap=2), None)
    sizes = {"overlap": overlap, "chunked_prefill_size": 64, "cache": NO_CACHE}
    return Engine(backend, Changing(backend.capacity), **sizes)


def requests_of(traced: set[int]) -> list[Request]:
    return [
        Request(
            request_id=number,
            prompt=tuple(range(1 + number, 30 + 7 * number)),
            sampling=SamplingParams(max_tokens=40, seed32=number, traces=number in traced),
        )
        for number in range(8)
    ]


@pytest.mark.parametrize(("overlap", "num_pages"), [(0, 400), (2, 400), (1, 45)])
def test_step_trace_sums_to_output(overlap, num_pages):
    engine = engine_of(num_pages=num_pages, overlap=overlap)
    outcomes = drive(engine, requests_of(set(range(8))))
    assert (engine.scheduler.num_preemptions > 0) == (num_pages == 45)
    for outcome in outcomes.values():
        assert len(outcome.tokens) == 40
        check_trace(outcome, max_rows=SLOTS - 1)
    steps = [event.step for outcome in outcomes.values() for event in outcome.traced]
    assert {step.source for step in steps if step} == {PREFILL, PLAIN, DRAFT}
    assert max(step.num_rows for step in steps if step) > 1
    # Requests of one step share its number.
    assert len({step.number for step in steps if step}) < len(steps)


def test_step_trace_only_for_requesting_requests():
    """Tracing changes no output, neither of traced nor of other requests."""
    with_trace, without_trace = (
        drive(engine_of(num_pages=400, overlap=1), requests_of(traced))
        for traced in ({2, 5}, set())
    )
    assert {number for number, outcome in with_trace.items() if outcome.traced} == {2, 5}
    assert {n: (o.tokens, o.accepted) for n, o in with_trace.items()} == {
        n: (o.tokens, o.accepted) for n, o in without_trace.items()
    }


def test_accepted_path_found_among_siblings():
    #      root: 7, 8      under 7: 8, 9      under 8: 7
    drafts, parents = [7, 8, 8, 9, 7], [0, 0, 1, 1, 2]
    assert accepted_path(drafts, parents, []) == []
    assert accepted_path(drafts, parents, [8, 7]) == [2, 5]
    assert accepted_path(drafts, parents, [7, 9]) == [1, 4]
    assert accepted_path(drafts, parents, [7, 1, 9]) == [1], "no node of the tree has this token"


def test_corpus_nodes_exclude_ngram_nodes():
    config = NgramConfig(speculative_ngram_external_sam_budget=2)
    index = NgramIndex(config, nodes=6, depth=3, vocab=50, chain=False)
    index.corpora.add("own", Corpus.build(np.array([1, 2, 30, 31, 32, SEPARATOR], np.int32)))
    text = Request(request_id=1, prompt=(), sampling=SamplingParams())
    index.add_tokens(text, [1, 2, 3, 4, 1, 2])
    index.trees([text])
    index.learn()
    trees = index.trees([text])
    nodes = corpus_nodes(trees, 0)
    assert trees.tokens[0, nodes].tolist() == [30, 31]
    others = set(range(1, trees.num_nodes[0])) - set(nodes)
    assert trees.tokens[0, sorted(others)].tolist()[:1] == [3]


SERVED = [
    ("llama", "none", random_requests.PLAIN, "exact"),
    ("qwen3_5", "NEXTN", CHAIN, "exact"),
    ("qwen3_5", "NEXTN", CHAIN, "rejection"),
    ("llama", "EAGLE", TREE, "exact"),
    ("llama", "EAGLE3", TREE, "exact"),
    ("llama", "STANDALONE", CHAIN, "exact"),
    ("llama", "DFLASH", CHAIN, "exact"),
    ("llama", "NGRAM", TREE, "exact"),
    ("qwen3_5", "NEXTN+NGRAM", CHAIN, "exact"),
    ("llama", "EAGLE+NGRAM", TREE, "exact"),
    ("llama", "EAGLE3+NGRAM", TREE, "exact"),
    ("llama", "STANDALONE+NGRAM", CHAIN, "exact"),
    ("llama", "DFLASH+NGRAM", CHAIN, "exact"),
]
RUNS = [
    pytest.param(framework, case, id=f"{framework}-{case[1]}-{case[3]}", marks=marks)
    for framework, marks in (
        ("reference", ()),
        ("torch", pytest.mark.matrix),
        ("jax", pytest.mark.matrix),
    )
    for case in SERVED
]


backends = closing_fixture(Backends)


@pytest.mark.parametrize(("framework", "case"), RUNS)
def test_step_trace_of_every_drafter_sums_to_output(framework, case, backends):
    """Outputs are compared with the specification, and each trace with its output."""
    family, drafter, shape, rule = case
    server = Server(
        framework=framework,
        family=family,
        drafter=drafter,
        shape=shape,
        rule=rule,
        page_size=16,
        overlap=1,
        spare=1.0,
        scope="tenant",
        match_type="BFS",
        caches=False,
    )
    visits = serve(server, traffic(), backends)
    for visit in visits:
        check(server, visit)
    wanted = {"none": PLAIN, "NGRAM": NGRAM}.get(drafter, MERGED if server.joins else DRAFT)
    assert wanted in {source for visit in visits for source in sources(visit.outcome)}


def traffic() -> list[Asked]:
    """Two requests with repetitive prompts, the second one sampled."""
    rng = np.random.default_rng(3)
    return [
        Asked(
            prompt=prompt_of(rng.integers(2, 250, 9).tolist()),
            sampling=SamplingParams(max_tokens=16, temperature=temperature),
            seed=4,
            choices=1,
            tenant="",
            arrives=0,
            leaves=None,
            late=None,
        )
        for temperature in (0.0, 0.7)
    ]


def prompt_of(words: Sequence[int]) -> tuple[int, ...]:
    return (*words, *words, *words[:4])


def sources(outcome: Outcome) -> list[str]:
    return [event.step.source for event in outcome.traced if event.step]
