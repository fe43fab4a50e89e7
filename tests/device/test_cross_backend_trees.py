"""Draft trees: JAX = torch = the specification, and speculation = plain decoding.

NEXTN on the hybrid, EAGLE, EAGLE-3 and small models on plain and hybrid targets, chains and trees
of several shapes, among them one that writes more draft KV than the tree has nodes. Requests and
comparisons are those of `tests/device/test_cross_backend.py`.
"""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.cells import (
    GREEDY,
    LOADS,
    OVERLAPS,
    SAMPLED,
    Backends,
    assert_cell,
    compare,
    oracle_of,
    serve,
)
from tests.support.closing_fixture import closing_fixture
from tests.support.no_draft_after_accept_all import Starving
from tests.support.tree_cells import TREES, TreeCell, cell, head_of

DRAFTERS = (
    ("qwen3_5", "NEXTN"),
    ("llama", "EAGLE"),
    ("qwen3_5", "EAGLE"),
    ("qwen3", "EAGLE3"),
    ("llama", "EAGLE3"),
    ("qwen3_5", "EAGLE3"),
    ("qwen3", "STANDALONE"),
    ("llama", "STANDALONE"),
    ("qwen3_5", "STANDALONE"),
)


DEFAULT = {
    ("qwen3_5", "NEXTN"): TREES[1:2],
    ("llama", "EAGLE"): TREES[2:3],
    ("qwen3_5", "EAGLE3"): TREES[4:],
    ("qwen3_5", "STANDALONE"): TREES[1:2],
}
"""Drafters and trees of the default choice: every kind of both, in few compiled programs."""

CELLS = [
    cell(*drafter, shape, sampling, "mixed", overlap, 16)
    for drafter, shapes in DEFAULT.items()
    for shape in shapes
    for sampling, overlap in ((GREEDY, 1), (SAMPLED, 2))
]
CELLS += [cell("qwen3_5", "NEXTN", TREES[1], SAMPLED, "mixed", 0, 16)]
ALL = [
    cell(*drafter, shape, sampling, load, overlap, page_size)
    for drafter, shape, sampling, load, overlap, page_size in product(
        DRAFTERS, TREES, (GREEDY, SAMPLED), LOADS, OVERLAPS, (1, 16, 64)
    )
]
MATRIX = [each for each in ALL if each not in CELLS]


backends = closing_fixture(lambda: Backends(DEFAULT, head_of))


all_backends = closing_fixture(lambda: Backends(dict.fromkeys(DRAFTERS, TREES), head_of))


def is_in_jax(drafter: str) -> bool:
    """Trees of the other drafters are grown as EAGLE-3's are.

    JAX has chains of an MTP layer in test_cross_backend.py, trees of a draft model in
    test_cross_backend_families.py, and trees of EAGLE heads in test_golden.py.
    """
    return drafter == "EAGLE3"


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_tree_backends_match_spec(cell, backends):
    assert_cell(cell, backends, ("torch", "jax") if is_in_jax(cell.drafter) else ("torch",))


@pytest.mark.matrix
@pytest.mark.parametrize("cell", [each for each in CELLS if not is_in_jax(each.drafter)], ids=str)
def test_other_jax_trees_match_torch(cell, backends):
    assert_cell(cell, backends, ("torch", "jax"))


@pytest.mark.matrix
@pytest.mark.parametrize("cell", MATRIX, ids=str)
def test_tree_full_matrix_match(cell, all_backends):
    assert_cell(cell, all_backends, ("torch", "jax"))


# The numpy backend is the slowest: an MTP layer's small tree. What torch accepts of heads' trees is
# compared with it in `tests/device/test_draft_heads.py`.
IN_NUMPY = ("NEXTN",)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(each, marks=() if each.drafter in IN_NUMPY else pytest.mark.matrix)
        for each in CELLS
        if each.overlap == 2
    ],
    ids=str,
)
def test_tree_acceptance_matches_spec(cell, backends):
    names = ("torch", "jax") if is_in_jax(cell.drafter) else ("torch",)
    assert_cell(cell, backends, ("reference", *names))


@pytest.mark.parametrize("drafter", DEFAULT, ids="-".join)
def test_tree_accepted_to_different_depths(drafter, backends):
    """Else the matrix would prove little about it."""
    shape = DEFAULT[drafter][-1]
    served = backends.served("torch", cell(*drafter, shape, SAMPLED, "mixed", 2, 16))
    accepted = {count for outcome in served.values() for count in outcome.accepted}
    assert {0, 1, 2} <= accepted, accepted


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_tree_acceptance_independent_of_overlap(sampling, backends):
    served = [
        backends.served("torch", cell("qwen3_5", "NEXTN", TREES[1], sampling, "mixed", overlap, 16))
        for overlap in OVERLAPS
    ]
    accepted = [{key: run[key].accepted for key in run} for run in served]
    assert accepted[0] == accepted[1] == accepted[2]


STARVED = {
    ("qwen3_5", "NEXTN"): TREES[1],
    ("qwen3_5", "EAGLE3"): TREES[4],
    ("qwen3_5", "STANDALONE"): TREES[1],
}
"""Drafters of the hybrid in programs that other tests compile."""


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize(
    ("framework", "drafter"),
    [
        pytest.param(framework, drafter, marks=() if is_default else pytest.mark.matrix)
        for framework, drafter in product(("torch", "jax"), STARVED)
        for is_default in [framework == "torch" or is_in_jax(drafter[1])]
    ],
)
def test_tree_step_without_drafts_after_full_acceptance(drafter, framework, sampling, backends):
    each = cell(*drafter, STARVED[drafter], sampling, "alone", 1, 16)
    assert_starved(framework, each, backends)


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.matrix)])
def test_eagle_step_without_drafts_preserves_output(framework, sampling, all_backends):
    each = cell("qwen3_5", "EAGLE", TREES[1], sampling, "alone", 1, 16)
    assert_starved(framework, each, all_backends)


def assert_starved(framework: str, each: TreeCell, backends: Backends) -> None:
    backend = Starving(backends.get(framework, each))
    compare(each, {framework: serve(backend, each)}, oracle_of(each.family))
    assert backend.max_before, "no step accepted all of its drafts"
