"""Kernel that compacts the accepted KV of a verify: on a GPU, or interpreted."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.ops.attention.attention
import torch_impl.ops.attention.attention
from shared.spec import attention as spec
from tests.support.cases.attention.attention import COMMITS, commit_arguments
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS, bind_kernels

pytestmark = pytest.mark.usefixtures("interpreted")

CASES = {str(case): case for case in COMMITS if not case.is_large}


pallas_commit = jax.jit(
    partial(KERNELS["pallas"]["kv_compaction"].commit, interpret=INTERPRET),
    compiler_options=OPTIONS,
)


def run_pallas(*arguments: np.ndarray) -> np.ndarray:
    return np.asarray(pallas_commit(*arguments))


def run_triton(*arguments: np.ndarray) -> np.ndarray:
    given = [torch.tensor(x, device="cuda" if ON_GPU else "cpu") for x in arguments]
    KERNELS["triton"]["kv_compaction"].commit(*given)
    return given[0].cpu().numpy()


@pytest.fixture(params=KERNELS)
def run(request: pytest.FixtureRequest) -> Callable[..., np.ndarray]:
    return {"pallas": run_pallas, "triton": run_triton}[request.param]


@pytest.mark.parametrize("name", CASES)
def test_kv_compaction_matches_spec(name: str, run) -> None:
    for seed in range(3):
        arguments = CASES[name].arguments(seed)
        want = spec.compact_accepted_kv(**arguments)
        assert (want != arguments["pages"]).any()
        np.testing.assert_array_equal(run(*arguments.values()), want)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_kv_compaction_preserves_nan_bits(dtype: str, run) -> None:
    arguments = commit_arguments(0, B=3, W=4, heads=2, D=16)
    bits = np.dtype(dtype.replace("float", "uint"))
    pages = np.random.default_rng(1).integers(0, 2 ** (8 * bits.itemsize), arguments["pages"].shape)
    pages = pages.astype(bits)
    pages[..., ::3] |= np.full((), np.nan, dtype).view(bits)
    arguments["pages"] = pages.view(dtype)
    want = spec.compact_accepted_kv(**(arguments | {"pages": pages}))
    np.testing.assert_array_equal(run(*arguments.values()).view(bits), want)


def test_kv_compaction_kernels_same_signature_as_spec() -> None:
    specified = list(inspect.signature(spec.compact_accepted_kv).parameters)
    for modules in KERNELS.values():
        names = inspect.signature(modules["kv_compaction"].commit).parameters
        assert [n for n in names if n != "interpret"] == specified


@pytest.mark.parametrize(("W", "heads", "D"), [(2, 1, 16), (6, 8, 128), (17, 4, 256), (64, 5, 64)])
def test_jax_kv_compaction_kernel_lowered_for_gpu_only(
    W: int, heads: int, D: int, monkeypatch
) -> None:
    bind_kernels(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    ops = jax_impl.ops.attention.attention
    commit = jax_impl.ops.kernel_or_reference(
        ops.kernel_compact_accepted_kv, ops.plain_compact_accepted_kv
    )
    given = commit_arguments(0, B=2, W=W, heads=heads, D=D)
    traced = jax.jit(commit).trace(**{k: jnp.asarray(v) for k, v in given.items()})
    launched = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("xla.gpu.triton")
        for platform in ("cpu", "cuda")
    }
    assert launched == {"cpu": 0, "cuda": 1}


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
def test_torch_kv_compaction_kernel_matches_spec_in_place(monkeypatch) -> None:
    bind_kernels(monkeypatch, torch_impl.ops, KERNELS["triton"])
    arguments = commit_arguments(1, B=3, W=4, heads=2, D=16)
    device = "cuda" if ON_GPU else "cpu"
    given: list[Any] = [torch.tensor(x, device=device) for x in arguments.values()]
    found = torch_impl.ops.attention.attention.kernel_compact_accepted_kv(
        torch_impl.ops.KERNELS, *given
    )
    assert found is given[0]
    np.testing.assert_array_equal(found.cpu().numpy(), spec.compact_accepted_kv(**arguments))
