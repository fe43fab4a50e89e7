"""Guarantees of the CPU tests on an NVIDIA GPU, in float32, with kernels and with reference ops.

python -m pytest -o addopts= -m gpu tests/device/test_gpu.py
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from importlib import import_module

import pytest

from shared.boundary.backend import Backend
from tests.support import block_cells as blocks
from tests.support import rejection_sampling_hybrid
from tests.support.backends import GPU_FRAMEWORKS, make_gpu_backend
from tests.support.cacheless import CachelessOracle
from tests.support.cells import (
    BATCH,
    GREEDY,
    SAMPLED,
    SHAPES,
    Cell,
    capacity_of,
    compare,
    model_of,
    oracle_of,
    serve,
)
from tests.support.equality import assert_few_excused
from tests.support.tiny_heads import tiny_head
from tests.support.tiny_models import DENSE
from tests.support.tree_cells import TREES, head_of
from tests.support.tree_cells import cell as tree_cell
from tests.support.two_groups import two_groups
from tests.support.window_capacity import with_window_pools

pytestmark = pytest.mark.gpu

CELLS = [
    Cell("llama", 0, SAMPLED, "mixed", 2, 16),
    Cell("qwen3", 0, GREEDY, "mixed", 1, 64),
    *(
        Cell("qwen3_5", depth, sampling, "mixed", overlap, 16)
        for depth, overlap in ((0, 0), (1, 1), (3, 2), (5, 1))
        for sampling in (GREEDY, SAMPLED)
    ),
]
TREE_CELLS = [
    tree_cell("qwen3_5", drafter, TREES[1], sampling, "mixed", overlap, 16)
    for drafter in ("NEXTN", "STANDALONE")
    for sampling, overlap in ((GREEDY, 1), (SAMPLED, 2))
]
TREE_CELLS += [
    tree_cell("gemma4", "ASSISTANT", TREES[1], how, "mixed", 1, 16) for how in (GREEDY, SAMPLED)
]
BLOCK_CELLS = [
    blocks.cell("qwen3_5", GREEDY, "mixed", 1, 16),
    blocks.cell("qwen3_5", SAMPLED, "mixed", 2, 16),
    blocks.cell("qwen3", SAMPLED, "mixed", 1, 64),
]
SHARED_CELLS = [
    *(tree_cell("qwen3_5", "NEXTN", TREES[1], how, "mixed", 1, 16) for how in (GREEDY, SAMPLED)),
    Cell("qwen3_5", 5, SAMPLED, "mixed", 1, 16),
    tree_cell("qwen3_5", "STANDALONE", TREES[1], SAMPLED, "mixed", 1, 16),
    replace(BLOCK_CELLS[1], depth=blocks.SHARED.depth),
]
OPS = ("kernels", "plain")


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[tuple[str, str], Backend]]:
    made: dict[tuple[str, ...], Backend] = {}
    yield made
    for backend in made.values():
        backend.close()


def backend_of(backends: dict, framework: str, cell: Cell, ops: str = "kernels") -> Backend:
    key = framework, ops, cell.family, cell.drafter
    if key not in backends:
        trees = () if cell.drafter == "none" else TREES[1:2]
        shapes = (*SHAPES.get((cell.family, cell.drafter), ()), *trees)
        capacity = capacity_of(cell.family, cell.page_size, shapes)
        drafter = "none" if cell.drafter == "none" else head_of(cell.family, cell.drafter)
        backends[key] = make_gpu_backend(framework, *model_of(cell.family), capacity, drafter)
    return backends[key]


def chosen(framework: str, ops: str) -> AbstractContextManager[None]:
    """Within it the framework runs with its kernels, which must be there, or without."""
    found = import_module(f"{framework.split()[0]}_impl.ops")
    assert found.kernel_names()
    return found.reference_ops() if ops == "plain" else nullcontext()


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_gpu_frameworks_match_spec(cell, backends):
    served = {name: serve(backend_of(backends, name, cell), cell) for name in GPU_FRAMEWORKS}
    compare(cell, served, oracle_of(cell.family))
    assert_few_excused()


@pytest.mark.parametrize("family", DENSE)
def test_gpu_dense_family_matches_spec(family):
    cell = tree_cell(family, "STANDALONE", TREES[2], GREEDY, "mixed", 1, 16)
    capacity, served = capacity_of(family, cell.page_size, (cell.shape,)), {}
    for name in GPU_FRAMEWORKS:
        made = make_gpu_backend(name, *model_of(family), capacity, head_of(family, cell.drafter))
        served[name] = serve(made, cell)
        made.close()
    compare(cell, served, oracle_of(family))
    assert_few_excused()


def test_gpu_windows_and_shared_kv_match_spec():
    """Two head sizes, a sliding window, and layers that read the KV of either kind."""
    cell = tree_cell("llama", "EAGLE3", TREES[2], SAMPLED, "mixed", 1, 16)
    model = two_groups()
    capacity, served = capacity_of(cell.family, cell.page_size, (cell.shape,)), {}
    capacity = with_window_pools(capacity, model[0])
    for name in GPU_FRAMEWORKS:
        made = make_gpu_backend(name, *model, capacity, tiny_head(*model, "EAGLE3", 5))
        served[name] = serve(made, cell)
        made.close()
    compare(cell, served, CachelessOracle(*model))
    assert_few_excused()


@pytest.mark.parametrize("cell", [CELLS[0], *TREE_CELLS], ids=str)
def test_gpu_kernels_and_reference_ops_match_spec(cell, backends):
    served = {}
    for framework in GPU_FRAMEWORKS:
        for ops in OPS:
            with chosen(framework, ops):
                backend = backend_of(backends, framework, cell, ops)
                served[f"{framework}, {ops}"] = serve(backend, cell)
    compare(cell, served, oracle_of(cell.family))
    assert_few_excused()


@pytest.mark.parametrize("cell", BLOCK_CELLS, ids=str)
def test_gpu_block_drafts_match_spec(cell):
    capacity = capacity_of(cell.family, cell.page_size, (blocks.CHAIN,))
    served = {}
    for name in GPU_FRAMEWORKS:
        made = (*blocks.model_of(cell.family), capacity, blocks.head_of(cell.family))
        backend = make_gpu_backend(name, *made)
        served[name] = serve(backend, cell)
        backend.close()
    compare(cell, served, blocks.oracle_of(cell.family))
    assert_few_excused()


@pytest.mark.parametrize("cell", SHARED_CELLS, ids=str)
def test_gpu_verify_budget_matches_spec(cell):
    """The text is the specification's; which drafts are verified is the same everywhere."""
    if is_block := cell.drafter == "DFLASH":
        shape, model, head = blocks.SHARED, blocks.model_of, blocks.head_of(cell.family)
    else:
        shape, model = replace(cell.shape, rows=2 * BATCH + 1), model_of
        head = head_of(cell.family, cell.drafter)
    capacity, served = capacity_of(cell.family, cell.page_size, (shape,)), {}
    for name in GPU_FRAMEWORKS:
        backend = make_gpu_backend(name, *model(cell.family), capacity, head)
        served[name] = serve(backend, cell)
        backend.close()
    compare(cell, served, (blocks.oracle_of if is_block else oracle_of)(cell.family))
    assert_few_excused()


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_gpu_rejection_sampling_matches_spec(rule):
    on_cpu, on_gpu = (
        rejection_sampling_hybrid.Rejecting(),
        rejection_sampling_hybrid.Rejecting(make_gpu_backend),
    )
    want = on_cpu.serve("reference", rule, rejection_sampling_hybrid.requests(), overlap=0)
    for framework in GPU_FRAMEWORKS:
        got = on_gpu.serve(framework, rule, rejection_sampling_hybrid.requests(), overlap=2)
        for number, kind in enumerate(rejection_sampling_hybrid.KINDS):
            assert got[number].tokens == want[number].tokens, (framework, kind)
            assert got[number].accepted == want[number].accepted, (framework, kind)
    on_cpu.close()
    on_gpu.close()


def test_cuda_graph_replays_every_step(backends):
    cell = CELLS[-1]
    backend = backend_of(backends, "torch graphs", cell)
    before = backend.replays
    served = serve(backend, cell)
    steps = max(len(outcome.accepted) for outcome in served.values())
    assert backend.replays - before > steps  # a prompt is one too
    assert backend.captures <= len(backend.capacity.programs)


def test_jax_compiles_each_program_once(backends):
    cell = CELLS[-1]
    backend = backend_of(backends, "jax", cell)
    serve(backend, cell)
    assert backend.compiles <= len(backend.capacity.programs)
