"""Accumulation of rows with adapters: independent of other rows, and equal to merged weights."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shared.spec import linear
from shared.spec.linear import Matrix, NormedStream
from shared.spec.lora import AdapterWeights, RowAdapters, adapted, expand, shrink
from tests.support.implementations import Implementation, each_implementation

SLOTS, RANK, INPUTS, PARTS = 3, 4, 12, (6, 3, 3)
OUTPUTS, RANKS = sum(PARTS), RANK * len(PARTS)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def adapters(seed: int = 0) -> AdapterWeights:
    """Random adapters; those of slot 2 are huge."""
    a, b = normal(seed, SLOTS, RANKS, INPUTS), normal(seed + 1, SLOTS, OUTPUTS, RANK)
    a[1] *= 1e9
    b[1] *= 1e9
    scales = np.full((SLOTS, RANKS), 0.5, np.float32)
    factors = 1 + normal(seed + 2, SLOTS, OUTPUTS) ** 2
    factors[0] = 1
    return AdapterWeights(a, b, scales, factors, PARTS)


X = normal(10, 9, INPUTS)
WEIGHT = Matrix.plain(normal(11, OUTPUTS, INPUTS))
ROWS = np.array([0, 1, 2, 3, 3, 2, 1, 0, 2])


def multiplied(x: np.ndarray, slots: np.ndarray, weights: AdapterWeights) -> np.ndarray:
    return linear.product(x, replace(WEIGHT, lora=RowAdapters(weights, slots)))


def delta(weights: AdapterWeights, slot: int) -> np.ndarray:
    """The block-diagonal product `B s A` of an adapter."""
    a = weights.a[slot - 1] * weights.scales[slot - 1][:, None]
    ends = np.cumsum(PARTS)
    blocks = zip(np.split(weights.b[slot - 1], ends[:-1]), np.split(a, len(PARTS)), strict=True)
    return np.concatenate([b @ own for b, own in blocks])


@pytest.mark.parametrize("slot", [1, 3])
def test_adapted_product_equals_merged_weight(slot: int):
    weights = adapters()
    got = multiplied(X, np.full(len(X), slot), weights)
    merged = (WEIGHT.values + delta(weights, slot)) * weights.factors[slot - 1][:, None]
    np.testing.assert_allclose(got, X @ merged.T, rtol=1e-5, atol=1e-4)  # order of the sums


def test_adapted_row_ignores_neighbours():
    """Each row has the bits that it has next to other rows with other, huge or broken adapters."""
    weights = adapters()
    got = multiplied(X, ROWS, weights)
    b = weights.b.copy()
    b[1] = np.nan
    for row in range(len(X)):
        if ROWS[row] == 2:
            continue
        slots = np.full(len(X), 2)
        slots[row] = ROWS[row]
        alone = multiplied(X, slots, replace(weights, b=b))[row]
        assert alone.tobytes() == got[row].tobytes()


def test_row_without_adapter_keeps_plain_bits():
    acc = normal(12, 4, OUTPUTS)
    acc[0, :2] = -0.0, np.nan
    slots = np.array([0, 0, 1, 0])
    got = adapted(acc, X[:4], RowAdapters(adapters(), slots))
    assert got[slots == 0].tobytes() == acc[slots == 0].tobytes()
    assert got[2].tobytes() != acc[2].tobytes()


def test_accumulation_continues_input_by_input():
    """The adapter's inputs are added to the accumulator one by one, not as a separate sum."""
    weights = adapters()
    b = np.full(weights.b.shape, 2**-24, np.float32)
    acc, a = np.ones((1, OUTPUTS), np.float32), np.ones((1, RANKS), np.float32)
    got = expand(acc, a, replace(weights, b=b), 1)
    assert (got == 1).all()  # each addend is half an ulp; their sum is two


def test_zero_padded_rank_keeps_bits():
    weights = adapters()
    a = np.zeros((SLOTS, len(PARTS), RANK + 3, INPUTS), np.float32)
    a[:, :, :RANK] = weights.a.reshape(SLOTS, len(PARTS), RANK, INPUTS)
    b = np.zeros((SLOTS, OUTPUTS, RANK + 3), np.float32)
    b[:, :, :RANK] = weights.b
    scales = np.full((SLOTS, len(PARTS) * (RANK + 3)), 0.5, np.float32)
    padded = replace(weights, a=a.reshape(SLOTS, -1, INPUTS), b=b, scales=scales)
    np.testing.assert_array_equal(multiplied(X, ROWS, padded), multiplied(X, ROWS, weights))


