"""Dense families: JAX = torch = the specification, and speculation = plain decoding.

Each model is a tiny checkpoint with the features of its family. Its drafter is a copy of itself,
with chains and trees, so the features are in the target and in the drafter. All drafts of a copy
are accepted in greedy decoding, so a difference in its computation lowers the acceptance.
"""

from __future__ import annotations

import pytest

from tests.support.cells import GREEDY, SAMPLED, Backends, assert_cell
from tests.support.closing_fixture import closing_fixture
from tests.support.tiny_models import DENSE
from tests.support.tree_cells import TREES, cell, head_of

CHAIN, TREE = TREES[0], TREES[2]
SHAPES = (CHAIN, TREE)
# XLA compiles a family's two programs for ten seconds. This one has biases and windows, which rows
# of a tree see by their places; JAX has all families in tests of golden numbers, with branches of
# trees, and here in the matrix.
IN_JAX = ("qwen2",)
WITHIN_OTHERS = ("bamba", "granite", "mistral", "smollm3")
"""Families of the matrix: other dense families and mixtures have each of their switches."""


def each_family():
    marks = dict.fromkeys(WITHIN_OTHERS, pytest.mark.matrix)
    return [pytest.param(family, marks=marks.get(family, ())) for family in DENSE]


backends = closing_fixture(
    lambda: Backends({(family, "STANDALONE"): SHAPES for family in DENSE}, head_of)
)


# Greedy chains of every family are in the last test.
@pytest.mark.parametrize("sampling", [pytest.param(GREEDY, marks=pytest.mark.matrix), SAMPLED])
@pytest.mark.parametrize("family", each_family())
def test_dense_families_match_spec(family, sampling, backends):
    overlap = 1 if sampling == GREEDY else 2
    one = cell(family, "STANDALONE", TREE, sampling, "mixed", overlap, 16)
    assert_cell(one, backends, ("torch", "jax") if family in IN_JAX else ("torch",))


@pytest.mark.matrix
@pytest.mark.parametrize("family", [each for each in DENSE if each not in IN_JAX])
def test_torch_only_dense_families_match_jax(family, backends):
    one = cell(family, "STANDALONE", TREE, SAMPLED, "mixed", 2, 16)
    assert_cell(one, backends, ("torch", "jax"))


@pytest.mark.matrix
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("family", DENSE)
def test_dense_family_chains_match_spec(family, sampling, backends):
    one = cell(family, "STANDALONE", CHAIN, sampling, "mixed", 1, 16)
    assert_cell(one, backends, ("reference", "torch", "jax"))


@pytest.mark.parametrize("family", each_family())
def test_dense_standalone_self_draft_accepted_completely(family, backends):
    one = cell(family, "STANDALONE", CHAIN, GREEDY, "mixed", 1, 16)
    assert_cell(one, backends, ("torch",))
    served = backends.served("torch", one)
    for number, outcome in served.items():
        # The first token is the prompt's, the last step may be cut short.
        assert set(outcome.accepted[1:-1]) <= {CHAIN.depth}, (family, number, outcome.accepted)
