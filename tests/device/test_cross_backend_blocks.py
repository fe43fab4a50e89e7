"""DFlash blocks: JAX = torch = the specification, and speculation = plain decoding.

A head with sliding and full layers drafts for a plain and for a hybrid target, with embeddings that
a small head can follow. Requests and comparisons are those of `tests/device/test_cross_backend.py`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest

from shared.boundary.backend import Backend, BackendLimits
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.models.families import config_from_folder
from shared.spec.draft_tree import TreeShape
from tests.support import cells
from tests.support.backends import FRAMEWORKS, make_backend
from tests.support.block_cells import (
    CHAIN,
    PLAIN,
    SHARED,
    SHORT,
    Backends,
    assert_cell,
    cell,
    head_of,
    model_of,
    oracle_of,
)
from tests.support.cells import (
    BATCH,
    GREEDY,
    LOADS,
    OVERLAPS,
    SAMPLED,
    capacity_of,
    requests_of,
    serve,
)
from tests.support.closing_fixture import closing_fixture
from tests.support.contract_host import Host, prompt
from tests.support.drafter_cases import Fewer
from tests.support.golden_blocks import golden_block_head
from tests.support.no_draft_after_accept_all import Starving
from tests.support.run_engine import drive
from tests.support.tiny_models import FAMILIES
from tests.support.tree_recorder import Recorder

backends = closing_fixture(Backends)


JAX_CELLS = [
    cell("qwen3_5", how, "mixed", overlap, 16) for how, overlap in ((GREEDY, 1), (SAMPLED, 2))
]
CELLS = [
    cell("qwen3_5", SAMPLED, "mixed", 2, 16),
    cell("qwen3_5", SAMPLED, "alone", 0, 1),
    cell("qwen3", GREEDY, "mixed", 2, 64),
    cell("llama", SAMPLED, "mixed", 0, 16),
]
MATRIX = [
    cell(*each) for each in product(FAMILIES, (GREEDY, SAMPLED), LOADS, OVERLAPS, (1, 16, 64))
]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_torch_block_drafts_match_spec(cell, backends):
    assert_cell(cell, backends, ("reference", "torch"))


@pytest.mark.parametrize("cell", JAX_CELLS, ids=str)
def test_jax_block_drafts_match_torch(cell, backends):
    assert_cell(cell, backends, ("torch", "jax"))


@pytest.mark.matrix
@pytest.mark.parametrize("cell", MATRIX, ids=str)
def test_block_drafts_full_matrix_match(cell, backends):
    assert_cell(cell, backends, ("torch", "jax"))


@pytest.mark.parametrize(
    ("family", "sampling"),
    [
        ("qwen3", GREEDY),
        ("qwen3_5", SAMPLED),
        pytest.param("qwen3", SAMPLED, marks=pytest.mark.matrix),
        pytest.param("qwen3_5", GREEDY, marks=pytest.mark.matrix),
    ],
)
def test_block_acceptance_independent_of_overlap(family, sampling, backends):
    """The acceptance of another engine differed in each combination (s#20547)."""
    runs = [
        backends.served("torch", each)
        for each in (cell(family, sampling, "mixed", overlap, 16) for overlap in OVERLAPS)
    ]
    accepted = [{key: run[key].accepted for key in run} for run in runs]
    assert accepted[0] == accepted[1] == accepted[2]
    found = {count for counts in accepted[0].values() for count in counts}
    assert found == {0, 1, 2, 3}


def engine_of(backend: Backend) -> Engine:
    capacity = backend.capacity
    controller = StaticController(capacity, nodes=CHAIN.nodes, depth=CHAIN.depth, width=1)
    return Engine(backend, controller, overlap=1, chunked_prefill_size=64, cache=NO_CACHE)


class InTurns(StaticController):
    """Plain steps and drafted ones: a plain step leaves a hole in the context before it."""

    def __init__(self, capacity: BackendLimits) -> None:
        super().__init__(capacity, nodes=CHAIN.nodes, depth=CHAIN.depth, width=CHAIN.width)
        self._steps = 0

    def shape_for(self, num_rows: int) -> TreeShape:
        self._steps += 1
        return PLAIN if self._steps % 5 in (1, 2) else CHAIN


class Tiers(StaticController):
    """The shapes one after the other."""

    def __init__(self, capacity: BackendLimits, shapes: tuple[TreeShape, ...]) -> None:
        super().__init__(capacity, nodes=CHAIN.nodes, depth=CHAIN.depth, width=CHAIN.width)
        self._turns = cycle(shapes)

    def shape_for(self, num_rows: int) -> TreeShape:
        return next(self._turns)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize(
    ("frameworks", "shapes"),
    [
        pytest.param(("reference", "torch"), (SHORT,), id="short", marks=pytest.mark.matrix),
        pytest.param(("reference", "torch"), (SHORT, CHAIN, PLAIN, SHARED), id="all"),
        pytest.param(("torch", "jax"), (SHARED, CHAIN), id="jax", marks=pytest.mark.matrix),
    ],
)
def test_short_chain_and_verify_budget_preserve_plain_output(
    frameworks, shapes, sampling, backends
):
    """And the backends accept alike, whichever of a block's drafts a step verifies."""
    each, served = cell("qwen3_5", sampling, "mixed", 1, 16), {}
    for framework in frameworks:
        backend = backends.get(framework, each)
        engine = Engine(
            backend,
            Tiers(backend.capacity, shapes),
            overlap=1,
            chunked_prefill_size=64,
            cache=NO_CACHE,
        )
        served[framework] = drive(engine, requests_of(each))
    cells.compare(each, served, oracle_of(each.family))
    found = {count for outcome in served["torch"].values() for count in outcome.accepted}
    assert set(range(1 + SHORT.depth)) <= found


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_short_chain_keeps_block_drafts_within_scratch(framework, backends):
    """The page table continues with a neighbour's page; a write would replace its only context."""
    backend = backends.get(framework, cell("qwen3_5", GREEDY, "mixed", 1, 16))
    host, page = Host(backend, {}), backend.capacity.page_size
    tokens = prompt(6, page - SHARED.scratch)  # the first step ends at a page boundary
    request, twin = (host.request(tokens, positions=page) for _ in range(2))
    neighbour, spared = (host.request(prompt(5, 1), positions=page) for _ in range(2))
    host.prefill(request, twin)
    host.prefill(neighbour, spared)
    plan = host.decode_plan(request, shape=SHARED)
    plan.page_table[0, 1] = host.allocator.pages.page_table[neighbour.slot, 0]
    short, whole = host.run(plan), host.decode(twin, shape=CHAIN)
    assert short.num_nodes[0] == SHARED.nodes
    np.testing.assert_array_equal(short.drafts[0], whole.drafts[0, : SHARED.nodes])
    results = [host.decode(each, shape=CHAIN) for each in (neighbour, spared)]
    np.testing.assert_array_equal(results[0].drafts, results[1].drafts)
    for each in (request, twin, neighbour, spared):
        host.allocator.free(each.slot)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_draft_kv_gaps_preserve_plain_output(family, backends):
    each, served = cell(family, SAMPLED, "mixed", 1, 16), {}
    for framework in ("reference", "torch"):
        backend = backends.get(framework, each)
        engine = Engine(
            backend, InTurns(backend.capacity), overlap=1, chunked_prefill_size=64, cache=NO_CACHE
        )
        served[framework] = drive(engine, requests_of(each))
    cells.compare(each, served, oracle_of(family))
    assert any(sum(outcome.accepted) for outcome in served["torch"].values())


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_step_without_drafts_after_full_acceptance_preserves_output(framework, sampling, backends):
    each = cell("qwen3_5", sampling, "alone", 1, 16)
    backend = Starving(backends.get(framework, each))
    cells.compare(each, {framework: serve(backend, each)}, oracle_of(each.family))
    assert backend.max_before, "no step accepted all of its drafts"


def with_max_drafts(request: Request, most: int) -> Request:
    sampling = replace(request.sampling, max_draft_tokens=most)
    return Request(request_id=request.request_id, prompt=request.prompt, sampling=sampling)


@pytest.mark.parametrize("framework", ["reference", "torch"])
def test_max_drafts_shortens_chain_and_preserves_block(framework, backends):
    """A row attends to its whole block, so a narrower block would change the other drafts."""
    each, chains = cell("qwen3_5", GREEDY, "alone", 0, 16), []
    for most in (0, 1, 2, 3):
        backend = Recorder(backends.get(framework, each))
        drive(engine_of(backend), [with_max_drafts(requests_of(each)[0], most)])
        first_tokens, first_parents = backend.trees()[0]
        assert not any(first_tokens[1 + most :])
        assert first_parents == tuple(max(i - 1, 0) if i <= most else 0 for i in range(4))
        chains.append(first_tokens)
    for most, chain in enumerate(chains):
        assert chain[: 1 + most] == chains[-1][: 1 + most]


@pytest.mark.parametrize("framework", ["reference", "torch"])
def test_block_drafting_resumes_after_preemption(framework, backends):
    """With few pages some requests give theirs up and begin again with prompt and output."""
    each = cell("qwen3", SAMPLED, "mixed", 1, 16)
    backend = Fewer(backends.get(framework, each), 1 + 11)
    engine = engine_of(backend)
    crowded = drive(engine, requests_of(each))
    assert engine.scheduler.num_preemptions
    free = drive(engine_of(backends.get(framework, each)), requests_of(each))
    cells.compare(each, {"crowded": crowded, "free": free}, oracle_of("qwen3"))


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.matrix)])
def test_block_rejection_sampling_matches_spec(framework, rule):
    each, served = cell("qwen3", SAMPLED, "mixed", 1, 16), []
    capacity = replace(capacity_of("qwen3", 16, (CHAIN,)), accept_rule=rule)
    for name in ("reference", framework):
        backend = make_backend(name, *model_of("qwen3"), capacity, head_of("qwen3"))
        served.append(drive(engine_of(backend), requests_of(each)))
        backend.close()
    want, got = served
    for number, outcome in want.items():
        assert got[number].tokens == outcome.tokens
        assert got[number].accepted == outcome.accepted
    assert {n for outcome in want.values() for n in outcome.accepted} == {0, 1, 2, 3}


@pytest.mark.parametrize("framework", ["reference", "torch"])
def test_block_drafts_generate_golden_output(framework):
    """The text of the reference implementation's own loop of drafting and verifying."""
    folder = Path(__file__).parents[1] / "golden"
    want = np.load(folder / "dflash" / "vectors.npz")
    prompt, text = want["generate_prompt"].tolist(), want["generate_ids"].tolist()
    head, weights = golden_block_head(folder / "dflash", folder / "qwen3")
    shape = TreeShape.chain(7, BATCH)
    capacity = replace(capacity_of("qwen3", 16, (shape,)), vocab=head.config.layer.vocab)
    target = config_from_folder(folder / "qwen3")
    backend = make_backend(framework, target, weights, capacity, head)
    engine = Engine(
        backend,
        StaticController(capacity, nodes=8, depth=7, width=1),
        overlap=1,
        chunked_prefill_size=64,
        cache=NO_CACHE,
    )
    params = SamplingParams(temperature=0.0, max_tokens=len(text) - len(prompt))
    asked = Request(request_id=0, prompt=tuple(prompt), sampling=params)
    assert prompt + drive(engine, [asked])[0].tokens == text
    backend.close()