def test_shrink_rounds_scaled_sums_to_row_dtype():
    weights = replace(adapters(), scales=np.full((SLOTS, RANKS), 0.3, np.float32))
    x = X.astype(np.float16)
    got = shrink(x, weights, 1)
    assert got.dtype == np.float16
    want = (x @ weights.a[0].T * np.float32(0.3)).astype(np.float16)
    np.testing.assert_array_equal(got, want)


def test_adapter_precedes_bias():
    bias = normal(13, OUTPUTS)
    weights, slots = adapters(), np.full(len(X), 3)
    operand = RowAdapters(weights, slots)
    got = linear.product(X, replace(WEIGHT, bias=bias, lora=operand))
    np.testing.assert_array_equal(got, multiplied(X, slots, weights) + bias)


def test_adapters_of_layer_are_selected():
    layers = [adapters(0), adapters(20)]
    arrays = {name: np.stack([getattr(x, name) for x in layers], 1) for name in ("a", "b")}
    arrays |= {x: np.stack([getattr(y, x) for y in layers], 1) for x in ("scales", "factors")}
    stack = RowAdapters(AdapterWeights(**arrays, parts=PARTS), ROWS)
    whole = Matrix.plain(np.stack([WEIGHT.values, 2 * WEIGHT.values]))
    got = linear.product(X, replace(whole, lora=stack).at(1))
    want = linear.product(
        X, replace(Matrix.plain(2 * WEIGHT.values), lora=RowAdapters(layers[1], ROWS))
    )
    np.testing.assert_array_equal(got, want)


NORM = 1 + normal(14, INPUTS) / 4
STREAM = linear.stream(X, NORM)
BACK = NormedStream(normal(15, len(X), OUTPUTS), None)


OPERATIONS: dict[str, Callable[[Any, Matrix], Any]] = {
    "product": lambda ops, weight: ops.product(X, weight),
    "product_float32": lambda ops, weight: ops.product_float32(X, weight, 0.5),
    "rmsnorm_linear": lambda ops, weight: ops.rmsnorm_linear(STREAM, 1e-6, weight),
    "linear_add": lambda ops, weight: ops.linear_add(X, weight, BACK, 0.5),
    "residual_product": lambda ops, weight: ops.residual_product(X, weight),
    "act_and_mul_linear": lambda ops, weight: ops.act_and_mul_linear(STREAM, 1e-6, weight),
}


def rows(result: np.ndarray | NormedStream) -> np.ndarray:
    return result.rows if isinstance(result, NormedStream) else result


@pytest.mark.parametrize("name", OPERATIONS)
@each_implementation
def test_products_with_adapters_match_spec(name: str, implementation: Implementation) -> None:
    biased = replace(WEIGHT, bias=normal(16, OUTPUTS), lora=RowAdapters(adapters(), ROWS))
    got = rows(OPERATIONS[name](implementation("linear"), biased))
    want = rows(OPERATIONS[name](linear, biased))
    is_finite = ROWS != 2
    assert np.isfinite(want[is_finite]).all()
    # Float32 on both sides: only the order of the sums differs.
    np.testing.assert_allclose(got[is_finite], want[is_finite], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@each_implementation
def test_product_rows_ignore_neighbours(dtype: Any, implementation: Implementation) -> None:
    """Rows keep their bits next to NaN adapters; those without one keep the plain product's."""
    weights, x = adapters(), X.astype(dtype)
    weight = Matrix.plain(WEIGHT.values.astype(dtype), bias=normal(16, OUTPUTS).astype(dtype))
    weights = replace(weights, a=weights.a.astype(dtype), b=weights.b.astype(dtype))
    broken = weights.b.copy()
    broken[1] = np.nan
    product = implementation("linear").product
    plain = product(x, weight)
    got = product(x, replace(weight, lora=RowAdapters(weights, ROWS)))
    alone = replace(weights, b=broken)
    for row in np.flatnonzero(ROWS != 2):
        slots = np.full(len(X), 2)
        slots[row] = ROWS[row]
        one = product(x, replace(weight, lora=RowAdapters(alone, slots)))
        assert one[row].tobytes() == got[row].tobytes()
        assert np.isnan(one[slots == 2]).any()
        is_plain = got[row].tobytes() == plain[row].tobytes()
        assert is_plain == (ROWS[row] == 0)
