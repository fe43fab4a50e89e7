"""Fewer verify rows than nodes with every drafter: torch gives out the rows as the specification.

The contract's drafter and JAX are in `tests/boundary/test_shared_rows.py`, random requests of all
drafters in `tests/device/test_random_requests.py`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shared.boundary.backend import StepResult
from shared.engine.request import Request
from shared.spec.draft_tree import TreeShape
from tests.support.contract_host import Host, emitted, prompt
from tests.support.equality import assert_few_excused
from tests.support.random_requests import BATCH, FEW_LONG, FEW_SHORT, FEW_TREE, HYBRID, Server
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
]
HOWS: list[dict] = [
    {"temperature": 0.7, "seed32": 3},
    {"temperature": 0.9, "seed32": 4, "top_k": 40},
    {"temperature": 0.0, "max_draft_tokens": 1},
]
PROMPTS = [prompt(70 + n, 9 + 6 * n) for n in range(len(HOWS))]
STEPS = 8


@pytest.fixture(scope="module")
def backends() -> Iterator[Backends]:
    made = Backends()
    yield made
    made.close()


def served(
    framework: str, drafter: str, shape: TreeShape, backends: Backends
) -> tuple[list[Request], list[StepResult]]:
    """A prefill and some steps of a padded batch."""
    server = Server(
        framework=framework,
        family=HYBRID,
        drafter=drafter,
        shape=shape,
        rule="match",
        page_size=4,
        overlap=0,
        spare=1.0,
        scope="tenant",
        match_type="BFS",
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
def test_torch_shares_verify_rows_as_the_specification_and_the_text_is_the_plain_one(
    drafter, shape, backends
):
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
