"""Fewer verify rows than nodes with every drafter: torch prunes trees like the specification.

The contract's drafter and JAX are in `tests/boundary/test_shared_rows.py`, random requests of all
drafters in `tests/device/test_random_requests.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from shared.boundary.backend import StepResult
from shared.boundary.program import ProgramFeature, StepKind
from shared.engine.request import Request
from shared.spec.draft_tree import TreeShape
from tests.support import contract_host
from tests.support.backends import make_backend
from tests.support.closing_fixture import closing_fixture
from tests.support.contract_host import (
    SAMPLED,
    SHARED,
    Host,
    contract_capacity,
    contract_model,
    emitted,
    prompt,
)
from tests.support.equality import assert_few_excused
from tests.support.random_requests import (
    BATCH,
    FEW_BLOCK_TREE,
    FEW_LONG,
    FEW_SHORT,
    FEW_TREE,
    HYBRID,
    Server,
)
from tests.support.random_serving import Backends, oracle_of
from tests.support.tree_subjects import name_of

CASES = [
    ("NEXTN", FEW_TREE),
    ("EAGLE", FEW_LONG),
    ("EAGLE3", FEW_TREE),
    ("EAGLE3", FEW_LONG),
    ("STANDALONE", FEW_TREE),
    ("STANDALONE", FEW_LONG),
    ("DFLASH", FEW_SHORT),
    ("DSPARK", FEW_SHORT),
    ("DFLASH2", FEW_SHORT),
    ("DFLASH", FEW_BLOCK_TREE),
]
HOWS: list[dict] = [
    {"temperature": 0.7, "seed32": 3},
    {"temperature": 0.9, "seed32": 4, "top_k": 40},
    {"temperature": 0.0, "max_draft_tokens": 1},
]
PROMPTS = [prompt(70 + n, 9 + 6 * n) for n in range(len(HOWS))]
STEPS = 8


backends = closing_fixture(Backends)


def served(
    framework: str, drafter: str, shape: TreeShape, backends: Backends
) -> tuple[list[Request], list[StepResult]]:
    """A prefill and some steps of a padded batch."""
    server = Server(
        framework=framework,
        family=HYBRID,
        drafter=drafter,
        shape=shape,
        rule="exact",
        page_size=4,
        overlap=0,
        spare=1.0,
        scope="tenant",
        match_type="BFS",
        caches=False,
    )
    host = Host(backends.get(server), {})
    rows = [
        host.request(tokens, positions=80, **how) for tokens, how in zip(PROMPTS, HOWS, strict=True)
    ]
    results = [host.prefill(*rows)]
    return rows, results + [host.decode(*rows, shape=shape) for _ in range(STEPS)]


@pytest.mark.parametrize(
    ("drafter", "shape"), CASES, ids=[f"{drafter}-{name_of(shape)}" for drafter, shape in CASES]
)
def test_torch_verify_budget_matches_spec_and_plain_output(drafter, shape, backends):
    _, want = served("reference", drafter, shape, backends)
    rows, got = served("torch", drafter, shape, backends)
    for one, other in zip(got, want, strict=True):
        for name in ("tokens", "counts", "num_nodes", "drafts", "parents"):
            mine, theirs = (getattr(each, name)[: len(rows)] for each in (one, other))
            np.testing.assert_array_equal(mine, theirs)
    drafts = [result.num_nodes[: len(rows)].sum() - len(rows) for result in got[1:]]
    candidates = 2 * (shape.nodes - 1) + 1
    assert set(drafts) == {min(shape.rows - BATCH, candidates)}, "verify rows were left over"
    assert max(result.counts.max() for result in got) > 1, "nothing was ever accepted"
    for row, request in enumerate(rows):
        text = [token for result in got for token in emitted(result, row)]
        oracle_of(HYBRID, drafter).check(request.prompt, text, request.sampling)
    assert_few_excused()


FEW = replace(contract_host.TREE, rows=9)
"""Verify rows for a batch of 4 with 5 nodes of the host's beside the roots."""


@pytest.fixture(params=["reference", "torch"], scope="module")
def few_rows(request: pytest.FixtureRequest) -> Iterator[Host]:
    """A backend that drafts without a step, and takes trees of the host's in fewer rows."""
    config, weights = contract_model()
    capacity = contract_capacity(config)
    chain = next(p for p in capacity.programs if p.shape == SHARED)
    draft = replace(chain, work=StepKind.DRAFT, extras=ProgramFeature.NONE)
    trees = replace(chain, shape=FEW, extras=chain.extras | ProgramFeature.HOST_DRAFT)
    capacity = replace(capacity, programs=(*capacity.programs, draft, trees))
    backend = make_backend(request.param, config, weights, capacity, "NEXTN")
    yield Host(backend, {})
    backend.close()


def test_draft_step_returns_drafts_of_verify_step(few_rows):
    rows = [few_rows.request(prompt(80 + n, 11), **SAMPLED) for n in range(3)]
    few_rows.prefill(*rows)
    for _ in range(3):
        drafted = few_rows.run(few_rows.plan(StepKind.DRAFT, SHARED, *rows, host_draft=False))
        verified = few_rows.decode(*rows, shape=SHARED)
        assert drafted.num_nodes[:3].sum() == SHARED.rows - 1  # padding verifies its root
        for name in ("num_nodes", "drafts", "parents"):
            got, want = (getattr(result, name)[:3] for result in (drafted, verified))
            np.testing.assert_array_equal(got, want)


def test_host_trees_may_use_entire_verify_budget(few_rows):
    """Whoever has them: 4, 3 and 1 nodes in turn, and the root of a padding row."""
    prompts = [prompt(84 + n, 12) for n in range(3)]
    rows = [few_rows.request(tokens, **SAMPLED) for tokens in prompts]
    coming = [few_rows.alone(tokens, 24, **SAMPLED) for tokens in prompts]
    result = few_rows.prefill(*rows)
    texts = [emitted(result, row) for row in range(3)]
    for step in range(6):
        plan = few_rows.plan(StepKind.DECODE, FEW, *rows, host_draft=True)
        trees = plan.work.drafts
        for row, text in enumerate(texts):
            count = (4, 3, 1)[(row + step) % 3]
            right, after = coming[row][len(text) : len(text) + 2]
            trees.tokens[row] = (0, right, right + 1, after)
            trees.parents[row] = (0, 0, 0, 1)
            trees.num_nodes[row] = count
        result = few_rows.run(plan)
        for row, text in enumerate(texts):
            assert result.counts[row] == {4: 3, 3: 2, 1: 1}[int(trees.num_nodes[row])]
            text += emitted(result, row)
    for text, want in zip(texts, coming, strict=True):
        assert text == want[: len(text)]
