"""N-gram drafts of the device's table: torch = JAX = numpy, in outputs and accepted drafts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

from shared.boundary.backend import BackendLimits
from shared.boundary.ngram_table import NgramTableSpec
from shared.boundary.program import ProgramFeature, StepKind
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.spec.draft_tree import TreeShape
from tests.support.backends import FRAMEWORKS, make_backend
from tests.support.contract_host import (
    BATCH,
    GREEDY,
    PREFILL_TOKENS,
    SAMPLED,
    contract_capacity,
    contract_model,
    prompt,
)
from tests.support.run_engine import Outcome, drive

SHAPE = TreeShape(nodes=6, depth=5, width=1, rows=4 * BATCH)
"""With fewer verify rows than a batch has nodes."""

TOKENS = 20


def text_capacity(by_request: bool, chunk: int) -> BackendLimits:
    """A prefill, and a decode that drafts from text."""
    capacity = contract_capacity(contract_model()[0])
    prefill = next(p for p in capacity.programs if p.work is StepKind.PREFILL)
    prefill = replace(prefill, tokens=chunk)
    decode = next(p for p in capacity.programs if p.work is StepKind.DECODE)
    programs = (
        prefill,
        replace(decode, shape=SHAPE).with_features({ProgramFeature.DEVICE_NGRAM: True}),
    )
    table = NgramTableSpec(groups=4096, by_request=by_request)
    return replace(capacity, programs=programs, texts=table)


def made(framework: str, *, by_request: bool = False, chunk: int = PREFILL_TOKENS) -> Any:
    return make_backend(framework, *contract_model(), text_capacity(by_request, chunk), "NGRAM")


@pytest.fixture(scope="module", params=FRAMEWORKS)
def backend(request: pytest.FixtureRequest) -> Iterator[Any]:
    backend = made(request.param)
    yield backend
    backend.close()


def asked(number: int, text: int, tenant: str, sampled: bool, **bounds: int) -> Request:
    how: dict[str, Any] = SAMPLED | {"stop_token_ids": (), "min_tokens": 0} if sampled else GREEDY
    how = how | {"seed32": 50 + text, "max_tokens": TOKENS} | bounds
    words = prompt(20 + text, 10 + 5 * text)
    sampling = SamplingParams(**how)
    return Request(request_id=number, prompt=words, sampling=sampling, tenant=tenant)


def engine_of(backend: Any, overlap: int = 1) -> Engine:
    shape = {"nodes": SHAPE.nodes, "depth": SHAPE.depth, "width": SHAPE.width}
    controller = StaticController(backend.capacity, **shape)
    return Engine(
        backend, controller, overlap=overlap, chunked_prefill_size=PREFILL_TOKENS, cache=NO_CACHE
    )


def served(backend: Any, sampled: bool, overlap: int, tenant: str) -> list[dict[int, Outcome]]:
    """The same texts twice, of one tenant, and then of another; a neighbour drafts nothing."""
    engine, found = engine_of(backend, overlap), []
    for whose in (tenant, tenant, f"not {tenant}"):
        asks = [asked(text, text, whose, sampled) for text in range(3)]
        found.append(drive(engine, [*asks, asked(3, 3, whose, sampled, max_draft_tokens=0)]))
    return found


@lru_cache
def expected(sampled: bool) -> list[dict[int, Outcome]]:
    backend = made("reference")
    found = served(backend, sampled, 1, "one")
    backend.close()
    return found


@lru_cache
def plain(sampled: bool) -> dict[int, list[int]]:
    """Returns the outputs of plain decoding."""
    config, weights = contract_model()
    backend = make_backend("reference", config, weights, contract_capacity(config), "NEXTN")
    controller = StaticController(backend.capacity, nodes=1, depth=0, width=0)
    engine = Engine(
        backend, controller, overlap=1, chunked_prefill_size=PREFILL_TOKENS, cache=NO_CACHE
    )
    found = drive(engine, [asked(text, text, "", sampled) for text in range(4)])
    backend.close()
    return {number: outcome.tokens for number, outcome in found.items()}


@pytest.mark.parametrize(("sampled", "overlap"), [(False, 0), (True, 1), (False, 2)])
def test_device_ngram_output_and_acceptance_match_spec(backend: Any, sampled: bool, overlap: int):
    tenant = f"{sampled} {overlap}"  # a tenant without earlier texts
    for found, want in zip(
        served(backend, sampled, overlap, tenant), expected(sampled), strict=True
    ):
        assert {n: o.tokens for n, o in found.items()} == plain(sampled)
        assert {n: o.accepted for n, o in found.items()} == {n: o.accepted for n, o in want.items()}


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
def test_device_ngram_drafts_only_from_own_tenant(sampled: bool):
    """Else the comparison would prove little."""
    first, again, other = ([o.accepted for o in found.values()] for found in expected(sampled))
    assert all(sum(counts) > TOKENS / 2 for counts in again[:3])
    assert {0, 1, 4, 5} <= {count for counts in (*first, *again) for count in counts}
    assert [*map(sum, other)] == [*map(sum, first)]
    assert sum(again[3]) == 0


def test_request_scope_drafts_only_from_same_request():
    backend = made("reference", by_request=True)
    engine = engine_of(backend)
    rounds = [
        drive(engine, [asked(text, text, "one", sampled=False) for text in range(3)]) for _ in "12"
    ]
    backend.close()
    counts = [[o.accepted for o in found.values()] for found in rounds]
    assert counts[0] == counts[1]


def test_ngram_table_independent_of_prefill_chunks():
    """A plan contains the tokens before its chunk."""
    tables = []
    for chunk in (PREFILL_TOKENS, 64):
        backend = made("reference", chunk=chunk)
        words = prompt(1, 150)
        request = Request(request_id=0, prompt=words, sampling=SamplingParams(max_tokens=1))
        drive(engine_of(backend), [request])
        tables.append(backend.state.texts.table)
        backend.close()
    assert (tables[0].tokens == tables[1].tokens).all()
    assert (tables[0].tokens > 0).sum() > 900
