"""Backends with a page pool of sliding-window layers, and layers that read the KV of others: the
same outputs as with all pages kept, and as without a cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest

from shared.boundary.backend import Backend, BackendLimits
from shared.boundary.window_pools import WindowPool, max_slot_pages
from shared.engine.cache_policy import NO_CACHE
from shared.engine.engine import Engine
from shared.engine.request import Request, SamplingParams
from shared.spec.draft_tree import TreeShape
from shared.spec.gumbel_noise import derive_seed
from tests.support.backends import FRAMEWORKS, Drafter, make_backend
from tests.support.cache_policies import policy_of
from tests.support.cacheless import CachelessOracle
from tests.support.drafter_cases import controller_of, programs_of
from tests.support.equality import assert_few_excused
from tests.support.limits import make_limits
from tests.support.run_engine import Outcome, checked_step
from tests.support.tiny_assistants import assistant_of_layers
from tests.support.tiny_heads import tiny_head
from tests.support.two_groups import WINDOW, two_groups

BATCH, PAGE_SIZE, PAGES, CHUNK, OVERLAP = 3, 4, 80, 64, 1
CHAIN = TreeShape.chain(3, BATCH)
TREE = TreeShape(nodes=8, depth=3, width=3, rows=8 * BATCH)
PLAIN = TreeShape.plain(BATCH)
DRAFTERS = [
    *(("none", PLAIN), ("EAGLE3", CHAIN), ("EAGLE3", TREE), ("NGRAM", CHAIN)),
    *(("ASSISTANT", CHAIN), ("ASSISTANT", TREE)),
]
CASES = [
    pytest.param(
        framework,
        *case,
        id=f"{framework}-{case[0]}-N{case[1].nodes}-k{case[1].width}",
        marks=[] if framework in default else [pytest.mark.matrix],
    )
    for framework in FRAMEWORKS
    for case, default in zip(
        DRAFTERS,
        ((), (), ("torch",), ("reference",), (), ("torch",)),
        strict=True,
    )
]
CASES.append(pytest.param("torch ranks 2", "NGRAM", CHAIN, id="torch ranks 2-NGRAM"))
"""Frameworks, drafters and the shapes of their trees."""

FULL_PAGES = 1 + BATCH * PAGES
FEW_PAGES = 1 + PAGES
WINDOW_PAGES = 1 + max_slot_pages(WINDOW, PAGE_SIZE, CHUNK)
"""The least that the scheduler accepts: one request with a chunk of its prompt."""


@lru_cache
def drafter_of(name: str) -> Drafter:
    if name == "ASSISTANT":
        return assistant_of_layers(*two_groups(), 5)
    return tiny_head(*two_groups(), name, 5) if name == "EAGLE3" else "none"


def capacity_of(drafter: str, shape: TreeShape, windows: tuple[WindowPool, ...]) -> BackendLimits:
    return make_limits(
        programs_of(drafter, shape, batch=BATCH, pages=PAGES, chunk=CHUNK),
        page_size=PAGE_SIZE,
        num_pages=FULL_PAGES,
        overlap=OVERLAP,
        context_length=280,
        vocab=two_groups()[0].vocab,
        window_pools=windows,
    )


class Fewer:
    """A backend that reports fewer pages than it has."""

    def __init__(self, backend: Backend, num_pages: int, window_pages: int) -> None:
        pools = tuple(replace(p, num_pages=window_pages) for p in backend.capacity.window_pools)
        self.capacity = replace(backend.capacity, num_pages=num_pages, window_pools=pools)
        self.submit, self.launch = backend.submit, backend.launch

    def close(self) -> None: ...


def requests() -> list[Request]:
    """Prompts of up to three chunks, some with a common start, greedy, sampled, with penalties."""
    rng = np.random.default_rng(5)
    system = rng.integers(2, 250, 70).tolist()
    how = [{"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}]
    how.append({"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.1})
    made = []
    for number, length in enumerate((3, 90, 150, 90)):
        own = rng.integers(2, 250, length).tolist()
        prompt = (*(system if number % 2 else []), *own)
        params = SamplingParams(
            max_tokens=12, seed32=derive_seed(7, number), **how[number % len(how)]
        )
        made.append(Request(request_id=number, prompt=prompt, sampling=params))
    return made


def serve(engine: Engine, bound: int | None = None) -> list[Outcome]:
    """Outcomes of the requests, which arrive while others run; with a cache, then again.

    Args:
      engine: The engine.
      bound: Pages that a slot may have in the window pool after its prefill; None for no check.
    """
    served: list[Outcome] = []
    for _ in range(1 + engine.cache.policy.is_on):
        waiting = requests()[::-1]
        outcomes, step = [Outcome() for _ in waiting], 0
        while waiting or engine.busy:
            if waiting and step % 2 == 0:
                engine.add(waiting.pop())
            for event in checked_step(engine):
                outcomes[event.request_id].take(event)
            step += 1
            for each in engine.scheduler.running if bound else ():
                if each.slot and each.length > len(each.context):
                    assert engine.allocator.windows[0].num_held(each.slot) <= bound
        served += outcomes
    return served


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[tuple, Backend]]:
    made: dict[tuple, Backend] = {}
    yield made
    for backend in made.values():
        backend.close()


def backend_of(
    backends: dict[tuple, Backend],
    framework: str,
    drafter: str,
    shape: TreeShape,
    windows: tuple[WindowPool, ...],
) -> Backend:
    key = (framework, drafter, shape, windows)
    if key not in backends:
        capacity = capacity_of(drafter, shape, windows)
        backends[key] = make_backend(framework, *two_groups(), capacity, drafter_of(drafter))
    return backends[key]


@pytest.mark.parametrize(("framework", "drafter", "shape"), CASES)
def test_freed_pages_leave_output_unchanged(framework, drafter, shape, backends):
    """Without a prefix cache, with one, and with few pages, against all pages kept."""
    kept = backend_of(backends, framework, drafter, shape, ())
    freed = backend_of(backends, framework, drafter, shape, (WindowPool(WINDOW, FULL_PAGES),))
    policy = policy_of(drafter, is_hybrid=False)
    few = Fewer(freed, FEW_PAGES, FULL_PAGES), Fewer(freed, FULL_PAGES, WINDOW_PAGES)
    engines = [
        Engine(
            backend,
            controller_of(backend.capacity, drafter, shape),
            overlap=OVERLAP,
            chunked_prefill_size=CHUNK,
            cache=cache,
        )
        for backend, cache in (
            (kept, NO_CACHE),
            (freed, NO_CACHE),
            (freed, policy),
            (few[0], policy),
            (few[1], policy),
        )
    ]
    growth = 1 + (OVERLAP + 1) * (shape.depth + 1) + shape.scratch
    bound = max_slot_pages(WINDOW, PAGE_SIZE, growth)
    served = [serve(engine, bound if engine.allocator.windows else None) for engine in engines]
    expected, once, *twice = ([outcome.tokens for outcome in outcomes] for outcomes in served)
    assert once == expected
    for each in twice:
        assert each == 2 * expected
    # Drafts read the same KV: an assistant reads the windows of the target.
    accepted, of_freed = ([each.accepted for each in outcomes] for outcomes in served[:2])
    assert accepted == of_freed
    assert drafter != "ASSISTANT" or sum(map(sum, accepted)) > len(accepted)
    oracle = CachelessOracle(*two_groups())
    for each, output in zip(requests(), expected, strict=True):
        oracle.check(each.prompt, output, each.sampling)
    assert_few_excused()
    cached = [engine.cache.num_hit for engine in engines]
    assert cached[:2] == [0, 0]
    assert cached[2] > 300
    assert min(cached[3:]) > 0
    assert engines[3].scheduler.num_preemptions + engines[4].scheduler.num_preemptions
