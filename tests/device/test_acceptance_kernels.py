"""Acceptance kernel, which walks the tree along a verify's choices: on a GPU, or interpreted."""

import inspect
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.ops.sampling.acceptance
import torch_impl.ops.sampling.acceptance
from shared.spec import acceptance as spec
from tests.support.cases.sampling.acceptance import TABLE, follow_arguments
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS, bind_kernels

pytestmark = pytest.mark.usefixtures("interpreted")

CASES = {str(case): case for case in TABLE if case.function == "follow" and not case.is_large}
SIZES = {"B": 3, "N": 5, "depth": 3, "is_chain": False}


def given_of(arguments: dict[str, Any], make: Callable) -> dict[str, Any]:
    """Returns the arguments of the kernel."""
    given = {name: value for name, value in arguments.items() if name != "is_chain"}
    return {k: make(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}


@cache
def pallas_program(depth: int) -> Callable:
    follow = KERNELS["pallas"]["acceptance"].follow
    return jax.jit(partial(follow, depth=depth, interpret=INTERPRET), compiler_options=OPTIONS)


def run_pallas(arguments: dict[str, Any]) -> list[np.ndarray]:
    given = given_of(arguments, jnp.asarray)
    return [np.asarray(x) for x in pallas_program(given.pop("depth"))(**given)]


def run_triton(arguments: dict[str, Any]) -> list[np.ndarray]:
    device = "cuda" if ON_GPU else "cpu"
    given = given_of(arguments, lambda x: torch.tensor(x, device=device))
    return [x.cpu().numpy() for x in KERNELS["triton"]["acceptance"].follow(**given)]


@pytest.fixture(params=KERNELS)
def run(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], list[np.ndarray]]:
    return {"pallas": run_pallas, "triton": run_triton}[request.param]


@pytest.mark.parametrize("name", CASES)
def test_follow_kernel_matches_spec(name: str, run) -> None:
    accepted, failed = 0, 0
    for seed in range(8):
        arguments = CASES[name].arguments(seed)
        want = spec.follow(**given_of(arguments, np.asarray))
        for got, wanted in zip(run(arguments), vars(want).values(), strict=True):
            np.testing.assert_array_equal(got, wanted)
        accepted, failed = accepted + int(want.counts.sum()), failed + int(want.failed.sum())
    assert accepted > 8
    assert failed > 0 or "1 nodes" in name


@pytest.mark.parametrize("ops", [jax_impl.ops, torch_impl.ops], ids=["jax", "torch"])
@pytest.mark.parametrize("name", CASES)
def test_plain_follow_matches_spec(name: str, ops) -> None:
    arguments = CASES[name].arguments(3)
    make = jnp.asarray if ops is jax_impl.ops else torch.tensor
    given = given_of(arguments, make)
    got = ops.sampling.acceptance.plain_follow(**given, is_chain=arguments["is_chain"])
    want = vars(spec.follow(**given_of(arguments, np.asarray)))
    for field, wanted in want.items():
        np.testing.assert_array_equal(np.asarray(getattr(got, field)), wanted)


def test_follow_kernels_same_signature_as_spec() -> None:
    specified = list(inspect.signature(spec.follow).parameters)
    for modules in KERNELS.values():
        names = inspect.signature(modules["acceptance"].follow).parameters
        assert [n for n in names if n != "interpret"] == specified


def test_jax_follow_kernel_lowered_for_gpu_only(monkeypatch) -> None:
    bind_kernels(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    ops = jax_impl.ops.sampling.acceptance
    follow = jax_impl.ops.kernel_or_reference(ops.kernel_follow, ops.plain_follow)
    given = given_of(follow_arguments(0, **SIZES), jnp.asarray)
    depth = given.pop("depth")
    traced = jax.jit(lambda given: follow(**given, depth=depth)).trace(given)
    launched = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("xla.gpu.triton")
        for platform in ("cpu", "cuda")
    }
    assert launched == {"cpu": 0, "cuda": 1}


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
def test_torch_follow_kernel_matches_spec(monkeypatch) -> None:
    bind_kernels(monkeypatch, torch_impl.ops, KERNELS["triton"])
    device = "cuda" if ON_GPU else "cpu"
    arguments = follow_arguments(1, **SIZES)
    given = given_of(arguments, lambda x: torch.tensor(x, device=device))
    found = torch_impl.ops.sampling.acceptance.kernel_follow(torch_impl.ops.KERNELS, **given)
    want = spec.follow(**given_of(arguments, np.asarray))
    for field, wanted in vars(want).items():
        np.testing.assert_array_equal(getattr(found, field).cpu().numpy(), wanted)
