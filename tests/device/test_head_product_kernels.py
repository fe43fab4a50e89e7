"""Kernels of the products per head of latent attention: on a GPU, or interpreted."""

from dataclasses import replace

import numpy as np
import pytest

from shared.spec import latent_attention as spec
from shared.spec.attention_layer import Angles
from shared.spec.linear import Matrix
from tests.support.cases.gemm.head_product import row_adapters
from tests.support.cases.gemm.lora import in_turn
from tests.support.kernels import KERNELS, ON_GPU, in_languages, share_arithmetic
from tests.support.latent_kernels import (
    SIZES,
    LatentSizes,
    from_torch_kernel,
    launches,
    product_tiles,
    query_arguments,
    run,
    value_arguments,
)
from tests.support.op_case import TOLERANCE, Arguments, OpCase, table

pytestmark = pytest.mark.usefixtures("interpreted")

SMALL = [case for case in table("head_product") if not case.is_large]
each_language = pytest.mark.parametrize("language", KERNELS)
each_size = pytest.mark.parametrize("name", SIZES)
# Of Pallas one size, as a kernel is compiled for each call.
each_call = pytest.mark.parametrize(("language", "name"), in_languages(SIZES, ["odd"]))
ARGUMENTS = {"latent_queries": query_arguments, "value_heads": value_arguments}
each_function = pytest.mark.parametrize("function", ARGUMENTS)
INTERLEAVED = {"latent_queries": {"is_interleaved": True}, "value_heads": {}}
OTHER_TILES = [{"rows": 32, "columns": 16}, {"columns": 64}]
if ON_GPU:
    OTHER_TILES += [
        {"columns": 128, "depth": 16},
        {"depth": 128, "stages": 4},
        {"rows": 64, "columns": 128, "depth": 64, "stages": 3},
        {"rows": 128, "columns": 128, "depth": 64, "warps": 8},
    ]


def specified(function: str, sizes: LatentSizes, given: Arguments, **how: bool) -> np.ndarray:
    kv_b = replace(Matrix.plain(given["kv_b"].reshape(-1, sizes.rank)), lora=given.get("lora"))
    if function == "value_heads":
        return spec.value_heads(given["x"], sizes.config(), kv_b)
    q = given["q"][:, : sizes.heads * (sizes.nope + sizes.rope)]
    angles = Angles(given["cos"], given["sin"])
    return spec.latent_queries(q, sizes.config(**how), kv_b, angles)


def head_slice(
    function: str, sizes: LatentSizes, given: Arguments, part: slice
) -> tuple[LatentSizes, Arguments]:
    """Returns the sizes and arguments of a TP rank with some of the heads."""
    kv_b = given["kv_b"][part].copy()
    if function == "value_heads":
        heads = {"x": given["x"][:, part].copy()}
    else:
        size = sizes.nope + sizes.rope
        heads = {"q": given["q"][:, part.start * size : part.stop * size].copy()}
    return sizes._replace(heads=len(kv_b)), given | heads | {"kv_b": kv_b}


@each_language
@each_size
@pytest.mark.parametrize("is_interleaved", [True, False], ids=["pairs", "halves"])
def test_latent_queries_match_spec(is_interleaved: bool, name: str, language: str) -> None:
    sizes, how = SIZES[name], {"is_interleaved": is_interleaved}
    given = query_arguments(sizes, 19)
    (got,) = run(language, "latent_queries", given, "float32", tiles=product_tiles(), **how)
    want = specified("latent_queries", sizes, given, **how)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@each_language
@each_size
def test_value_heads_match_spec(name: str, language: str) -> None:
    given = value_arguments(SIZES[name], 19)
    (got,) = run(language, "value_heads", given, "float32", tiles=product_tiles())
    want = specified("value_heads", SIZES[name], given)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@each_function
