"""Kernels of the gate and output norm of Mamba2 layers: on a GPU, or interpreted."""

import inspect
from dataclasses import replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import jax_impl.ops.recurrent.mamba2
import torch_impl.ops.recurrent.mamba2
from jax_impl.ops import Scale
from shared.boundary.tp_group import SINGLE_RANK
from shared.models.mixers.mamba2 import Mamba2Config, OutputNorm
from shared.spec import mamba2 as spec
from shared.spec.reduction_order import SQUARES
from tests.support.cases.gdn.recurrent_layer import NEMOTRON, SMALL_MAMBA2, width_of
from tests.support.kernels import (
    AS_WRITTEN,
    INTERPRET,
    KERNELS,
    ON_GPU,
    bind_kernels,
    share_arithmetic,
)

pytestmark = pytest.mark.usefixtures("interpreted")

EPS = 1e-5
ROWS, LAYERS, LAYER = 5, 2, 1
# Groups of 64 columns, of 192 (no power of two), and no norm with a multiplier.
SIZES = {
    "gate first": SMALL_MAMBA2,
    "norm first": replace(SMALL_MAMBA2, norm=OutputNorm.BEFORE_GATE, norm_size=128),
    "192 columns": replace(SMALL_MAMBA2, num_heads=6, norm_size=192),
    "no norm": replace(SMALL_MAMBA2, norm=OutputNorm.NONE, out_factor=0.5),
}
each_language = pytest.mark.parametrize("language", KERNELS)
each_name = pytest.mark.parametrize("name", SIZES)


def inputs_of(sizes: Mamba2Config) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Outputs of heads, projected rows and norm weights, which bfloat16 represents."""
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((ROWS, columns)) for columns in (sizes.values, width_of(sizes))]
    arrays = [x.astype(ml_dtypes.bfloat16).astype(np.float32) for x in arrays]
    weight = rng.standard_normal(sizes.values).astype(np.float32)
    return *arrays, None if sizes.norm is OutputNorm.NONE else weight


def settings_of(sizes: Mamba2Config) -> dict:
    return {
        "eps": EPS,
        "norm_size": sizes.values if sizes.norm is OutputNorm.NONE else sizes.norm_size,
        "gates_first": sizes.norm is not OutputNorm.BEFORE_GATE,
        "factor": sizes.out_factor,
        "order": SQUARES,
    }


def in_pallas(sizes: Mamba2Config, rows: slice = slice(None)) -> np.ndarray:
    out, projected, weight = inputs_of(sizes)
    kernel = partial(
        KERNELS["pallas"]["mamba2_output"].gated_output, **settings_of(sizes), interpret=INTERPRET
    )
    norms = None
    if weight is not None:  # weights of all layers
        norms = jnp.stack([jnp.full_like(weight, jnp.nan), weight])
    out, projected = (jnp.asarray(x[rows], jnp.bfloat16) for x in (out, projected))
    program = jax.jit(kernel, compiler_options=AS_WRITTEN)
    return np.asarray(program(out, projected, norms, jnp.full(1, LAYER, jnp.int32)), np.float32)


def in_triton(sizes: Mamba2Config, rows: slice = slice(None)) -> np.ndarray:
    out, projected, weight = inputs_of(sizes)
    device = "cuda" if ON_GPU else "cpu"
    heads, row = (
        torch.tensor(x[rows], device=device, dtype=torch.bfloat16) for x in (out, projected)
    )
    norm = None if weight is None else torch.tensor(weight, device=device)
    kernel = KERNELS["triton"]["mamba2_output"].gated_output
    return kernel(heads, row, norm, **settings_of(sizes)).float().cpu().numpy()


RUN = {"pallas": in_pallas, "triton": in_triton}


@cache
def found(language: str, name: str) -> np.ndarray:
    """Returns the result for a case, cached for several tests."""
    return RUN[language](SIZES[name])


@each_name
@each_language
def test_mamba2_output_matches_spec(name: str, language: str) -> None:
    sizes = SIZES[name]
    out, projected, weight = inputs_of(sizes)
    want = spec.output_norm(out, projected[:, : sizes.values], weight, EPS, sizes)
    # One rounding to 8 bits.
    np.testing.assert_allclose(found(language, name), want, rtol=2**-8, atol=1e-6)


@each_language
def test_mamba2_output_row_is_batch_invariant(language: str) -> None:
    alone = RUN[language](SIZES["gate first"], slice(2, 3))
    np.testing.assert_array_equal(alone, found(language, "gate first")[2:3])


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@each_name
def test_mamba2_output_kernels_bitwise_equal(name: str, monkeypatch) -> None:
    share_arithmetic(monkeypatch)
    np.testing.assert_array_equal(found("pallas", name), in_triton(SIZES[name]))


@pytest.mark.parametrize("sizes", [NEMOTRON, SIZES["192 columns"]], ids=str)
def test_pallas_mamba2_output_lowers_for_gpu(sizes: Mamba2Config) -> None:
    kernel = partial(KERNELS["pallas"]["mamba2_output"].gated_output, **settings_of(sizes))
    half = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16)
    norms = jax.ShapeDtypeStruct((LAYERS, sizes.values), jnp.float32)
    layer = jax.ShapeDtypeStruct((1,), jnp.int32)
    out, projected = half((8, sizes.values)), half((8, width_of(sizes)))
    traced = jax.jit(kernel).trace(out, projected, norms, layer)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("__gpu$xla.gpu.triton") == 1


def test_mamba2_output_kernels_have_equal_parameters() -> None:
    names = [
        [*inspect.signature(each["mamba2_output"].gated_output).parameters]
        for each in KERNELS.values()
    ]
    assert all([n for n in own if n not in ("interpret", "layer")] == names[-1] for own in names)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
def test_torch_mamba2_output_kernel_matches_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SIZES["gate first"]
    bind_kernels(monkeypatch, torch_impl.ops, KERNELS["triton"])
    device = "cuda" if ON_GPU else "cpu"
    out, projected, weight = (torch.tensor(x, device=device) for x in inputs_of(sizes))
    kernel = torch_impl.ops.recurrent.mamba2.kernel_gated_output
    out, projected = out.bfloat16(), projected.bfloat16()
    got = kernel(torch_impl.ops.KERNELS, out, projected, weight, EPS, sizes, SINGLE_RANK)
    np.testing.assert_array_equal(got.float().cpu().numpy(), found("triton", "gate first"))


def test_jax_mamba2_output_reads_stacked_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SIZES["gate first"]
    bind_kernels(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    ops = jax_impl.ops.recurrent.mamba2
    operation = jax_impl.ops.kernel_or_reference(ops.kernel_gated_output, ops.plain_gated_output)
    out, projected, weight = (jnp.asarray(x) for x in inputs_of(sizes))
    stack = jnp.stack([jnp.full_like(weight, jnp.nan), weight])

    def run(out: jax.Array) -> jax.Array:
        return operation(out, projected, Scale(stack, LAYER), EPS, sizes, SINGLE_RANK)

    traced = jax.jit(run).trace(out)
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("xla.gpu.triton") == 1
    want = spec.output_norm(
        *map(np.asarray, (out, projected[:, : sizes.values], weight)), EPS, sizes
    )
    np.testing.assert_allclose(jax.jit(run)(out), want, rtol=1e-5, atol=1e-5)
