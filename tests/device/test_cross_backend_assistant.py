"""Gemma 4 assistants: JAX = torch = the specification, and speculation = plain decoding.

The target has sliding and full layers, of which the last read the KV of others. Outputs are checked
against the specification, drafts by the number that each step accepts.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.cells import GREEDY, SAMPLED, Backends, assert_cell
from tests.support.tree_cells import TREES, cell, head_of

CHAIN, TREE = TREES[0], TREES[2]
FAMILIES = ("gemma4", pytest.param("gemma4_moe", marks=pytest.mark.matrix))


@pytest.fixture(scope="module")
def backends() -> Iterator[Backends]:
    shapes = {(family, "ASSISTANT"): (CHAIN, TREE) for family in ("gemma4", "gemma4_moe")}
    made = Backends(shapes, head_of)
    yield made
    made.close()


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize(
    ("shape", "frameworks"),
    [
        pytest.param(CHAIN, ("reference", "torch"), id="chain"),
        pytest.param(TREE, ("reference", "torch", "jax"), id="tree"),
        pytest.param(CHAIN, ("torch", "jax"), id="chain-jax", marks=pytest.mark.matrix),
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_assistant_drafts_match_spec(family, shape, frameworks, sampling, backends):
    one = cell(family, "ASSISTANT", shape, sampling, "mixed", 1, 16)
    assert_cell(one, backends, frameworks)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_assistant_drafts_are_accepted(shape, backends):
    """Far more than by chance, and fewer than all: some drafts of each kind are rejected."""
    one = cell("gemma4", "ASSISTANT", shape, GREEDY, "mixed", 1, 16)
    served = backends.served("torch", one)
    accepted = [count for outcome in served.values() for count in outcome.accepted[1:-1]]
    assert 0.5 < sum(accepted) / len(accepted) < shape.depth - 0.2
    assert {0, shape.depth} <= {*accepted}
