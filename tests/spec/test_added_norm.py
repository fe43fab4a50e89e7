"""Residual addition after a norm, on all implementations."""

import numpy as np
import pytest

from shared.spec.added_norm import added_norm
from shared.spec.layers import rms_norm
from shared.spec.linear import NormedStream
from tests.support.cases.gemm.added_norm import EPS, added_norm_arguments
from tests.support.implementations import Implementation, each_implementation
from tests.support.op_case import OpCase, table

SMALL = [case for case in table("added_norm") if not case.is_large]


def test_added_norm_multiplies_sum_by_scalar() -> None:
    given = added_norm_arguments(0, R=3, size=96, is_last=True)
    before, normed = given["stream"].rows, rms_norm(given["x"], given["end_norm"], EPS)
    got = added_norm(**given)
    np.testing.assert_array_equal(got.rows, (before + normed) * np.float32(0.7))
    np.testing.assert_array_equal(got.norm, given["norm"])
    given |= {"scalar": None, "norm": None}
    got = added_norm(**given)
    np.testing.assert_array_equal(got.rows, before + normed)
    assert got.norm is None


@each_implementation
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_added_norm_matches_spec(case: OpCase, implementation: Implementation) -> None:
    given = case.arguments(seed=1)
    got: NormedStream = implementation("added_norm").added_norm(*given.values())
    # Float32 on both sides: only the order of the sum of squares differs.
    np.testing.assert_allclose(got.rows, added_norm(**given).rows, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got.norm, given["norm"])
