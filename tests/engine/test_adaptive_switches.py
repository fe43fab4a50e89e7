"""Tier changes in every step: outputs and the memory of a backend stay the same."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from shared.boundary.backend import Backend
from shared.engine.adaptive.controller import AdaptiveController
from shared.engine.adaptive.policy import PolicyInput
from shared.engine.cache_policy import NO_CACHE
from shared.engine.engine import Engine
from tests.support.backends import make_backend
from tests.support.closing_fixture import closing_fixture
from tests.support.run_engine import drive
from tests.support.tree_subjects import DRAFTED, Served, request, tree_capacity

PROMPTS = ((5, 9, 5, 9, 11, 5, 9), (3,) * 20, (8, 1, 8, 2, 8), (60, 61), (7, 7, 9))


class AnyTier:
    """Chooses a random tier for every step, plain decoding included."""

    def __init__(self, seed: int) -> None:
        self._rng, self.taken = random.Random(seed), list[int]()

    def choose(self, situation: PolicyInput) -> int:
        self.taken.append(self._rng.randrange(len(situation.expected.tokens)))
        return self.taken[-1]


def requests() -> list:
    return [
        request(number, prompt, temperature=0.8 * (number % 2), max_tokens=30)
        for number, prompt in enumerate(PROMPTS)
    ]


served = closing_fixture(Served)


def serve(backend: Backend, overlap: int) -> tuple[dict, list[int]]:
    policy = AnyTier(overlap)
    controller = AdaptiveController(backend.capacity, policy, {}, has_experts=False)
    engine = Engine(backend, controller, overlap=overlap, chunked_prefill_size=128, cache=NO_CACHE)
    return drive(engine, requests()), policy.taken


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("framework", ["reference", "torch"])
def test_output_independent_of_tier_switches(framework, overlap, served):
    outcomes, taken = serve(served.backend(framework, "NEXTN"), overlap)
    assert set(taken) == {0, 1, 2, 3, 4}
    for asked in requests():
        assert outcomes[asked.request_id].tokens == served.plain("NEXTN", asked).tokens
    assert sum(sum(outcome.accepted) for outcome in outcomes.values()) > 0


def leaves(state: Any) -> Iterator[Any]:
    """Yields the arrays of nested dataclasses, mappings and tuples."""
    if is_dataclass(state):
        state = [getattr(state, item.name) for item in fields(state)]
    if isinstance(state, Mapping):
        state = [*state.values()]
    if isinstance(state, (tuple, list)):
        for part in state:
            yield from leaves(part)
    elif state is not None:
        yield state


def test_torch_tier_switch_preserves_state_buffers(served):
    """Captured CUDA graphs hold addresses, so buffers must not be reallocated."""
    backend = served.backend("torch", "NEXTN")
    state = backend.backend.state
    before = [(each.data_ptr(), tuple(each.shape)) for each in leaves(state)]
    serve(backend, 1)
    assert [(each.data_ptr(), tuple(each.shape)) for each in leaves(state)] == before
    assert backend.backend.state is state


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_backend_state_size_independent_of_tier_count(framework):
    """The state has the size that the largest tier needs, in JAX the tree input included."""
    config, weights = DRAFTED["NEXTN"].model()
    capacity = tree_capacity(config.vocab)
    widest = max(capacity.shapes, key=lambda shape: shape.width)
    alone = tuple(p for p in capacity.programs if p.shape.is_plain or p.shape == widest)

    def sizes(programs) -> list[tuple[int, ...]]:
        own = replace(capacity, programs=programs)
        backend = make_backend(framework, config, weights, own, "NEXTN")
        found = [tuple(each.shape) for each in leaves(backend.backend.state)]
        backend.close()
        return found

    assert sizes(capacity.programs) == sizes(alone)
