"""Kernel of a residual addition after a norm: on a GPU, or interpreted."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import jax_impl.ops as jax_ops
import torch_impl.ops as torch_ops
from jax_impl.ops import Scale
from jax_impl.ops.gemm import added_norm as jax_added_norm
from jax_impl.ops.gemm.linear import NormedStream as JaxStream
from shared.spec.added_norm import added_norm
from shared.spec.linear import NormedStream
from shared.spec.reduction_order import SQUARES
from tests.support.cases.gemm.added_norm import EPS, SIZES, added_norm_arguments
from tests.support.implementations import to_torch
from tests.support.kernels import (
    AS_WRITTEN,
    INTERPRET,
    KERNELS,
    ON_GPU,
    bind_kernels,
    in_languages,
    share_arithmetic,
)
from tests.support.op_case import Arguments
from torch_impl.ops.gemm import added_norm as torch_added_norm
from torch_impl.ops.gemm.linear import NormedStream as TorchStream

pytestmark = pytest.mark.usefixtures("interpreted")

LAYERS, LAYER = 3, 1
PARTIAL = 200
"""Columns of three chunks and a part of a fourth."""


class Kind(NamedTuple):
    """An addition: columns of a row, with a layer scalar, with a next norm."""

    size: int
    has_scalar: bool
    has_norm: bool

    def __str__(self) -> str:
        return f"{self.size}{', scalar' * self.has_scalar}{', norm' * self.has_norm}"


KINDS = [
    Kind(size, has_scalar, has_norm)
    for size in (PARTIAL, *SIZES.values())
    for has_scalar in (False, True)
    for has_norm in (False, True)
]
# Of Pallas each size and each kind once or twice, as a kernel is compiled for each.
IN_PALLAS = [
    Kind(PARTIAL, has_scalar=False, has_norm=False),
    Kind(PARTIAL, has_scalar=True, has_norm=True),
    Kind(SIZES["26B"], has_scalar=False, has_norm=True),
    Kind(SIZES["31B"], has_scalar=True, has_norm=True),
]


def made(kind: Kind, R: int) -> Arguments:
    """Arrays of the kernel, of numbers that are bfloat16 in rows."""
    given = added_norm_arguments(0, R=R, size=kind.size, is_last=kind.has_scalar)
    given |= {"rows": given.pop("stream").rows}
    given |= {name: given[name].astype(ml_dtypes.bfloat16) for name in ("x", "rows")}
    return given if kind.has_norm else given | {"norm": None}


Results = list[np.ndarray | None]


class Triton:
    """Functions of the Triton kernels, of numpy arrays."""

    layers = KERNELS.get("triton", {}).get("layers")

    def _run(self, call: partial, given: Arguments) -> Results:
        device = "cuda" if ON_GPU else "cpu"
        placed = {name: to_torch(x) for name, x in given.items()}
        placed |= {k: x.to(device) for k, x in placed.items() if isinstance(x, torch.Tensor)}
        found = call(**placed, order=SQUARES)
        found = found if isinstance(found, tuple) else (found,)
        return [None if x is None else x.float().cpu().numpy() for x in found]

    def added_norm(self, given: Arguments) -> Results:
        return self._run(partial(self.layers.added_norm), given)

    def rms_norm(self, x: np.ndarray, weight: np.ndarray) -> Results:
        return self._run(partial(self.layers.rms_norm, eps=EPS), {"x": x, "weight": weight})

    def beside(self, x: np.ndarray, norm: np.ndarray) -> Results:
        return self._run(partial(self.layers.beside), {"x": x, "norm": norm})


class Pallas:
    """Functions of the Pallas kernels, of numpy arrays; scales are in stacks."""

    layers = KERNELS["pallas"]["layers"]

    def _run(self, call: partial, given: Arguments) -> Results:
        call = partial(call, order=SQUARES, interpret=INTERPRET)
        found = jax.jit(call, compiler_options=AS_WRITTEN)(**given)
        found = found if isinstance(found, tuple) else (found,)
        return [None if x is None else np.asarray(x.astype(jnp.float32)) for x in found]

    def added_norm(self, given: Arguments) -> Results:
        layer = jnp.int32(LAYER)
        arrays = {f"{x}s": in_stack(given[x]) for x in ("end_norm", "scalar", "norm")}
        arrays |= dict.fromkeys(("end_layer", "scalar_layer", "layer"), layer)
        arrays |= {"x": given["x"], "rows": given["rows"]}
        return self._run(partial(self.layers.added_norm, eps=EPS), arrays)

    def rms_norm(self, x: np.ndarray, weight: np.ndarray) -> Results:
        return self._run(partial(self.layers.rms_norm, eps=EPS), {"x": x, "weight": weight})

    def beside(self, x: np.ndarray, norm: np.ndarray) -> Results:
        given = {"x": x, "norms": in_stack(norm), "layer": jnp.int32(LAYER)}
        return self._run(partial(self.layers.beside), given)


LANGUAGES = {"pallas": Pallas, "triton": Triton}


def in_stack(x: np.ndarray | None) -> np.ndarray | None:
    """Returns a stack with a scale at `LAYER`, and no numbers elsewhere."""
    if x is None:
        return None
    stack = np.full((LAYERS, *x.shape), np.nan, np.float32)
    stack[LAYER] = x
    return stack


def composed(language: Pallas | Triton, given: Arguments) -> Results:
    """Returns the results of a kernel for each operation, rounded in between."""
    (normed,) = language.rms_norm(given["x"], given["end_norm"])
    assert normed is not None
    rows = given["rows"] + normed.astype(ml_dtypes.bfloat16)
    if given["scalar"] is not None:
        rows = (rows.astype(np.float32) * given["scalar"]).astype(ml_dtypes.bfloat16)
    if given["norm"] is None:
        return [rows.astype(np.float32), None, None]
    return [rows.astype(np.float32), *language.beside(rows, given["norm"])]


def check_equal(got: Results, want: Results) -> None:
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("language", "kind"), in_languages(KINDS, IN_PALLAS), ids=str)
def test_added_norm_kernel_bits_equal_composed_kernels(kind: Kind, language: str) -> None:
    """A row of NaN changes no other row."""
    given, run = made(kind, R=4), LANGUAGES[language]()
    given["x"][1, 7], given["rows"][2, kind.size - 1] = np.nan, np.inf
    got = run.added_norm(given)
    check_equal(got, composed(run, given))
    assert got[0] is not None
    assert np.isnan(got[0][1, 7])
    assert np.isfinite(got[0][[0, 3]]).all()


@pytest.mark.parametrize("kind", IN_PALLAS[1:3], ids=str)
def test_added_norm_kernels_bitwise_equal(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    share_arithmetic(monkeypatch)
    first, *others = (LANGUAGES[name]().added_norm(made(kind, R=3)) for name in KERNELS)
    for other in others:
        check_equal(other, first)


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
def test_torch_op_runs_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    bind_kernels(monkeypatch, torch_ops, KERNELS["triton"])
    given = made(IN_PALLAS[1], R=3)
    device = "cuda" if ON_GPU else "cpu"
    placed = {k: to_torch(x).to(device) for k, x in given.items() if k != "eps"}
    stream = TorchStream(placed.pop("rows"))
    got = torch_added_norm.kernel_added_norm(torch_ops.KERNELS, **placed, eps=EPS, stream=stream)
    want = LANGUAGES["triton"]().added_norm(given)
    found = (got.rows, got.scaled, got.squares)
    check_equal([x.float().cpu().numpy() for x in found], want)
    np.testing.assert_array_equal(got.norm.cpu(), given["norm"])
    assert not got.is_share


@pytest.mark.parametrize("has_norm", [False, True])
def test_jax_op_is_one_kernel(has_norm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs for a CPU have none, and a result of the same structure."""
    bind_kernels(monkeypatch, jax_ops, KERNELS["pallas"])
    given = made(Kind(PARTIAL, has_scalar=True, has_norm=has_norm), R=3)

    def call(x: jax.Array, rows: jax.Array, stacks: dict[str, jax.Array]) -> JaxStream:
        scales = {name: Scale(stack, LAYER) for name, stack in stacks.items()}
        norm = scales.get("norm")
        return jax_added_norm.added_norm(
            x, scales["end_norm"], EPS, JaxStream(rows), scales["scalar"], norm
        )

    stacks = {x: in_stack(given[x]) for x in ("end_norm", "scalar", "norm")[: 2 + has_norm]}
    traced = jax.jit(call).trace(given["x"], given["rows"], stacks)
    for platform, count in (("cuda", 1), ("cpu", 0)):
        lowered = traced.lower(lowering_platforms=(platform,))
        assert lowered.as_text().count("xla.gpu.triton") == count
    if INTERPRET:
        got = jax.jit(call)(given["x"], given["rows"], stacks)
        assert (got.scaled is not None, got.squares is not None) == (has_norm, has_norm)
        arguments = {k: given[k] for k in ("end_norm", "eps", "scalar", "norm")}
        stream = NormedStream(given["rows"].astype(np.float32))
        want = added_norm(given["x"].astype(np.float32), stream=stream, **arguments)
        # Rounded to bfloat16 three times.
        np.testing.assert_allclose(got.rows.astype(np.float32), want.rows, rtol=2**-6, atol=2**-6)
