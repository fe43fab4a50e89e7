"""Two requests on a backend that is made for one draft shape."""

from __future__ import annotations

from typing import Any

import numpy as np

from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.program import StepKind
from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.spec.draft_tree import TreeShape
from tests.support.limits import make_limits, make_program
from tests.support.run_engine import Outcome, drive

BATCH, PAGES = 2, 8


def small_capacity(vocab: int, shape: TreeShape, rule: str) -> BackendLimits:
    """One program of prompts and one of decoding with that shape."""
    programs = [
        make_program(work, each, n, batch=BATCH, pages=PAGES)
        for work, each, n in (
            (StepKind.PREFILL, TreeShape.plain(BATCH), 64),
            (StepKind.DECODE, shape, 0),
        )
    ]
    return make_limits(
        programs,
        page_size=16,
        overlap=1,
        context_length=100,
        vocab=vocab,
        accept_rule=rule,
    )


def small_requests(**sampling: Any) -> list[Request]:
    """Two prompts of twelve tokens, which are answered alike."""
    rng, how = np.random.default_rng(4), SamplingParams(seed32=1, **sampling)
    prompts = [tuple(rng.integers(2, 250, 12).tolist()) for _ in range(BATCH)]
    return [Request(request_id=i, prompt=p, sampling=how) for i, p in enumerate(prompts)]


def small_outcomes(
    backend: Backend, capacity: BackendLimits, shape: TreeShape, requests: list[Request]
) -> dict[int, Outcome]:
    """Returns the outcomes of the requests, all of which draft with that shape."""
    controller = StaticController(capacity, nodes=shape.nodes, depth=shape.depth, width=shape.width)
    engine = Engine(backend, controller, overlap=1, chunked_prefill_size=64, cache=NO_CACHE)
    return drive(engine, requests)
