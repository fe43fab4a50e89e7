"""Kernels of norms, RoPE and cache write of latent attention: on a GPU, or interpreted."""

import numpy as np
import pytest

from shared.spec import attention
from shared.spec import latent_attention as spec
from shared.spec.attention_layer import Angles
from shared.spec.linear import Matrix
from tests.support.kernels import KERNELS, ON_GPU, in_languages, share_arithmetic
from tests.support.latent_kernels import (
    LAYER,
    SIZES,
    LatentSizes,
    from_torch_kernel,
    launches,
    row_arguments,
    run,
)
from tests.support.op_case import Arguments, OpCase, table

pytestmark = pytest.mark.usefixtures("interpreted")

SMALL = [case for case in table("latent_rows") if not case.is_large]
each_language = pytest.mark.parametrize("language", KERNELS)
each_size = pytest.mark.parametrize("name", SIZES)
# Of Pallas one size, as a kernel is compiled for each call.
each_call = pytest.mark.parametrize(("language", "name"), in_languages(SIZES, ["odd"]))
PER_ROW = ("projected", "cos", "sin", "request", "places", "is_real")


def specified(
    sizes: LatentSizes, given: Arguments, is_interleaved: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the query latents, or query heads, and the pools after the writes."""
    kv_b = Matrix.plain(np.zeros((1, 1), np.float32))
    weights = spec.LatentWeights(given["latent_norm"], given["query_norm"], None, kv_b)
    angles = Angles(given["cos"], given["sin"])
    queries, rows = spec.latent_rows(
        given["projected"], sizes.config(is_interleaved), weights, angles
    )
    pools = given["pools"].copy()
    pools[LAYER, 0] = attention.write(
        pools[LAYER, 0],
        given["page_table"],
        given["request"],
        given["places"],
        given["is_real"],
        rows[:, None],
    )
    pools[LAYER, 0, 0] = given["pools"][LAYER, 0, 0]  # kernels do not write padding
    return queries, pools


def checked(sizes: LatentSizes, found: list[np.ndarray]) -> tuple[np.ndarray | None, np.ndarray]:
    """Returns the query latents, if there are any, and the pools."""
    assert len(found) == 2 if sizes.query_rank else 1
    return (found[0] if sizes.query_rank else None), found[-1]


@each_language
@each_size
@pytest.mark.parametrize("is_interleaved", [True, False], ids=["pairs", "halves"])
def test_latent_rows_match_spec(is_interleaved: bool, name: str, language: str) -> None:
    sizes = SIZES[name]
    given = row_arguments(sizes, 9)
    queries, pools = checked(
        sizes, run(language, "latent_rows", given, "float32", is_interleaved=is_interleaved)
    )
    want, wanted_pools = specified(sizes, given, is_interleaved)
    np.testing.assert_allclose(pools, wanted_pools, rtol=1e-5, atol=1e-5)
    if queries is not None:
        np.testing.assert_allclose(queries, want, rtol=1e-5, atol=1e-5)


@each_size
def test_latent_rows_bits_equal_in_languages(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    share_arithmetic(monkeypatch)
    given = row_arguments(SIZES[name], 300 if ON_GPU else 9)
    found = [run(each, "latent_rows", given, "bfloat16", is_interleaved=True) for each in KERNELS]
    for got in found:
        for one, other in zip(got, found[0], strict=True):
            np.testing.assert_array_equal(one, other)
    _, want = specified(SIZES[name], given, True)
    np.testing.assert_allclose(found[0][-1], want, rtol=2**-7, atol=1e-6)  # rounded once


@each_call
def test_latent_rows_bits_independent_of_batch(
    name: str, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_arithmetic(monkeypatch)
    sizes, given = SIZES[name], row_arguments(SIZES[name], 9)
    queries, pools = checked(
        sizes, run(language, "latent_rows", given, "bfloat16", is_interleaved=True)
    )
    for row in (0, 5):
        part = given | {each: given[each][row : row + 1].copy() for each in PER_ROW}
        alone, own = checked(
            sizes, run(language, "latent_rows", part, "bfloat16", is_interleaved=True)
        )
        page = given["page_table"][row % 2, given["places"][row] // 4]
        at = (LAYER, 0, page, given["places"][row] % 4)
        np.testing.assert_array_equal(own[at], pools[at])
        if queries is not None and alone is not None:
            np.testing.assert_array_equal(alone[0], queries[row])


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_jax_latent_rows_lowered_for_gpu_only(case: OpCase, monkeypatch) -> None:
    assert launches(case, monkeypatch) == {"cpu": 0, "cuda": 1}


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_torch_latent_rows_operation_matches_spec(case: OpCase, monkeypatch) -> None:
    arguments = case.arguments(seed=0)
    queries, pools = from_torch_kernel(case, monkeypatch)
    rows, layer = arguments["rows"], arguments["layer"]
    wanted, cached = spec.latent_rows(
        arguments["inputs"], arguments["config"], arguments["weights"], arguments["angles"]
    )
    np.testing.assert_allclose(queries, wanted, rtol=1e-5, atol=1e-5)
    want = attention.write(
        arguments["pools"][layer, 0],
        rows.page_table,
        rows.request,
        rows.places,
        rows.is_real,
        cached[:, None],
    )
    np.testing.assert_allclose(pools[layer, 0], want, rtol=1e-5, atol=1e-5)
    assert not pools[1 - layer].any()
