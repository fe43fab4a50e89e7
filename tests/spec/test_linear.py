"""The products of a layer are the small operations that they are composed of."""

import numpy as np
import pytest

from shared.spec import layers
from shared.spec import linear as spec
from shared.spec.linear import Matrix, Stream
from tests.support.implementations import Implementation, each_implementation

EPS = 1e-6


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


NORM, NEXT = 1 + normal(2, 8) / 4, 1 + normal(9, 8) / 4
X, HIDDEN = normal(0, 5, 12), Stream(normal(1, 5, 8), NORM)
WIDE, BACK = Matrix(normal(3, 12, 8)), Matrix(normal(4, 8, 12))
GATE_UP = Matrix(normal(5, 24, 8))

BIASED = Matrix(BACK.values, normal(6, 8))
BIASED_GATES = Matrix(GATE_UP.values, normal(7, 24))

CASES = {
    "product": (X, BACK),
    "product_float32": (X, BACK),
    "normed_product": (HIDDEN, EPS, WIDE),
    "added_product": (X, BACK, HIDDEN),
    "gated_product": (HIDDEN, EPS, GATE_UP),
}


ENDED = {
    "product": (X, BIASED, 3),
    "product_float32": (X, BIASED, 0.125),
    "normed_product": (HIDDEN, EPS, Matrix(WIDE.values, normal(8, 12))),
    "added_product": (X, BIASED, HIDDEN, 0.22),
    "gated_product": (HIDDEN, EPS, BIASED_GATES),
}
"""The same with biases, and with the factors that some take."""


def test_a_stream_is_read_through_the_norm_that_it_was_given() -> None:
    added = spec.added_product(X, BACK, HIDDEN, 1.0, NEXT)
    want = layers.rms_norm(added.rows, NEXT, EPS) @ WIDE.values.T
    np.testing.assert_array_equal(spec.normed_product(added, EPS, WIDE), want)
    begun = spec.stream(HIDDEN.rows, NEXT)
    want = layers.rms_norm(HIDDEN.rows, NEXT, EPS) @ WIDE.values.T
    np.testing.assert_array_equal(spec.normed_product(begun, EPS, WIDE), want)
    as_it_is = spec.normed_product(begun, None, WIDE)
    np.testing.assert_array_equal(as_it_is, HIDDEN.rows @ WIDE.values.T)


def rows(result: np.ndarray | Stream) -> np.ndarray:
    return result.rows if isinstance(result, Stream) else result


def test_each_product_is_the_composition_of_its_parts() -> None:
    normed = layers.rms_norm(HIDDEN.rows, NORM, EPS)
    gate, up = np.split(normed @ GATE_UP.values.T, 2, axis=1)
    want = {
        "product": X @ BACK.values.T,
        "product_float32": X @ BACK.values.T,
        "normed_product": normed @ WIDE.values.T,
        "added_product": HIDDEN.rows + X @ BACK.values.T,
        "gated_product": layers.silu(gate) * up,
    }
    assert want.keys() == CASES.keys()
    for name, case in CASES.items():
        np.testing.assert_array_equal(rows(getattr(spec, name)(*case)), want[name])


def test_the_mlp_is_a_gated_product_and_an_added_one() -> None:
    """As Hugging Face's Llama computes it: down(silu(gate(norm(x))) * up(norm(x))) + x."""
    normed = layers.rms_norm(HIDDEN.rows, NORM, EPS)
    gate, up = np.split(GATE_UP.values, 2)
    want = (layers.silu(normed @ gate.T) * (normed @ up.T)) @ BACK.values.T + HIDDEN.rows
    x = spec.gated_product(HIDDEN, EPS, GATE_UP)
    got = spec.added_product(x, BACK, HIDDEN).rows
    # Float32 on both sides: two products of other sizes.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_bias_is_added_to_the_product_and_a_factor_multiplies_both() -> None:
    biased, normed = X @ BACK.values.T + BIASED.bias, layers.rms_norm(HIDDEN.rows, NORM, EPS)
    gate, up = np.split(normed @ GATE_UP.values.T + BIASED_GATES.bias, 2, axis=1)
    want = {
        "product": biased[:, 3:],
        "product_float32": biased * np.float32(0.125),
        "normed_product": normed @ WIDE.values.T + normal(8, 12),
        "added_product": HIDDEN.rows + biased * np.float32(0.22),
        "gated_product": layers.silu(gate) * up,
    }
    assert want.keys() == ENDED.keys()
    for name, case in ENDED.items():
        # A product of fewer outputs may add in another order.
        np.testing.assert_allclose(
            rows(getattr(spec, name)(*case)), want[name], rtol=1e-5, atol=1e-6
        )


@each_implementation
@pytest.mark.parametrize("name", ENDED)
def test_implementations_end_products_as_the_specification(
    name: str, implementation: Implementation
) -> None:
    got = getattr(implementation("linear"), name)(*ENDED[name])
    # As below.
    np.testing.assert_allclose(
        rows(got), rows(getattr(spec, name)(*ENDED[name])), rtol=1e-4, atol=1e-5
    )


@each_implementation
@pytest.mark.parametrize("name", CASES)
def test_implementations_compute_what_the_specification_does(
    name: str, implementation: Implementation
) -> None:
    got = getattr(implementation("linear"), name)(*CASES[name])
    # Float32 on both sides: only the order of the sums over 8 or 12 terms differs.
    np.testing.assert_allclose(
        rows(got), rows(getattr(spec, name)(*CASES[name])), rtol=1e-4, atol=1e-5
    )
