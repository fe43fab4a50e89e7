"""The kernels of products and norms against the specification: on a GPU for real, elsewhere
interpreted.

And that a row's bits depend neither on the rows beside it nor on the tiles.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from kernels.tiles import LinearTiles
from shared.spec import layers as spec_layers
from shared.spec import linear as spec
from shared.spec.linear import Matrix, Stream
from shared.spec.numerics import SQUARES, chunks_of_squares, sum_of_squares
from tests.support.kernels import INTERPRET, KERNELS, ON_GPU, OPTIONS

pytestmark = pytest.mark.usefixtures("interpreted")

EPS = 1e-6
each_language = pytest.mark.parametrize("language", KERNELS)
Arrays = tuple[np.ndarray, ...]


def tiles(**changed: int | bool) -> LinearTiles:
    how = {"rows": 16, "columns": 64, "depth": 64, "warps": 4, "stages": 2}
    usual = {"swapped": True, "described": False, "persistent": False}
    return LinearTiles(**(usual | how | changed))


def in_triton(function: Callable[..., Any], *arrays: np.ndarray | None, **how: Any) -> Arrays:
    """Runs a function of the Triton kernels on float32 arrays."""
    device = "cuda" if ON_GPU else "cpu"
    given = [None if x is None else torch.from_numpy(x).to(device) for x in arrays]
    found = function(*given, **how)
    found = found if isinstance(found, tuple) else (found,)
    return tuple(x.cpu().numpy() for x in found if x is not None)


def in_pallas(function: Callable[..., Any], *arrays: np.ndarray | None, **how: Any) -> Arrays:
    """Runs a function of the Pallas kernels on float32 arrays."""
    given = [None if x is None else jnp.asarray(x) for x in arrays]
    program = jax.jit(partial(function, **how, interpret=INTERPRET), compiler_options=OPTIONS)
    found = program(*given)
    found = found if isinstance(found, tuple) else (found,)
    return tuple(np.asarray(x) for x in found if x is not None)


def multiply(
    language: str,
    x: np.ndarray,
    weight: np.ndarray,
    *,
    squares: np.ndarray | None = None,
    added: np.ndarray | None = None,
    is_gated: bool = False,
    cut: LinearTiles | None = None,
    first: int = 0,
) -> Arrays:
    how = {"eps": EPS, "is_gated": is_gated, "order": SQUARES, "tiles": cut or tiles()}
    module = KERNELS[language]["linear"]
    if language == "triton":
        return in_triton(
            lambda x, weight, squares, added: module.product(
                x, weight[first:], squares=squares, added=added, out_type=torch.float32, **how
            ),
            *(x, weight, squares, added),
        )
    stack = np.stack([np.full_like(weight, np.nan), weight])
    return in_pallas(
        lambda x, stack, squares, added, interpret: module.product(
            x,
            stack,
            jnp.int32(1),
            first=first,
            squares=squares,
            added=added,
            out_type=jnp.float32,
            interpret=interpret,
            **how,
        ),
        *(x, stack, squares, added),
    )


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


SIZES = {"few rows": (3, 96, 80), "rows over": (20, 128, 128), "nothing over": (16, 64, 64)}


@each_language
@pytest.mark.parametrize("is_swapped", [False, True], ids=["plain", "swapped"])
@pytest.mark.parametrize("name", SIZES)
def test_a_product_does_what_stands_before_and_after_it(
    name: str, is_swapped: bool, language: str
) -> None:
    R, K, N = SIZES[name]
    x, weight, gates = normal(0, R, K), normal(1, N, K), normal(2, 2 * N, K)
    cut, squares = tiles(swapped=is_swapped), chunks_of_squares(x)
    (got,) = multiply(language, x, weight, cut=cut)
    np.testing.assert_allclose(got, spec.product(x, Matrix(weight)), rtol=1e-4, atol=1e-4)
    (got,) = multiply(language, x, weight, squares=squares, cut=cut)
    want = spec.normed_product(Stream(x), None, EPS, Matrix(weight))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    (got,) = multiply(language, x, gates, squares=squares, is_gated=True, cut=cut)
    want = spec.gated_product(Stream(x), None, EPS, Matrix(gates))
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-3)
    added = normal(3, R, N)
    got, sums = multiply(language, x, weight, added=added, cut=cut)
    want = spec.added_product(x, Matrix(weight), Stream(added)).rows
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(sums, chunks_of_squares(got))


@pytest.mark.skipif("triton" not in KERNELS, reason="triton is not installed")
@pytest.mark.parametrize("is_swapped", [False, True], ids=["plain", "swapped"])
@pytest.mark.parametrize("name", SIZES)
def test_blocks_that_descriptors_copy_are_the_same(name: str, is_swapped: bool) -> None:
    R, K, N = SIZES[name]
    x, weight = normal(0, R, K), normal(1, 2 * N, K)
    given = {"x": x, "weight": weight, "squares": chunks_of_squares(x), "is_gated": True}
    cuts = [
        tiles(swapped=is_swapped, described=described, persistent=persistent)
        for described, persistent in ((False, False), (True, False), (True, True))
    ]
    (want,), *others = (multiply("triton", **given, cut=cut) for cut in cuts)
    for (got,) in others:
        np.testing.assert_array_equal(got, want)


def test_pallas_refuses_descriptors() -> None:
    with pytest.raises(ValueError, match="Pallas has no tensor descriptors"):
        multiply("pallas", normal(0, 3, 64), normal(1, 64, 64), cut=tiles(described=True))


@each_language
def test_a_product_begins_at_an_output(language: str) -> None:
    x, weight = normal(0, 3, 64), normal(1, 128, 64)
    (got,) = multiply(language, x, weight, first=96)
    (whole,) = multiply(language, x, weight)
    np.testing.assert_allclose(got, whole[:, 96:], rtol=1e-5, atol=1e-4)


@each_language
def test_a_rows_bits_depend_neither_on_other_rows_nor_on_the_tiles(language: str) -> None:
    x, weight, added = normal(0, 40, 192), normal(1, 256, 192), normal(2, 40, 256)
    want = multiply(language, x, weight, added=added, cut=tiles(rows=64, depth=64))
    cuts = [tiles(), tiles(columns=128), tiles(rows=32, swapped=False, depth=32)]
    if ON_GPU:  # the interpreter's products are numpy's, which follow the shape
        for cut in cuts:
            got = multiply(language, x[:1], weight, added=added[:1], cut=cut)
            for alone, among in zip(got, want, strict=True):
                np.testing.assert_array_equal(alone[0], among[0])
    sums = [multiply(language, x, weight, added=added, cut=cut)[1] for cut in cuts]
    for found in sums:
        np.testing.assert_allclose(found, want[1], rtol=1e-4)


ROWS = {
    "an embedding's": normal(0, 4, 200) * np.float32(1e-3),
    "of a wide channel": np.concatenate([normal(1, 4, 199), np.full((4, 1), 3e4, np.float32)], 1),
    "zeros": np.zeros((2, 64), np.float32),
    "all alike": np.full((2, 256), 1.9, np.float32),
}


@pytest.mark.parametrize("name", ROWS)
def test_squares_are_summed_in_units_as_if_without_rounding(name: str) -> None:
    exact = np.square(ROWS[name].astype(np.float64)).sum(axis=1)
    np.testing.assert_allclose(sum_of_squares(ROWS[name]), exact, rtol=2e-6)
    shuffled = np.random.default_rng(0).permuted(ROWS[name][:, :64], axis=1)
    np.testing.assert_array_equal(sum_of_squares(shuffled), sum_of_squares(ROWS[name][:, :64]))


@each_language
@pytest.mark.parametrize("name", ROWS)
def test_a_norm_and_its_squares_are_those_of_the_specification(name: str, language: str) -> None:
    x = ROWS[name]
    weight = 1 + normal(3, x.shape[1]) / 4
    run = {"pallas": in_pallas, "triton": in_triton}[language]
    module = KERNELS[language]["layers"]
    (squares,) = run(module.chunks_of_squares, x, order=SQUARES)
    np.testing.assert_array_equal(squares, chunks_of_squares(x))
    (got,) = run(lambda x, weight, **how: module.rms_norm(x, weight, EPS, **how), x, weight,
                 order=SQUARES)  # fmt: skip
    np.testing.assert_allclose(got, spec_layers.rms_norm(x, weight, EPS), rtol=1e-5, atol=1e-7)
    (got,) = run(lambda x, **how: module.rms_norm(x, None, EPS, **how), x, order=SQUARES)
    np.testing.assert_allclose(got, spec_layers.rms_norm(x, None, EPS), rtol=1e-5, atol=1e-7)
