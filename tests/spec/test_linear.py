"""Fused linear operations equal the composition of their elementary operations."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from jax_impl.ops.gemm import linear as jax_linear
from shared.models.formats import fp8_w8a16
from shared.models.formats.fp8 import BLOCK, Granularity, quantize, scale_shape
from shared.spec import fp8_activations, layers, reduction_order
from shared.spec import linear as spec
from shared.spec.linear import Matrix, NormedStream
from shared.spec.lora import AdapterWeights, RowAdapters
from shared.spec.reduction_order import LinearOrder
from tests.support.implementations import Implementation, each_implementation
from tests.support.weight_formats import w8a8_matrix, w8a16_matrix
from torch_impl.ops.gemm import linear as torch_linear

EPS = 1e-6
TWINS = {name: Implementation(name)("linear") for name in ("jax", "torch")}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


NORM, NEXT = 1 + normal(2, 8) / 4, 1 + normal(9, 8) / 4
X, HIDDEN = normal(0, 5, 12), NormedStream(normal(1, 5, 8), NORM)
WIDE, BACK = Matrix.plain(normal(3, 12, 8)), Matrix.plain(normal(4, 8, 12))
GATE_UP = Matrix.plain(normal(5, 24, 8))

BIASED = Matrix.plain(BACK.values, normal(6, 8))
BIASED_GATES = Matrix.plain(GATE_UP.values, normal(7, 24))

CASES = {
    "product": (X, BACK),
    "product_float32": (X, BACK),
    "rmsnorm_linear": (HIDDEN, EPS, WIDE),
    "residual_product": (X, BACK),
    "linear_add": (X, BACK, HIDDEN),
    "act_and_mul_linear": (HIDDEN, EPS, GATE_UP),
}


ENDED = {
    "product": (X, BIASED, 3),
    "product_float32": (X, BIASED, 0.125),
    "rmsnorm_linear": (HIDDEN, EPS, Matrix.plain(WIDE.values, normal(8, 12))),
    "residual_product": (X, BIASED),
    "linear_add": (X, BIASED, HIDDEN, 0.22),
    "act_and_mul_linear": (HIDDEN, EPS, BIASED_GATES),
}
"""The same with biases, and with the factors that some take."""


def test_rmsnorm_linear_applies_norm_of_stream() -> None:
    added = spec.linear_add(X, BACK, HIDDEN, 1.0, NEXT)
    want = layers.rms_norm(added.rows, NEXT, EPS) @ WIDE.values.T
    np.testing.assert_array_equal(spec.rmsnorm_linear(added, EPS, WIDE), want)
    begun = spec.stream(HIDDEN.rows, NEXT)
    want = layers.rms_norm(HIDDEN.rows, NEXT, EPS) @ WIDE.values.T
    np.testing.assert_array_equal(spec.rmsnorm_linear(begun, EPS, WIDE), want)
    as_it_is = spec.rmsnorm_linear(begun, None, WIDE)
    np.testing.assert_array_equal(as_it_is, HIDDEN.rows @ WIDE.values.T)


def rows(result: np.ndarray | NormedStream) -> np.ndarray:
    return result.rows if isinstance(result, NormedStream) else result


def test_linear_operations_equal_composed_parts() -> None:
    normed = layers.rms_norm(HIDDEN.rows, NORM, EPS)
    gate, up = np.split(normed @ GATE_UP.values.T, 2, axis=1)
    want = {
        "product": X @ BACK.values.T,
        "product_float32": X @ BACK.values.T,
        "rmsnorm_linear": normed @ WIDE.values.T,
        "residual_product": X @ BACK.values.T,
        "linear_add": HIDDEN.rows + X @ BACK.values.T,
        "act_and_mul_linear": layers.silu(gate) * up,
    }
    assert want.keys() == CASES.keys()
    for name, case in CASES.items():
        np.testing.assert_array_equal(rows(getattr(spec, name)(*case)), want[name])


def test_gated_and_added_linear_compose_mlp() -> None:
    """The reference is Hugging Face's Llama: down(silu(gate(norm(x))) * up(norm(x))) + x."""
    normed = layers.rms_norm(HIDDEN.rows, NORM, EPS)
    gate, up = np.split(GATE_UP.values, 2)
    want = (layers.silu(normed @ gate.T) * (normed @ up.T)) @ BACK.values.T + HIDDEN.rows
    x = spec.act_and_mul_linear(HIDDEN, EPS, GATE_UP)
    got = spec.linear_add(x, BACK, HIDDEN).rows
    # Float32 on both sides: two products of other sizes.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_linear_bias_and_scale_applied_after_product() -> None:
    biased, normed = X @ BACK.values.T + BIASED.bias, layers.rms_norm(HIDDEN.rows, NORM, EPS)
    gate, up = np.split(normed @ GATE_UP.values.T + BIASED_GATES.bias, 2, axis=1)
    want = {
        "product": biased[:, 3:],
        "product_float32": biased * np.float32(0.125),
        "rmsnorm_linear": normed @ WIDE.values.T + normal(8, 12),
        "residual_product": biased,
        "linear_add": HIDDEN.rows + biased * np.float32(0.22),
        "act_and_mul_linear": layers.silu(gate) * up,
    }
    assert want.keys() == ENDED.keys()
    for name, case in ENDED.items():
        # A product of fewer outputs may add in another order.
        np.testing.assert_allclose(
            rows(getattr(spec, name)(*case)), want[name], rtol=1e-5, atol=1e-6
        )


