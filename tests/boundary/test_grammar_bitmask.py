"""Grammar bitmasks on every backend: a node chooses among its allowed tokens."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest

from shared.boundary.backend import BackendLimits, StepPlan
from shared.boundary.checks import check_capacity
from shared.boundary.grammar_bitmask import mask_words
from shared.boundary.program import ProgramFeature, StepKind
from shared.drafts.drafter_spec import DrafterSpec
from tests.support.contract_host import (
    GREEDY,
    POISON,
    Host,
    contract_capacity,
    contract_model,
    either_sampling,
    emitted,
    prompt,
)
from tests.support.mutations import prover

FRAMEWORKS = (
    "reference",
    "torch",
    "torch ranks 2",
    pytest.param("jax", marks=pytest.mark.matrix),
)
"""JAX would compile a program for these tests alone, so it is a matrix test."""


@pytest.fixture(scope="session", params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    return request.param


NOISY: dict = {"temperature": 0.9, "seed32": 77}
"""Sampling without top-k and top-p, because thresholds depend on the allowed tokens."""


def put_mask(plan: StepPlan, row: int, node: int, allowed: Iterable[int]) -> None:
    """Adds a mask for one node."""
    mask = plan.mask
    assert mask is not None
    place = int(mask.index.max()) + 1
    mask.index[row, node] = place
    for token in allowed:
        mask.bits.view(np.uint32)[place, token // 32] |= np.uint32(1 << token % 32)


def all_but(host: Host, *tokens: int) -> list[int]:
    return [token for token in range(host.capacity.vocab) if token not in tokens]


@either_sampling
def test_every_node_chooses_by_own_mask(host, how):
    """Each mask allows one token, the next one of a random sequence."""
    request = host.request(prompt(40, 20), **how | {"min_tokens": 0})
    host.prefill(request)
    wanted = prompt(41, 18)
    for first in range(0, 18, 3):
        a, b, c = wanted[first : first + 3]
        other = (a + 1) % 200 + POISON + 1
        # The second branch is correct; the masks of the first have other tokens.
        plan = host.tree_plan(request, [other, a, b], [0, 0, 2], mask=True)
        for node, allowed in enumerate([a, other, b, c]):
            put_mask(plan, 0, node, [allowed])
        assert emitted(host.run(plan), 0) == [a, b, c]


@pytest.mark.parametrize("how", [GREEDY, NOISY], ids=["greedy", "noisy"])
def test_mask_allowing_plain_choice_preserves_output(host, how):
    tokens = prompt(1, 20)
    whole = host.alone(tokens, 14, **how)
    request = host.request(tokens, **how)
    text = emitted(host.prefill(request), 0)
    rng = np.random.default_rng(5)
    while len(text) < 12:
        plan = host.tree_plan(request, [whole[len(text)]], [0], mask=True)
        for node in range(2):
            drawn = rng.integers(POISON + 1, host.capacity.vocab, 200).tolist()
            put_mask(plan, 0, node, [*drawn, whole[len(text) + node]])
        text += emitted(host.run(plan), 0)
    assert text == whole[: len(text)]


@either_sampling
def test_masked_token_equals_infinite_negative_bias(host, how):
    """A large negative bias has the same result: the next best token with equal noise."""
    tokens = prompt(42, 20)
    rest = how | {"logit_bias": {}}
    request = host.request(tokens, **rest)
    text = emitted(host.prefill(request), 0)
    banned = host.alone(tokens, 2, **rest)[1]
    plan = host.tree_plan(request, [], [], mask=True)
    put_mask(plan, 0, 0, all_but(host, banned))
    chosen = emitted(host.run(plan), 0)
    biased = host.request((*tokens, *text), **rest | {"logit_bias": {banned: -1e4}})
    biased_plan = host.prefill_plan(biased)
    biased_plan.sampling.prompt_length[0] = len(tokens)
    biased_plan.sampling.min_length[0] = plan.sampling.min_length[0]
    assert chosen == emitted(host.run(biased_plan), 0)
    assert chosen != [banned]


@either_sampling
def test_unconstrained_row_unaffected_by_masked_neighbour(host, how):
    tokens = prompt(1, 20)
    free, held = host.request(tokens, **how), host.request(prompt(43, 9))
    text = emitted(host.prefill(held, free), 1)
    for _ in range(6):
        plan = host.tree_plan(held, [], [], mask=True)
        host.planner.fill_rows(plan, np.array([held.slot, free.slot], np.int32))
        plan.work.drafts.num_nodes[1] = 1
        put_mask(plan, 0, 0, [50])
        result = host.run(plan)
        assert emitted(result, 0) == [50]
        text += emitted(result, 1)
    assert text == host.alone(tokens, len(text), **how)


def test_padding_plan_mask_allows_every_token(host):
    plan = host.tree_plan(host.request(prompt(44, 5)), [], [], mask=True)
    assert plan.mask.bits.shape[1] == mask_words(host.capacity.vocab)
    assert (plan.mask.bits[plan.mask.index] == -1).all()


@pytest.mark.parametrize("work", [StepKind.PREFILL, StepKind.DRAFT, StepKind.DECODE])
def test_masks_require_host_built_trees(work):
    config, _ = contract_model()
    capacity = contract_capacity(config)
    found = next(
        p for p in capacity.programs if p.work is work and not p.has(ProgramFeature.HOST_DRAFT)
    )
    if work is StepKind.DECODE:
        found = next(p for p in capacity.programs if p.drafts_on_device)
    masked = found.with_features({ProgramFeature.MASK: True})
    broken = BackendLimits(**vars_of(capacity) | {"programs": (masked,)})
    with pytest.raises(ValueError, match="grammar masks require draft trees built by the host"):
        check_capacity(broken, DrafterSpec.of_mtp(config), True, False)


def vars_of(capacity: BackendLimits) -> dict:
    names = BackendLimits.__dataclass_fields__
    return {name: getattr(capacity, name) for name in names}


test_planted_fault_is_detected = prover("boundary/test_grammar_bitmask", globals())
