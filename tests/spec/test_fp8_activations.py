"""FP8 activations: quantisation of rows, and products."""

import ml_dtypes
import numpy as np
import pytest

from shared.models.formats import fp8
from shared.spec import fp8_activations as spec
from shared.spec.fp8_activations import Quantised
from tests.support.implementations import Implementation, each_implementation

WIDTHS = (64, 128, 256, 300)


def rows(width: int, count: int = 9) -> np.ndarray:
    """Rows of very different magnitudes, with zeros and with different columns."""
    rng = np.random.default_rng(width)
    sizes = np.exp(3 * rng.normal(size=(count, 1)) + 2 * rng.normal(size=width))
    drawn = (rng.normal(size=(count, width)) * sizes).astype(np.float32)
    drawn[2, :64] = 0
    drawn[3] = 0
    return drawn


def numbers(x: Quantised) -> np.ndarray:
    across = np.repeat(x.scales, fp8.BLOCK, axis=1)[:, : x.codes.shape[1]]
    return fp8.VALUES[x.codes].astype(np.float64) * across


def given(x: Quantised) -> Quantised:
    """Converts to the types of the backends."""
    return Quantised(x.codes.view(ml_dtypes.float8_e4m3fn), x.scales)


@pytest.mark.parametrize("width", WIDTHS)
def test_quantised_block_maximum_is_largest_code(width: int) -> None:
    x = rows(width)
    got = spec.quantised(x)
    for first in range(0, width, fp8.BLOCK):
        block, codes = (each[:, first : first + fp8.BLOCK] for each in (x, got.codes))
        largest = np.abs(fp8.VALUES[codes]).max(axis=1)
        want = np.where(np.abs(block).max(axis=1) > 0, fp8.LARGEST, 0)
        np.testing.assert_array_equal(largest, want)
    assert (got.scales > 0).all()


def test_quantised_rounds_to_nearest_even() -> None:
    x = np.zeros((1, 128), np.float32)
    x[0, 0], x[0, 1:256:2] = fp8.LARGEST, np.linspace(-448, 448, 64)
    x[0, 2:10:2] = 17, 19, 2.0**-10, 3 * 2.0**-10  # halfway: 16 or 18, 18 or 20, 0 or 2^-9, ..
    got = spec.quantised(x)
    np.testing.assert_array_equal(got.scales, 1)
    values = fp8.VALUES[got.codes[0]]
    np.testing.assert_array_equal(values[2:10:2], [16, 20, 0, 2.0**-8])
    finite = fp8.VALUES[np.isfinite(fp8.VALUES)].astype(np.float64)
    nearest = np.abs(finite - x[0, :, None]).min(axis=1)
    np.testing.assert_array_equal(np.abs(values - x[0].astype(np.float64)), nearest)


@each_implementation
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
def test_quantised_matches_spec(width: int, kind: type, implementation: Implementation) -> None:
    x = rows(width).astype(kind)
    want, got = spec.quantised(x), implementation("fp8_activations").quantised(x)
    np.testing.assert_array_equal(got.codes, fp8.VALUES[want.codes])
    np.testing.assert_array_equal(got.scales, want.scales)


@each_implementation
def test_nonfinite_row_spoils_only_own_product(
    implementation: Implementation,
) -> None:
    x = rows(256, 4)
    x[0, 3], x[1, 200] = np.nan, np.inf
    ops, weight = implementation("fp8_activations"), spec.quantised(rows(256, 5) + 1)
    codes = ops.quantised(x)
    theirs = Quantised(codes.codes.astype(ml_dtypes.float8_e4m3fn), codes.scales)
    products = (spec.product(spec.quantised(x), *weight), ops.product(theirs, *given(weight)))
    for got in products:
        assert np.isnan(got[:2]).all()
        assert np.isfinite(got[2:]).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_product_equals_product_of_dequantised_values(width: int) -> None:
    x, weight = spec.quantised(rows(width)), spec.quantised(rows(width, 7))
    want = numbers(x) @ numbers(weight).T
    size = np.abs(numbers(x)) @ np.abs(numbers(weight)).T
    # Float32: at most 300 terms are added.
    assert (np.abs(spec.product(x, *weight) - want) <= 1e-5 * size).all()


@each_implementation
@pytest.mark.parametrize("width", WIDTHS)
def test_product_matches_spec(width: int, implementation: Implementation) -> None:
    x, weight = spec.quantised(rows(width)), spec.quantised(rows(width, 7))
    got = implementation("fp8_activations").product(given(x), *given(weight))
    want = spec.product(x, *weight)
    size = np.abs(numbers(x)) @ np.abs(numbers(weight)).T
    # As above; the backends apply scales before the sums.
    assert (np.abs(got - want) <= 1e-5 * size).all()