@each_size
def test_head_product_bits_equal_in_languages(
    name: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_arithmetic(monkeypatch)
    given, how = ARGUMENTS[function](SIZES[name], 21), INTERLEAVED[function]
    found = [
        run(each, function, given, "bfloat16", tiles=product_tiles(), **how) for each in KERNELS
    ]
    for got in found:
        np.testing.assert_array_equal(got[0], found[0][0])
    want = specified(function, SIZES[name], given, **how)
    np.testing.assert_allclose(found[0][0], want, rtol=2**-7, atol=2e-2)  # rounded once


@each_call
@each_function
def test_head_product_bits_independent_of_tiles(
    name: str, function: str, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_arithmetic(monkeypatch)
    given, how = ARGUMENTS[function](SIZES[name], 150 if ON_GPU else 21), INTERLEAVED[function]
    (want,) = run(language, function, given, "bfloat16", tiles=product_tiles(), **how)
    for changed in OTHER_TILES:
        (got,) = run(language, function, given, "bfloat16", tiles=product_tiles(**changed), **how)
        np.testing.assert_array_equal(got, want, err_msg=str(changed))


@each_call
@each_function
def test_head_product_bits_independent_of_rows_and_heads(
    name: str, function: str, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_arithmetic(monkeypatch)
    sizes, how = SIZES[name], INTERLEAVED[function] | {"tiles": product_tiles(rows=64)}
    given = ARGUMENTS[function](sizes, 37)
    (want,) = run(language, function, given, "bfloat16", **how)
    of_rows = {"q", "x", "cos", "sin"} & given.keys()
    for rows in (slice(0, 1), slice(20, 37)):
        part = given | {each: given[each][rows].copy() for each in of_rows}
        (got,) = run(language, function, part, "bfloat16", **how)
        np.testing.assert_array_equal(got, want[rows])
    heads = slice(1, sizes.heads)
    _, part = head_slice(function, sizes, given, heads)
    (got,) = run(language, function, part, "bfloat16", **how)
    np.testing.assert_array_equal(got, want[:, heads])


@each_call
@each_function
@pytest.mark.parametrize("rank", [16, pytest.param(48, marks=pytest.mark.matrix)])
def test_adapted_head_product_matches_spec(
    rank: int, name: str, function: str, language: str
) -> None:
    sizes, how = SIZES[name], INTERLEAVED[function]
    given = ARGUMENTS[function](sizes, 19)
    slots = in_turn(19, 3)
    given |= {"lora": row_adapters(sizes.config(), slots, num=3, rank=rank)}
    (got,) = run(language, function, given, "float32", tiles=product_tiles(), **how)
    want = specified(function, sizes, given, **how)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)  # order of the sums
    lora = given["lora"]
    turned = given | {"lora": replace(lora, slots=np.roll(lora.slots, 1))}
    changed = np.abs(specified(function, sizes, turned, **how) - want).max(axis=(1, 2))
    assert changed[lora.slots != turned["lora"].slots].min() > 0.1


@each_function
@each_size
def test_adapted_head_product_bits_equal_in_languages(
    name: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_arithmetic(monkeypatch)
    given, how = ARGUMENTS[function](SIZES[name], 21), INTERLEAVED[function]
    config, slots = SIZES[name].config(), in_turn(21, 3)
    given |= {"lora": row_adapters(config, slots, num=3, rank=16)}
    (want,), *others = (
        run(each, function, given, "bfloat16", tiles=product_tiles(**changed), **how)
        for each in KERNELS
        for changed in ({}, *(OTHER_TILES if each == "triton" or ON_GPU else ()))
    )
    for (got,) in others:
        np.testing.assert_array_equal(got, want)


@each_call
@each_function
def test_adapted_head_product_rows_ignore_neighbours(
    name: str, function: str, language: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neighbours have a broken adapter; rows without one keep the plain bits."""
    share_arithmetic(monkeypatch)
    sizes, how = SIZES[name], INTERLEAVED[function] | {"tiles": product_tiles(rows=64)}
    given, broken = ARGUMENTS[function](sizes, 21), 2
    lora = row_adapters(sizes.config(), in_turn(21, 3), num=3, rank=16)
    b = lora.weights.b.copy()
    b[broken - 1] *= 1e30
    b[broken - 1, :, 0] = np.nan
    many = given | {"lora": replace(lora, weights=replace(lora.weights, b=b))}
    (got,) = run(language, function, many, "bfloat16", **how)
    (plain,) = run(language, function, given, "bfloat16", **how)
    np.testing.assert_array_equal(got[lora.slots == 0], plain[lora.slots == 0])
    assert np.isnan(got[lora.slots == broken]).any(axis=(1, 2)).all()
    for row in (0, 2, 3):
        at = slice(row, row + 1)
        alone = given | {"lora": replace(lora, slots=lora.slots[at])}
        alone |= {each: given[each][at].copy() for each in {"q", "x", "cos", "sin"} & given.keys()}
        (one,) = run(language, function, alone, "bfloat16", **how)
        assert lora.slots[row] != broken
        np.testing.assert_array_equal(one[0], got[row])
        assert (one[0] != plain[row]).any() == (lora.slots[row] > 0)


@each_language
def test_value_heads_do_not_read_other_rows(language: str) -> None:
    """A NaN in one row, and in the query weights of a head, reaches no other row."""
    given = value_arguments(SIZES["odd"], 5)
    given["kv_b"][:, : SIZES["odd"].nope] = np.nan
    given["x"][2] = np.nan
    (got,) = run(language, "value_heads", given, "float32", tiles=product_tiles())
    assert np.isnan(got[2]).all()
    assert np.isfinite(np.delete(got, 2, axis=0)).all()


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_jax_head_product_lowered_for_gpu_only(case: OpCase, monkeypatch) -> None:
    assert launches(case, monkeypatch) == {"cpu": 0, "cuda": 1}


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_torch_head_product_operation_matches_spec(case: OpCase, monkeypatch) -> None:
    got = from_torch_kernel(case, monkeypatch)
    assert max(case.errors(case.arguments(seed=0), got)) <= TOLERANCE["float32"]
