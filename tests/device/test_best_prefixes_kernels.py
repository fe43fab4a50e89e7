"""Kernels of best prefixes: on a GPU, or interpreted."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch

from jax_impl import ops as jax_ops
from jax_impl.ops.trees import best_prefixes as jax_best_prefixes
from shared.spec import best_prefixes as spec
from tests.support.cases.trees.best_prefixes import TABLE, grow_arguments
from tests.support.implementations import to_jax
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS, bind_kernels
from tests.support.op_case import Arguments
from torch_impl import ops as torch_ops
from torch_impl.ops.trees import best_prefixes as torch_best_prefixes

pytestmark = pytest.mark.usefixtures("interpreted")

CASES = {str(case): case for case in TABLE if not case.is_large}
Run = Callable[[Arguments], list[np.ndarray]]


def run_pallas(arguments: Arguments) -> list[np.ndarray]:
    kernel = KERNELS["pallas"]["best_prefixes"].grow
    known = {name: x for name, x in arguments.items() if name != "nodes"}
    call = jax.jit(lambda given: kernel(**given, nodes=arguments["nodes"], interpret=INTERPRET))
    return [np.asarray(x) for x in call.lower(known).compile(OPTIONS)(known)]


def placed(arguments: Arguments) -> Arguments:
    device = "cuda" if ON_GPU else "cpu"
    return {
        name: torch.tensor(x, device=device) if isinstance(x, np.ndarray) else x
        for name, x in arguments.items()
    }


def run_triton(arguments: Arguments) -> list[np.ndarray]:
    found = KERNELS["triton"]["best_prefixes"].grow(**placed(arguments))
    return [x.cpu().numpy() for x in found]


@pytest.fixture(params=KERNELS)
def run(request: pytest.FixtureRequest) -> Run:
    return {"pallas": run_pallas, "triton": run_triton}[request.param]


def compare(got: list[np.ndarray], arguments: Arguments) -> None:
    for one, want in zip(got, spec.grow(**arguments), strict=True):
        np.testing.assert_array_equal(one, want)


@pytest.mark.parametrize("name", CASES)
def test_best_prefixes_kernels_match_spec(name: str, run: Run) -> None:
    arguments = CASES[name].arguments(0)
    compare(run(arguments), arguments)


def test_best_prefixes_kernels_draft_no_nan(run: Run) -> None:
    arguments = grow_arguments(2, B=3, S=3, K=4, N=16)
    arguments["edges"][0], arguments["edges"][1, 1, 0, 2] = np.nan, np.nan
    compare(run(arguments), arguments)


MADE = grow_arguments(0, B=3, S=3, K=4, N=9)


def test_jax_best_prefixes_kernel_lowered_for_gpu_only(monkeypatch) -> None:
    bind_kernels(monkeypatch, jax_ops, KERNELS["pallas"])
    ops = jax_best_prefixes
    operation = jax_ops.kernel_or_reference(ops.kernel_grow, ops.plain_grow)
    made = {name: to_jax(x) for name, x in MADE.items() if isinstance(x, np.ndarray)}
    traced = jax.jit(lambda made: operation(**made, lists=None, nodes=9)).trace(made)
    launched = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("xla.gpu.triton")
        for platform in ("cpu", "cuda")
    }
    assert launched == {"cpu": 0, "cuda": 1}


def test_torch_best_prefixes_kernel_matches_spec(monkeypatch) -> None:
    if "triton" not in KERNELS:
        pytest.skip("triton is not installed")
    bind_kernels(monkeypatch, torch_ops, KERNELS["triton"])
    found = torch_best_prefixes.kernel_grow(torch_ops.KERNELS, **placed(MADE))
    compare([x.cpu().numpy() for x in found], MADE)
