"""Kernels of the convolutions of a DFlash2 head: on a GPU, or interpreted."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import jax_impl.ops.gemm.convolution
import torch_impl.ops.gemm.convolution
from shared.spec import layers
from shared.spec.reduction_order import SQUARES
from tests.support.cases.gemm.convolution import LARGE, MADE, ODD
from tests.support.kernels import (
    AS_WRITTEN,
    INTERPRET,
    KERNELS,
    ON_GPU,
    bind_kernels,
    share_arithmetic,
)
from tests.support.op_case import Arguments, as_list

pytestmark = pytest.mark.usefixtures("interpreted")

SIZES = {"odd": ODD} | ({"of a head": LARGE | {"R": 64}} if ON_GPU else {})
each_case = pytest.mark.parametrize(("function", "sizes"), [(f, s) for f in MADE for s in SIZES])


def arguments_of(function: str, sizes: str) -> Arguments:
    """In bfloat16, but for the scale of the norm."""
    made = MADE[function](0, **SIZES[sizes])
    arrays = {name: torch.from_numpy(x) for name, x in made.items() if isinstance(x, np.ndarray)}
    return made | {name: x if name == "norm" else x.bfloat16() for name, x in arrays.items()}


def in_torch(call: Callable[..., Any], given: Arguments) -> list[np.ndarray]:
    device = "cuda" if ON_GPU else "cpu"
    arrays = {name: x.to(device) for name, x in given.items() if isinstance(x, torch.Tensor)}
    return [x.float().cpu().numpy() for x in as_list(call(**given | arrays))]


def for_jax(given: Arguments) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """The arrays, and the numbers that a program is made for."""
    arrays = {
        name: jnp.asarray(x.float().numpy(), None if name == "norm" else jnp.bfloat16)
        for name, x in given.items()
        if isinstance(x, torch.Tensor)
    }
    return arrays, {name: x for name, x in given.items() if name not in arrays}


def in_pallas(function: str, given: Arguments) -> list[np.ndarray]:
    call = partial(getattr(KERNELS["pallas"]["convolution"], function), interpret=INTERPRET)
    arrays, numbers = for_jax(given)
    if function == "behind":  # the scale is the second of a stack
        norm = arrays.pop("norm")
        arrays |= {"norms": jnp.stack([norm * jnp.nan, norm]), "layer": jnp.int32(1)}
        numbers |= {"order": SQUARES}
    program = jax.jit(partial(call, **numbers), compiler_options=AS_WRITTEN)
    return [np.asarray(x.astype(jnp.float32)) for x in as_list(program(**arrays))]


def run(language: str, function: str, given: Arguments) -> list[np.ndarray]:
    """Returns the result of a kernel; for `behind`, the residual stream and its norm."""
    if language == "pallas":
        return in_pallas(function, given)
    order = {"order": SQUARES} if function == "behind" else {}
    return in_torch(getattr(KERNELS["triton"]["convolution"], function), given | order)


@each_case
def test_convolution_kernels_bitwise_equal(function: str, sizes: str, monkeypatch):
    share_arithmetic(monkeypatch)
    given = arguments_of(function, sizes)
    want = in_torch(getattr(torch_impl.ops.gemm.convolution, f"plain_{function}"), given)[0]
    found = [run(language, function, given) for language in KERNELS]
    for got in found:
        np.testing.assert_array_equal(got[0], want)
    for normed in [got[1] for got in found if function == "behind"]:
        np.testing.assert_array_equal(normed, found[0][1])
        wanted = layers.rms_norm(want, given["norm"].numpy(), given["eps"])
        np.testing.assert_allclose(normed, wanted, rtol=2**-8)  # rounded to bfloat16 once


@pytest.mark.parametrize("function", MADE)
def test_jax_convolution_kernel_lowered_for_gpu_only(function: str, monkeypatch) -> None:
    bind_kernels(monkeypatch, jax_impl.ops, KERNELS["pallas"])
    call = getattr(jax_impl.ops.gemm.convolution, function)
    given = arguments_of(function, "odd")
    arrays, numbers = for_jax(given)
    by_place = [{**numbers, **arrays}[name] for name in given]  # as operations are called
    places = [place for place, name in enumerate(given) if name in numbers]
    traced = jax.jit(call, static_argnums=places).trace(*by_place)
    launched = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text().count("xla.gpu.triton")
        for platform in ("cpu", "cuda")
    }
    assert launched == {"cpu": 0, "cuda": 1}


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize("function", MADE)
def test_torch_convolution_operation_bitwise_equal(function: str, monkeypatch) -> None:
    bind_kernels(monkeypatch, torch_impl.ops, KERNELS["triton"])
    given = arguments_of(function, "odd")
    call = getattr(torch_impl.ops.gemm.convolution, f"kernel_{function}")
    got = in_torch(partial(call, torch_impl.ops.KERNELS), given)
    for x, want in zip(got, run("triton", function, given), strict=True):
        np.testing.assert_array_equal(x, want)
