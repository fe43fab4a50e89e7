"""Kernels that commit to slots and restore them: on a GPU, or interpreted."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.ops.trees.slot_state
import torch_impl.ops.trees.slot_state
from shared.spec import slot_state as spec
from tests.support.cases.trees.slot_state import COMMITS, commit_arguments, restore_arguments
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS, bind_kernels

pytestmark = pytest.mark.usefixtures("interpreted")

CASES = {str(case): case for case in COMMITS if not case.is_large}
CHANGED = ("lengths", "newest", "seen", "draft_from")


def run_pallas(arguments: dict[str, Any]) -> list[np.ndarray]:
    commit = partial(KERNELS["pallas"]["slot_state"].commit, interpret=INTERPRET)
    given = {k: None if v is None else jnp.asarray(v) for k, v in arguments.items()}
    found = jax.jit(commit, compiler_options=OPTIONS)(**given)
    return [np.asarray(x) for x in found if x is not None]


def run_triton(arguments: dict[str, Any]) -> list[np.ndarray]:
    device = "cuda" if ON_GPU else "cpu"
    given = {k: None if v is None else torch.tensor(v, device=device) for k, v in arguments.items()}
    KERNELS["triton"]["slot_state"].commit(**given)
    return [given[name].cpu().numpy() for name in CHANGED if given[name] is not None]


@pytest.fixture(params=KERNELS)
def run(request: pytest.FixtureRequest) -> Callable[[dict[str, Any]], list[np.ndarray]]:
    return {"pallas": run_pallas, "triton": run_triton}[request.param]


@pytest.mark.parametrize("name", CASES)
def test_slot_commit_kernel_matches_spec(name: str, run) -> None:
    for seed in range(5):
        arguments = CASES[name].arguments(seed)
        want = [x for x in spec.commit(**arguments) if x is not None]
        for got, wanted in zip(run(arguments), want, strict=True):
            np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("function", ["commit", "restore"])
def test_slot_state_kernels_same_signature_as_spec(function: str) -> None:
    specified = list(inspect.signature(getattr(spec, function)).parameters)
    for modules in KERNELS.values():
        names = inspect.signature(getattr(modules["slot_state"], function)).parameters
        assert [n for n in names if n != "interpret"] == specified


def restored(language: str, arguments: dict[str, Any]) -> np.ndarray:
    """Returns the state of the slots after the kernel."""
    if language == "pallas":
        restore = partial(KERNELS["pallas"]["slot_state"].restore, interpret=INTERPRET)
        given = {k: jnp.asarray(v) for k, v in arguments.items()}
        return np.asarray(jax.jit(restore, compiler_options=OPTIONS)(**given))
    device = "cuda" if ON_GPU else "cpu"
    given = {k: torch.tensor(v, device=device) for k, v in arguments.items()}
    KERNELS["triton"]["slot_state"].restore(**given)
    return given["memory"].cpu().numpy()


@pytest.mark.parametrize("language", KERNELS)
@pytest.mark.parametrize("state", [(2, 3, 5), (3, 2048)], ids=str)
def test_slot_restore_kernel_matches_spec(state: tuple[int, ...], language: str) -> None:
    """States of several parts are covered; the restore removes a NaN of a slot or a snapshot."""
    for seed in range(3):
        arguments = restore_arguments(seed, B=6, L=2, state=state)
        arguments["memory"][:, 1::2] = arguments["saved"][:, 0] = np.nan
        want = spec.restore(**arguments)
        np.testing.assert_array_equal(restored(language, arguments), want)
        assert not np.isnan(want[:, arguments["slots"][arguments["starts"]]]).any()


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
def test_slot_restore_rejects_noncontiguous_states() -> None:
    arguments = restore_arguments(0, B=2, L=2, state=(4, 4))
    given = {k: torch.tensor(v) for k, v in arguments.items()}
    given["memory"] = given["memory"].mT
    with pytest.raises(ValueError, match="must be contiguous"):
        KERNELS["triton"]["slot_state"].restore(**given)


@pytest.mark.parametrize("W", [1, 3])
def test_jax_slot_commit_kernel_lowered_for_gpu_only(W: int, monkeypatch) -> None:
    bind_kernels(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    ops = jax_impl.ops.trees.slot_state
    commit = jax_impl.ops.kernel_or_reference(ops.kernel_commit, ops.plain_commit)
    given = commit_arguments(0, B=2, W=W, vocab=300, is_fed=False)
    traced = jax.jit(commit).trace(**{k: jnp.asarray(v) for k, v in given.items()})
    launched = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("xla.gpu.triton")
        for platform in ("cpu", "cuda")
    }
    assert launched == {"cpu": 0, "cuda": 1}


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
def test_torch_slot_commit_kernel_matches_spec(monkeypatch) -> None:
    bind_kernels(monkeypatch, torch_impl.ops, KERNELS["triton"])
    device = "cuda" if ON_GPU else "cpu"
    arguments = commit_arguments(1, B=3, W=4, vocab=9, is_fed=True)
    given = [None if v is None else torch.tensor(v, device=device) for v in arguments.values()]
    found = torch_impl.ops.trees.slot_state.kernel_commit(torch_impl.ops.KERNELS, *given)
    for got, want in zip(found[:3], spec.commit(**arguments), strict=False):
        np.testing.assert_array_equal(got.cpu().numpy(), want)


@pytest.mark.skipif("triton" not in KERNELS or ON_GPU, reason="Triton is not interpreted")
def test_interpreter_detects_out_of_bounds_read() -> None:
    """Interpreted kernels must read within tensors, because a GPU may return anything elsewhere."""
    uniforms = KERNELS["triton"]["gumbel_noise"].uniforms
    seeds = torch.zeros(3, dtype=torch.int32)
    uniforms(seeds, seeds, 2, 0)
    with pytest.raises(Exception, match="1 of 1 addresses are in no tensor"):
        uniforms(seeds, seeds[:2].clone(), 2, 0)
