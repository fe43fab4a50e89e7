"""Trees over block heads: JAX = torch = the specification, and speculation = plain decoding.

Requests and comparisons are those of `tests/device/test_cross_backend.py`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from shared.engine.cache_policy import NO_CACHE
from shared.engine.controller import StaticController
from shared.engine.engine import Engine
from shared.spec.draft_tree import TreeShape
from tests.support import cells
from tests.support.block_cells import oracle_of
from tests.support.block_tree_cells import (
    KINDS,
    SIZE,
    Backends,
    CalibrationRecorder,
    assert_cell,
    tree,
)
from tests.support.cells import GREEDY, SAMPLED, requests_of
from tests.support.closing_fixture import closing_fixture
from tests.support.drafter_cases import Fewer
from tests.support.run_engine import drive
from tests.support.tree_cells import cell

LARGE, SHARED = tree(SIZE - 1, 4, 24), tree(SIZE - 1, 4, 24, 0.5)
DEFAULT = {
    ("qwen3", "DFLASH"): (LARGE,),
    ("qwen3_5", "JETSPEC"): (SHARED,),
    ("llama", "DFLASH2"): (LARGE,),
    ("llama", "DSPARK-gated"): (LARGE,),
}
CELLS = [
    cell(family, kind, shape, sampling, "mixed", overlap, 16)
    for (family, kind), shapes in DEFAULT.items()
    for shape in shapes
    for sampling, overlap in ((GREEDY, 1), (SAMPLED, 2))
]
FAMILIES = ("llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_5_moe")
SHAPES = (
    *(tree(7, 2, 8), tree(7, 2, 64), tree(4, 4, 16)),
    *(tree(7, 8, 32), tree(7, 16, 64)),
)
MATRIX = [
    cell(family, kind, shape, sampling, "mixed", overlap, page_size)
    for family, kind in product(FAMILIES, KINDS)
    for shape in SHAPES
    for sampling, overlap, page_size in ((GREEDY, 1, 16), (SAMPLED, 2, 16), (SAMPLED, 0, 1))
]


backends = closing_fixture(lambda: Backends(DEFAULT))


all_backends = closing_fixture(lambda: Backends(dict.fromkeys(product(FAMILIES, KINDS), SHAPES)))


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_block_trees_match_plain_output(cell, backends):
    names = ("reference", "torch") if cell.overlap == 2 else ("torch",)
    jax = ("jax",) if cell.shape is SHARED else ()  # one compiled program
    assert_cell(cell, backends, (*names, *jax))


@pytest.mark.matrix
@pytest.mark.parametrize("cell", MATRIX, ids=str)
def test_block_trees_full_matrix_match(cell, all_backends):
    assert_cell(cell, all_backends, ("torch", "jax"))


@pytest.mark.parametrize(("family", "kind"), DEFAULT)
def test_block_tree_accepted_to_different_depths(family, kind, backends):
    """Else the matrix would prove little about it."""
    shape = DEFAULT[family, kind][0]
    served = backends.served("torch", cell(family, kind, shape, SAMPLED, "mixed", 2, 16))
    accepted = {count for outcome in served.values() for count in outcome.accepted}
    assert {0, 1, 2} <= accepted, accepted


REFERENCE = pytest.param("reference", marks=pytest.mark.matrix)


@pytest.mark.parametrize("framework", [REFERENCE, "torch"])
def test_unequal_block_trees_preserve_plain_output(framework, backends):
    """Each request has its own limit of draft tokens, so the trees of a batch differ in size."""
    each = cell("qwen3", "DFLASH", LARGE, SAMPLED, "mixed", 1, 16)
    requests = [
        replace(request, sampling=replace(request.sampling, max_draft_tokens=most))
        for request, most in zip(requests_of(each), (23, 0, 5, 1, 12, 2), strict=True)
    ]
    served = drive(_drafting(backends.get(framework, each)), requests)
    cells.compare(each, {framework: served}, oracle_of("qwen3"))
    assert not any(served[1].accepted)
    assert max(served[3].accepted) == 1


@pytest.mark.parametrize("framework", [REFERENCE, "torch"])
def test_block_trees_resume_after_preemption(framework, backends):
    each = cell("qwen3", "DFLASH", LARGE, SAMPLED, "mixed", 1, 1)
    engine = _drafting(Fewer(backends.get(framework, each), 1 + 210))
    crowded = drive(engine, requests_of(each))
    assert engine.scheduler.num_preemptions
    cells.compare(each, {"crowded": crowded}, oracle_of("qwen3"))


@pytest.mark.parametrize("framework", [REFERENCE, "torch", "jax"])
def test_branch_calibration_leaves_siblings_without_children(framework, backends):
    each = cell("qwen3_5", "JETSPEC", SHARED, SAMPLED, "mixed", 1, 16)
    for known, expected in ((0.0, True), (-np.inf, False)):
        backend = backends.get(framework, each)
        controller = CalibrationRecorder(_static(backend, SHARED), backend.capacity, known)
        served = drive(_engine_of(backend, controller), requests_of(each))
        cells.compare(each, {framework: served}, oracle_of("qwen3_5"))
        assert controller.branches == {"drafter": expected}


def _drafting(backend) -> Engine:
    return _engine_of(backend, _static(backend, LARGE))


def _static(backend, shape: TreeShape) -> StaticController:
    sizes = {"nodes": shape.nodes, "depth": shape.depth, "width": shape.width}
    return StaticController(backend.capacity, **sizes)


def _engine_of(backend, controller) -> Engine:
    return Engine(backend, controller, overlap=1, chunked_prefill_size=64, cache=NO_CACHE)
