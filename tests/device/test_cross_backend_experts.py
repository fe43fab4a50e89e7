"""Mixtures of experts (MoE): torch = JAX = the specification, and speculation = plain decoding.

Each model is a tiny checkpoint. Its drafters are a copy of itself, a head, its MTP layer and
n-grams. A verify of many rows reads other experts together than plain decoding does with one row at
a time; the outputs are the same. JAX has the marker `matrix`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.boundary.program import ProgramFeature
from tests.support.backends import make_backend
from tests.support.cells import GREEDY, PLAIN, SAMPLED, Backends, assert_cell, model_of
from tests.support.closing_fixture import closing_fixture
from tests.support.contract_host import contract_capacity
from tests.support.ngram_texts import drafted, plain
from tests.support.tiny_models import EXPERTS, MATRIX_ONLY, WITH_MTP
from tests.support.tree_cells import TREES, TreeCell, cell, head_of

MTP = [family for family in EXPERTS if family in WITH_MTP]
CHAIN, TREE = TREES[0], TREES[2]
SHAPES = {
    "none": (PLAIN,),
    "STANDALONE": (CHAIN, TREE),
    "EAGLE3": (CHAIN, TREE),
    "NEXTN": (CHAIN, TREE),
}
DRAFTERS = [
    (family, drafter)
    for family in EXPERTS
    for drafter in SHAPES
    if drafter != "NEXTN" or family in WITH_MTP
]
CELLS = [
    cell(family, drafter, shape, sampling, "mixed", 1 + (sampling == SAMPLED), 16)
    for family, drafter in DRAFTERS
    for shape in SHAPES[drafter]
    for sampling in (GREEDY, SAMPLED)
]


backends = closing_fixture(
    lambda: Backends({(family, drafter): SHAPES[drafter] for family, drafter in DRAFTERS}, head_of)
)


def is_usual(one: TreeCell) -> bool:
    """Plain decoding is greedy, and each drafter has one shape in each family.

    Heads have sampled trees, and the family's copy greedy chains. The head of a family is its MTP
    layer or EAGLE-3, on latent attention both. Cells of `MATRIX_ONLY` families are in the matrix.
    """
    if one.family in MATRIX_ONLY:
        return False
    if one.drafter == "EAGLE3" and one.family in WITH_MTP and one.family != "deepseek_v3":
        return False
    if one.drafter in ("EAGLE3", "NEXTN"):
        return one.tree == TREE and one.sampling == SAMPLED
    return one.tree != TREE and one.sampling == GREEDY


@pytest.mark.parametrize(
    "one",
    [pytest.param(each, marks=() if is_usual(each) else pytest.mark.matrix) for each in CELLS],
    ids=str,
)
def test_torch_moe_output_matches_spec(one, backends):
    assert_cell(one, backends, ("torch",))


@pytest.mark.matrix
@pytest.mark.parametrize("one", CELLS, ids=str)
def test_moe_backends_match_spec(one, backends):
    assert_cell(one, backends, ("reference", "torch", "jax"))


@pytest.mark.parametrize("family", EXPERTS)
def test_moe_standalone_self_draft_accepted_completely(family, backends):
    one = cell(family, "STANDALONE", CHAIN, GREEDY, "mixed", 1, 16)
    served = backends.served("torch", one)
    for number, outcome in served.items():
        # The first token is the prompt's, the last step may be cut short.
        assert set(outcome.accepted[1:-1]) <= {CHAIN.depth}, (family, number, outcome.accepted)


def only(default, families=EXPERTS):
    """The families, of which others than the named ones are in the matrix."""
    return [pytest.param(x, marks=() if x in default else pytest.mark.matrix) for x in families]


@pytest.mark.parametrize("family", only(("deepseek_v3", "nemotron_h", "qwen3_5_moe"), MTP))
def test_moe_mtp_drafts_accepted_partly(family, backends):
    one = cell(family, "NEXTN", CHAIN, GREEDY, "mixed", 1, 16)
    counts = [n for each in backends.served("torch", one).values() for n in each.accepted]
    assert 0.2 * len(counts) < sum(counts) < 2 * len(counts), counts


# A chain of n-grams is verified as the chains above. These have latent, recurrent and usual layers.
@pytest.mark.parametrize(
    "sampled", [pytest.param(False, marks=pytest.mark.matrix), True], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("family", only(("deepseek_v3", "nemotron_h", "qwen3_moe")))
def test_moe_ngram_drafts_preserve_plain_output(family, sampled):
    config, weights = model_of(family)
    capacity = contract_capacity(config)
    programs = [
        p for p in capacity.programs if p.has(ProgramFeature.HOST_DRAFT) or p.shape.is_plain
    ]
    capacity = replace(capacity, programs=tuple(programs))
    backend = make_backend("torch", config, weights, capacity, "none")
    texts = plain(backend, sampled)
    found = drafted(backend, sampled, 1, texts)
    backend.close()
    assert {n: outcome.tokens for n, outcome in found.items()} == texts
    assert {n for outcome in found.values() for n in outcome.accepted} == {0, 1, 2}
