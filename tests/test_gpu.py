"""On an NVIDIA GPU, in float32 and with the plain ops: the same promises as on a CPU.

python -m pytest -o addopts= -m gpu tests/test_gpu.py
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shared.backend import Backend
from tests.backends import make_gpu_backend
from tests.equality import assert_few_excused
from tests.test_cross_backend import (
    GREEDY,
    SAMPLED,
    Cell,
    compare,
    limits_of,
    model_of,
    serve,
)

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
FRAMEWORKS = ("torch", "torch graphs", "jax")


@pytest.fixture(scope="module")
def backends() -> Iterator[dict[tuple[str, str], Backend]]:
    made: dict[tuple[str, str], Backend] = {}
    yield made
    for backend in made.values():
        backend.close()


def backend_of(backends: dict, framework: str, cell: Cell) -> Backend:
    key = framework, cell.family
    if key not in backends:
        drafter = "NEXTN" if cell.family == "qwen3_5" else "none"
        limits = limits_of(cell.family, cell.page_size)
        backends[key] = make_gpu_backend(framework, *model_of(cell.family), limits, drafter)
    return backends[key]


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_eager_torch_captured_torch_and_jax_give_the_text_of_the_specification(cell, backends):
    served = {name: serve(backend_of(backends, name, cell), cell) for name in FRAMEWORKS}
    compare(cell, served)
    assert_few_excused()


def test_every_decode_step_was_a_replay_of_one_graph_a_program(backends):
    cell = CELLS[-1]
    backend = backend_of(backends, "torch graphs", cell)
    before = backend.replays
    served = serve(backend, cell)
    steps = max(len(outcome.accepted) for outcome in served.values())
    assert backend.replays - before >= steps
    assert backend.captures <= len(backend.limits.shapes)


def test_jax_compiles_each_program_once(backends):
    cell = CELLS[-1]
    backend = backend_of(backends, "jax", cell)
    serve(backend, cell)
    assert backend.compiles <= len(backend.limits.programs)
