"""Kernel of the norm of value heads: on a GPU, or interpreted."""

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_impl.ops as jax_ops
import torch_impl.ops as torch_ops
from jax_impl.ops.attention import attention_layer as jax_attention_layer
from kernels.kernel_limits import MOST_VALUE_ROWS
from shared.spec.attention_layer import norm_values
from shared.spec.reduction_order import SQUARES
from tests.support.cases.gemm.layers import values_arguments
from tests.support.implementations import Implementation, each_implementation, to_torch
from tests.support.kernels import (
    AS_WRITTEN,
    INTERPRET,
    KERNELS,
    ON_GPU,
    bind_kernels,
    share_arithmetic,
)
from tests.support.op_case import Arguments, OpCase, table
from torch_impl.ops.attention import attention_layer as torch_attention_layer

pytestmark = pytest.mark.usefixtures("interpreted")

SMALL = [case for case in table("layers") if case.op == "attention_layer" and not case.is_large]
KINDS = {
    "three chunks": {"counts": (3, 1), "head_size": 144, "are_keys": False},
    "sliding": {"counts": (4, 2), "head_size": 256, "are_keys": False},
    "K = V": {"counts": (4, 1), "head_size": 512, "are_keys": True},
}
each_language = pytest.mark.parametrize("language", KERNELS)
each_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind: str) -> Arguments:
    given = values_arguments(0, R=3, **KINDS[kind])
    return given | {"qkv": given["qkv"].astype(ml_dtypes.bfloat16)}


def run(language: str, name: str, x: np.ndarray, *args: object, **how: object) -> np.ndarray:
    """Calls a kernel for rows of bfloat16."""
    call = partial(getattr(KERNELS[language]["layers"], name), order=SQUARES, **how)
    if language == "triton":
        rows = to_torch(x).to("cuda" if ON_GPU else "cpu")
        return call(rows, *args).float().cpu().numpy()
    program = jax.jit(
        lambda x: call(x, *args, interpret=INTERPRET).astype(jnp.float32),
        compiler_options=AS_WRITTEN,
    )
    return np.asarray(program(x))


def normed(language: str, given: Arguments) -> np.ndarray:
    heads, qkv = given["heads"], given["qkv"]
    how = {"stored": qkv.shape[1] - heads.key_columns, "head_size": heads.head_size}
    return run(language, "norm_values", qkv, given["eps"], **how, are_keys=given["are_keys"])


@each_implementation
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_norm_values_matches_spec(case: OpCase, implementation: Implementation) -> None:
    given = case.arguments(seed=0)
    args = [given[name] for name in ("qkv", "heads", "eps", "are_keys")]
    got = implementation("attention_layer").norm_values(*args)
    np.testing.assert_allclose(got, norm_values(*args), rtol=1e-5, atol=1e-6)


@each_language
@each_kind
def test_norm_values_kernel_bits_equal_rms_norm(kind: str, language: str) -> None:
    """A row of NaN changes no other row."""
    given = made(kind)
    qkv, columns = given["qkv"], given["heads"].key_columns
    qkv[1, -1] = np.nan
    values = qkv[:, -columns:].reshape(-1, given["heads"].head_size)
    values = run(language, "rms_norm", values, None, given["eps"])
    others = qkv if given["are_keys"] else qkv[:, :-columns]
    want = np.concatenate([others.astype(np.float32), values.reshape(len(qkv), -1)], axis=1)
    got = normed(language, given)
    np.testing.assert_array_equal(got, want)
    assert np.isnan(got[1]).any()
    assert np.isfinite(got[[0, 2]]).all()


def test_norm_values_bits_independent_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than `MOST_VALUE_ROWS` rows are a norm and a copy, by the same operation."""
    given = made("K = V")
    bind_kernels(monkeypatch, torch_ops, KERNELS["triton"])
    rows = to_torch(np.tile(given["qkv"], (MOST_VALUE_ROWS, 1))).to("cuda" if ON_GPU else "cpu")
    heads, eps, are_keys = given["heads"], given["eps"], given["are_keys"]
    got = torch_attention_layer.norm_values(rows, heads, eps, are_keys).float().cpu().numpy()
    for language in KERNELS:
        np.testing.assert_array_equal(got[:3], normed(language, given))


@each_kind
def test_norm_values_kernels_bitwise_equal(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    share_arithmetic(monkeypatch)
    found = [normed(language, made(kind)) for language in KERNELS]
    for got in found:
        np.testing.assert_array_equal(got, found[0])


@pytest.mark.parametrize(("rows", "name"), [(3, "norm_values"), (MOST_VALUE_ROWS + 1, "rms_norm")])
def test_jax_norm_values_is_one_kernel(
    rows: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bind_kernels(monkeypatch, jax_ops, KERNELS["pallas"])
    given = made("sliding")
    qkv = np.resize(given["qkv"], (rows, given["qkv"].shape[1]))
    call = partial(jax_attention_layer.norm_values, **{k: given[k] for k in ("heads", "eps")})
    traced = jax.jit(partial(call, are_keys=False)).trace(qkv)
    for platform, count in (("cuda", 1), ("cpu", 0)):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert text.count("xla.gpu.triton") == count
        assert (f'name = "{name}"' in text) == (count > 0)