@each_implementation
@pytest.mark.parametrize("name", ENDED)
def test_linear_bias_and_scale_operations_match_spec(
    name: str, implementation: Implementation
) -> None:
    got = getattr(implementation("linear"), name)(*ENDED[name])
    # As below.
    np.testing.assert_allclose(
        rows(got), rows(getattr(spec, name)(*ENDED[name])), rtol=1e-4, atol=1e-5
    )


@each_implementation
@pytest.mark.parametrize("name", CASES)
def test_linear_operations_match_spec(name: str, implementation: Implementation) -> None:
    got = getattr(implementation("linear"), name)(*CASES[name])
    # Float32 on both sides: only the order of the sums over 8 or 12 terms differs.
    np.testing.assert_allclose(
        rows(got), rows(getattr(spec, name)(*CASES[name])), rtol=1e-4, atol=1e-5
    )


def fp8(
    seed: int, outputs: int, inputs: int, granularity: Granularity, bias: np.ndarray | None = None
) -> Matrix:
    """A random weight in FP8, some of its numbers subnormal."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 0x7F, (outputs, inputs), np.uint8) | rng.choice(
        np.array([0, 0x80], np.uint8), (outputs, inputs)
    )
    scales = rng.uniform(1e-4, 3e-4, scale_shape(codes.shape, granularity))
    scales = scales.astype(ml_dtypes.bfloat16)
    return w8a16_matrix(codes, scales, granularity, bias)


EIGHT = fp8(20, 512, 256, Granularity.BLOCK, normal(21, 512))
BY_CHANNELS = fp8(25, 512, 256, Granularity.CHANNEL)
LONG = NormedStream(normal(22, 3, 256), 1 + normal(23, 256) / 4)
IN_FP8 = {
    "product": (LONG.rows, EIGHT, 256),
    "product_float32": (LONG.rows, EIGHT, 0.125),
    "rmsnorm_linear": (LONG, EPS, EIGHT),
    "residual_product": (LONG.rows, EIGHT),
    "linear_add": (LONG.rows, EIGHT, NormedStream(normal(24, 3, 512))),
    "act_and_mul_linear": (LONG, EPS, EIGHT),
}


@each_implementation
@pytest.mark.parametrize("num_rows", [1, 8])
def test_linear_output_bits_independent_of_other_outputs(
    num_rows: int, implementation: Implementation
) -> None:
    x, weight = normal(20, num_rows, 64), normal(21, 512, 64)
    product = implementation("layers").linear
    whole = product(x, weight)
    for outputs in (8, 32, 96, 160, 224):  # parts of a multiple of 32 have their own order in XLA
        np.testing.assert_array_equal(product(x, weight[:outputs]), whole[:, :outputs])


def test_fp8_widened_equals_code_times_scale_in_bfloat16() -> None:
    codes = fp8_w8a16.unpack(EIGHT.values)
    np.testing.assert_array_equal(fp8_w8a16.pack(codes), EIGHT.values)
    exact = codes.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    scales = np.kron(EIGHT.scales.astype(np.float64), np.ones((128, 128))) / 2.0**120
    want = (exact * scales).astype(np.float32).astype(ml_dtypes.bfloat16)
    assert (want != exact * scales).any()
    np.testing.assert_array_equal(spec.widened(EIGHT), want.astype(np.float32))


@each_implementation
@pytest.mark.parametrize("weight", [EIGHT, BY_CHANNELS], ids=["blocks", "channels"])
def test_fp8_widened_matches_spec(weight: Matrix, implementation: Implementation) -> None:
    np.testing.assert_array_equal(implementation("linear").widened(weight), spec.widened(weight))
    stack = {name: np.stack([x, x[::-1]]) for name, x in weight.planes.items()}
    experts = Matrix(weight.format, stack)
    assert experts.num_outputs == weight.num_outputs == 512
    want = spec.widened(experts)
    np.testing.assert_array_equal(implementation("linear").widened(experts), want)
    np.testing.assert_array_equal(spec.widened(experts.at(1)), want[1])


@each_implementation
@pytest.mark.parametrize("name", IN_FP8)
def test_fp8_linear_equals_linear_of_dequantised_weight(
    name: str, implementation: Implementation
) -> None:
    wide = Matrix.plain(spec.widened(EIGHT), EIGHT.bias)
    plain = tuple(wide if x is EIGHT else x for x in IN_FP8[name])
    for ops in (implementation("linear"), spec):
        got, want = (rows(getattr(ops, name)(*case)) for case in (IN_FP8[name], plain))
        np.testing.assert_array_equal(got, want)


def test_fp8_rows_start_at_scale_boundary() -> None:
    of_channels = spec.widened(BY_CHANNELS)
    codes = fp8_w8a16.unpack(BY_CHANNELS.values).view(ml_dtypes.float8_e4m3fn)
    own = BY_CHANNELS.scales[130].astype(np.float32) / np.float32(2.0**120)
    want = (codes[130].astype(np.float32) * own).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(of_channels[130], want.astype(np.float32))
    np.testing.assert_array_equal(spec.widened(BY_CHANNELS.rows(130)), of_channels[130:])
    tail = EIGHT.rows(384)
    np.testing.assert_array_equal(spec.widened(tail), spec.widened(EIGHT)[384:])
    np.testing.assert_array_equal(tail.bias, EIGHT.bias[384:])
    in_jax = jax_linear.Matrix(EIGHT.format, EIGHT.planes)
    tensors = {name: torch.from_numpy(plane) for name, plane in EIGHT.planes.items()}
    in_torch = torch_linear.Matrix(EIGHT.format, tensors)
    assert in_jax.num_outputs == in_torch.num_outputs == 512
    for each in (EIGHT, in_jax, in_torch):
        with pytest.raises(ValueError, match="must be a multiple of 128, got 130"):
            each.rows(130)


def codes(outputs: int, inputs: int, seed: int, *, by_output: bool) -> Matrix:
    """A weight of codes, with scales of each output, or of each block of outputs."""
    rng = np.random.default_rng(seed)
    values = quantize(rng.normal(size=(outputs, inputs)).astype(np.float32) * 32)
    count = outputs if by_output else outputs // BLOCK
    scales = rng.uniform(0.001, 0.004, (count, -(-inputs // BLOCK))).astype(np.float32)
    return w8a8_matrix(values, scales, normal(seed, outputs))


@each_implementation
@pytest.mark.parametrize("kind", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    ("weight", "first"),
    [(codes(256, 256, 0, by_output=False), 128), (codes(160, 144, 1, by_output=True), 3)],
    ids=["blocks", "outputs"],
)
def test_w8a8_linear_quantises_activations_matches_spec(
    weight: Matrix, first: int, kind: type, implementation: Implementation
) -> None:
    x = normal(2, 5, weight.values.shape[1]).astype(kind)
    rows = fp8_activations.quantised(x)
    scales = np.repeat(weight.scales, weight.num_outputs // len(weight.scales), axis=0)
    want = fp8_activations.product(rows, weight.values, scales) + weight.bias
    values = weight.values.view(ml_dtypes.float8_e4m3fn)
    given = replace(weight, planes={**weight.planes, "values": values})
    ops = implementation("linear")
    # Float32 sums in other orders, of at most 256 terms.
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(spec.product_float32(x, weight, 0.5), 0.5 * want)
    close(ops.product_float32(x, given, 0.5), 0.5 * want)
    rounded = ops.product(x, given, first)
    if kind is np.float32:
        close(rounded, want[:, first:])
    else:
        np.testing.assert_allclose(rounded, want[:, first:], rtol=2.0**-8, atol=1e-5)


HALVES = LinearOrder(segments=2, least=256, unit=256)
LONG_X, LONG_STREAM = normal(30, 3, 512), NormedStream(normal(31, 3, 256))
LONG_WEIGHTS = {
    "plain": Matrix.plain(normal(32, 256, 512), normal(33, 256)),
    "FP8": fp8(34, 256, 512, Granularity.BLOCK, normal(35, 256)),
    "W8A8": codes(256, 512, 36, by_output=False),
}
LONG_WEIGHTS["LoRA"] = replace(
    LONG_WEIGHTS["plain"],
    lora=RowAdapters(
        AdapterWeights(
            a=normal(37, 1, 4, 512),
            b=normal(38, 1, 256, 4),
            scales=np.full((1, 4), 0.5, np.float32),
            factors=np.full((1, 256), 1.5, np.float32),
            parts=(256,),
        ),
        np.array([1, 0, 1]),
    ),
)


def in_framework(matrix: Matrix) -> Matrix:
    """The weight with FP8 numbers in place of their codes (W8A8)."""
    if not matrix.format.quantizes_activations:
        return matrix
    values = matrix.values.view(ml_dtypes.float8_e4m3fn)
    return replace(matrix, planes={**matrix.planes, "values": values})


RESIDUAL_GEMMS: dict[str, Callable[[Any, Matrix], np.ndarray]] = {
    "linear_add": lambda ops, weight: ops.linear_add(LONG_X, weight, LONG_STREAM, 0.25).rows,
    "residual_product": lambda ops, weight: ops.residual_product(LONG_X, weight),
}


@pytest.mark.parametrize("name", RESIDUAL_GEMMS)
@pytest.mark.parametrize("kind", LONG_WEIGHTS)
def test_residual_gemms_in_segments_match_spec(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, operation = LONG_WEIGHTS[kind], RESIDUAL_GEMMS[name]
    once = operation(spec, weight)
    monkeypatch.setattr(reduction_order, "LINEAR", HALVES)
    want = operation(spec, weight)
    assert (want != once).any()
    found, matrix = [once], in_framework(weight)
    found += [operation(x, matrix) for x in TWINS.values()]
    # Float32 on both sides: sums of 256 terms in other orders, of numbers up to about 100.
    for each in found:
        np.testing.assert_allclose(each, want, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("segments", "values", "total"),
    [
        (1, (2.0**25, 0, 2, -(2.0**25)), 0),  # 2^25 + 2 is rounded to 2^25
        (2, (2.0**25, 0, 2, -(2.0**25)), 2),
        (4, (2.0**25, 2, -(2.0**25), 0), 0),
        (4, (2.0**25, -(2.0**25), 2, 0), 2),
    ],
)
def test_residual_gemms_start_segments_from_zero(
    segments: int, values: tuple[float, ...], total: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        reduction_order, "LINEAR", LinearOrder(segments=segments, least=128, unit=128)
    )
    weight = np.zeros((1, 512), np.float32)
    weight[0, ::128] = values
    x, stream = np.ones((1, 512), np.float32), NormedStream(np.zeros((1, 1), np.float32))
    for ops in (spec, *TWINS.values()):
        assert ops.linear_add(x, Matrix.plain(weight), stream).rows.item() == total
        assert ops.residual_product(x, Matrix.plain(weight)).item() == total
