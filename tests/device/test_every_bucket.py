"""A batch of 32 that shrinks through each bucket: its outputs equal plain decoding."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.boundary.backend import Backend, BackendLimits, StepFuture, StepPlan
from shared.boundary.program import Program, StepKind
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.spec.draft_tree import TreeShape
from tests.support.backends import make_backend
from tests.support.equality import Oracle, assert_few_excused
from tests.support.limits import make_limits, make_program
from tests.support.random_requests import prompt_of
from tests.support.run_engine import drive
from tests.support.tiny_models import tiny_model

BUCKETS = (1, 2, 4, 8, 16, 32)
PAGE_SIZE, CONTEXT, CHUNK = 16, 192, 64
SHAPES = {
    "plain": TreeShape.plain(1),
    "chain": TreeShape.chain(3, 1),
    "tree": TreeShape(nodes=6, depth=3, width=2, rows=6),
}
HOWS = ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}, {"frequency_penalty": 0.5})


def capacity_of(vocab: int, shape: TreeShape) -> BackendLimits:
    def program(work: StepKind, batch: int, tokens: int, shape: TreeShape) -> Program:
        return make_program(work, shape, tokens, batch=batch, pages=1)

    shapes = [(batch, replace(shape, rows=batch * shape.nodes)) for batch in BUCKETS]
    bare = make_limits(
        (
            program(StepKind.PREFILL, 1, CHUNK, TreeShape.plain(1)),
            *(program(StepKind.DECODE, batch, 0, each) for batch, each in shapes),
        ),
        page_size=PAGE_SIZE,
        num_pages=1,
        overlap=1,
        context_length=CONTEXT,
        vocab=vocab,
    )
    pages = bare.num_pages_for(bare.max_positions)
    programs = tuple(replace(each, pages=pages) for each in bare.programs)
    return replace(bare, num_pages=1 + max(BUCKETS) * pages, programs=programs)


class Noting:
    """A backend that keeps the batch of each decode step."""

    def __init__(self, backend: Backend) -> None:
        self.capacity, self.launch, self.close = backend.capacity, backend.launch, backend.close
        self._backend, self.batches = backend, list[int]()

    def submit(self, plan: StepPlan) -> StepFuture:
        if plan.program.work is StepKind.DECODE:
            self.batches.append(plan.program.batch)
        return self._backend.submit(plan)


@pytest.mark.matrix
@pytest.mark.parametrize("framework", ["reference", "torch", "jax"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_batch_shrinks_through_every_bucket_preserving_output(framework, shape):
    config, weights = tiny_model("qwen3_5", 3)
    made = make_backend(framework, config, weights, capacity_of(config.vocab, shape), "NEXTN")
    backend = Noting(made)
    controller = StaticController(
        backend.capacity, nodes=shape.nodes, depth=shape.depth, width=shape.width
    )
    engine = Engine(backend, controller, overlap=1, chunked_prefill_size=CHUNK, cache=NO_CACHE)
    requests = [
        Request(
            request_id=number,
            prompt=prompt_of(number, 10, 3),
            sampling=SamplingParams(
                max_tokens=40 + 4 * number, seed32=number, **HOWS[number % len(HOWS)]
            ),
        )
        for number in range(max(BUCKETS))
    ]
    outcomes = drive(engine, requests)
    full = backend.batches.index(max(BUCKETS))
    shrinking = backend.batches[full:]
    assert shrinking == sorted(shrinking, reverse=True)
    assert set(shrinking) == set(BUCKETS)
    oracle = Oracle(config, weights)
    for each in requests:
        oracle.check(each.prompt, outcomes[each.request_id].tokens, each.sampling)
    assert_few_excused()
    backend.close()
