"""Kernels of the verify budget: on a GPU, or interpreted."""

from collections.abc import Callable

import jax
import numpy as np
import pytest
import torch

import jax_impl.ops.trees.verify_budget
import torch_impl.ops.trees.verify_budget
from shared.spec import verify_budget as spec
from tests.support.cases.trees.verify_budget import TABLE, rank_arguments, share_arguments
from tests.support.implementations import to_jax
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS, bind_kernels
from tests.support.op_case import Arguments

pytestmark = pytest.mark.usefixtures("interpreted")

CASES = {str(case): case for case in TABLE if not case.is_large}
Run = Callable[[str, Arguments], list[np.ndarray]]


def listed(value: object) -> list[np.ndarray]:
    return [np.asarray(x) for x in (value if isinstance(value, tuple) else (value,))]


def run_pallas(function: str, arguments: Arguments) -> list[np.ndarray]:
    kernel = getattr(KERNELS["pallas"]["verify_budget"], function)
    fixed = {name: x for name, x in arguments.items() if isinstance(x, int)}
    known = {name: x for name, x in arguments.items() if name not in fixed}
    call = jax.jit(lambda given: kernel(**given, **fixed, interpret=INTERPRET))
    return listed(call.lower(known).compile(OPTIONS)(known))


def run_triton(function: str, arguments: Arguments) -> list[np.ndarray]:
    device = "cuda" if ON_GPU else "cpu"
    placed = {
        name: torch.tensor(x, device=device) if isinstance(x, np.ndarray) else x
        for name, x in arguments.items()
    }
    found = getattr(KERNELS["triton"]["verify_budget"], function)(**placed)
    found = found if isinstance(found, tuple) else (found,)
    return [x.cpu().numpy() for x in found]


@pytest.fixture(params=KERNELS)
def run(request: pytest.FixtureRequest) -> Run:
    return {"pallas": run_pallas, "triton": run_triton}[request.param]


@pytest.mark.parametrize("name", CASES)
def test_verify_budget_kernels_match_spec(name: str, run: Run) -> None:
    case = CASES[name]
    arguments = case.arguments(0)
    wanted = listed(getattr(spec, case.function)(**arguments))
    for got, want in zip(run(case.function, arguments), wanted, strict=True):
        np.testing.assert_array_equal(got, want)


def test_log_acceptance_nan_ranks_last(run: Run) -> None:
    arguments = rank_arguments(0, B=3, N=9)
    arguments["weights"][0, 1:3], arguments["calibration"][2, :2] = np.nan, -np.inf
    (got,) = run("log_acceptance", arguments)
    assert np.isneginf(got).any()
    np.testing.assert_array_equal(got, spec.log_acceptance(**arguments))


def test_prune_to_budget_equal_weights_respects_row_limit(run: Run) -> None:
    arguments = share_arguments(0, B=5, N=16, rows=23)
    arguments["num_nodes"][:] = 16
    arguments["rank_weights"][:] = -np.inf
    *_, num_nodes = run("prune_to_budget", arguments)
    assert num_nodes.tolist() == [16, 4, 1, 1, 1]


MADE = {
    "log_acceptance": rank_arguments(0, B=3, N=9),
    "prune_to_budget": share_arguments(0, B=3, N=9, rows=12),
}


@pytest.mark.parametrize("function", MADE)
def test_jax_verify_budget_kernel_lowered_for_gpu_only(function: str, monkeypatch) -> None:
    bind_kernels(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    ops = jax_impl.ops.trees.verify_budget
    bound = (getattr(ops, f"{kind}_{function}") for kind in ("kernel", "plain"))
    operation = jax_impl.ops.kernel_or_reference(*bound)
    fixed = {name: x for name, x in MADE[function].items() if isinstance(x, int)}
    made = {name: to_jax(x) for name, x in MADE[function].items() if name not in fixed}
    traced = jax.jit(lambda made: operation(**made, **fixed)).trace(made)
    launched = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("xla.gpu.triton")
        for platform in ("cpu", "cuda")
    }
    assert launched == {"cpu": 0, "cuda": 1}


@pytest.mark.parametrize("function", MADE)
def test_torch_verify_budget_kernel_matches_spec(function: str, monkeypatch) -> None:
    if "triton" not in KERNELS:
        pytest.skip("triton is not installed")
    bind_kernels(monkeypatch, torch_impl.ops, KERNELS["triton"])
    device = "cuda" if ON_GPU else "cpu"
    made = [
        torch.tensor(x, device=device) if isinstance(x, np.ndarray) else x
        for x in MADE[function].values()
    ]
    operation = getattr(torch_impl.ops.trees.verify_budget, f"kernel_{function}")
    found = operation(torch_impl.ops.KERNELS, *made)
    found = found if isinstance(found, tuple) else (found,)
    wanted = listed(getattr(spec, function)(**MADE[function]))
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got.cpu().numpy(), want)
