"""Ranking kernels with columns per request: on a GPU, or interpreted."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch

import jax_impl.ops.sampling.sampling
import torch_impl.ops.sampling.sampling
from jax_impl import ops as jax_ops
from jax_impl.ops.sampling import candidate_lists as jax_lists
from shared.spec import candidate_lists as spec
from tests.support.cases.sampling.candidate_lists import TABLE
from tests.support.implementations import to_jax, to_torch
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS, bind_kernels, in_languages
from tests.support.op_records import mapped
from torch_impl import ops as torch_ops
from torch_impl.ops.sampling import candidate_lists as torch_lists

pytestmark = pytest.mark.usefixtures("interpreted")

CASES = {case.name: case for case in TABLE if not case.is_large}


def run_triton(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> list[np.ndarray]:
    bind_kernels(monkeypatch, torch_ops, KERNELS["triton"])
    device = torch.device("cuda" if ON_GPU else "cpu")

    def leaf(x: Any) -> Any:
        return to_torch(x).to(device) if isinstance(x, np.ndarray) else x

    given = {k: mapped(v, leaf, torch_impl.ops.sampling.sampling) for k, v in arguments.items()}
    kernels = torch_ops.KERNELS
    assert kernels is not None
    return [x.cpu().numpy() for x in torch_lists.kernel_rank(kernels, **given)]


def run_pallas(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> list[np.ndarray]:
    bind_kernels(monkeypatch, jax_ops, KERNELS["pallas"])
    kernels = jax_ops.KERNELS
    assert kernels is not None
    if INTERPRET:
        ranking = KERNELS["pallas"]["sampling"]
        interpreted = type("Interpreted", (), {"rank": partial(ranking.rank, interpret=True)})
        kernels = replace(kernels, sampling=interpreted)
    given = {k: mapped(v, to_jax, jax_impl.ops.sampling.sampling) for k, v in arguments.items()}
    width = given.pop("width")
    call = partial(jax_lists.kernel_rank, kernels, width=width)
    found = jax.jit(lambda given: call(**given), compiler_options=OPTIONS)(given)
    return [np.asarray(x) for x in found]


RUNS = {"triton": run_triton, "pallas": run_pallas}


@pytest.mark.parametrize(("language", "name"), in_languages(CASES, ("4 of 16",)))
def test_candidate_lists_kernels_match_spec(
    name: str, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = CASES[name].arguments(6)
    ids, weights = RUNS[language](monkeypatch, arguments)
    want, want_weights = spec.rank(**arguments)
    is_possible = want_weights > -np.inf
    np.testing.assert_array_equal(weights > -np.inf, is_possible)
    np.testing.assert_array_equal(ids[is_possible], want[is_possible])
    np.testing.assert_allclose(
        weights[is_possible], want_weights[is_possible], rtol=2e-5, atol=2e-5
    )


@pytest.mark.skipif(not ON_GPU, reason="interpreted exponentials are those of two libraries")
@pytest.mark.parametrize("name", CASES)
def test_candidate_lists_bits_equal_in_languages(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = CASES[name].arguments(7)
    triton, pallas = (RUNS[language](monkeypatch, arguments) for language in ("triton", "pallas"))
    for one, other in zip(triton, pallas, strict=True):
        np.testing.assert_array_equal(one.view(np.int32), other.view(np.int32))
