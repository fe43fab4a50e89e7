"""All-gather of column-parallel products equals the product of one rank."""

import numpy as np
import pytest

from shared.spec import all_gather
from shared.spec.reduction_order import SQUARES, chunks_of_squares, sum_in_units, sum_of_squares


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_all_gather_of_local_columns_equals_rows(count):
    rows = np.random.default_rng(0).standard_normal((3, 64), np.float32)
    shares = [all_gather.local_columns(rows, rank, count) for rank in range(count)]
    assert all(share.shape == (3, 64 // count) for share in shares)
    np.testing.assert_array_equal(all_gather.all_gather(shares), rows)


def test_all_gather_kv_heads_removes_duplicate_heads():
    heads = np.arange(2 * 4, dtype=np.float32).reshape(1, 2, 4)
    shares = [heads[:, rank // 2] for rank in range(4)]
    whole = all_gather.all_gather_kv_heads(shares, 2)
    np.testing.assert_array_equal(whole, heads.reshape(1, 8))
    for rank, share in enumerate(shares):
        np.testing.assert_array_equal(all_gather.own_keys(whole, rank, 4, 2), share)


@pytest.mark.parametrize("count", [2, 4, 8])
def test_all_gather_of_squared_chunks_bitwise_equal(count):
    """Each chunk is on one rank, and the order of the sums does not matter."""
    size = SQUARES.chunk * 16
    rows = np.random.default_rng(1).standard_normal((5, size), np.float32) * np.float32(30)
    chunks = [
        chunks_of_squares(all_gather.local_columns(rows, rank, count)) for rank in range(count)
    ]
    got = sum_in_units(all_gather.all_gather(chunks), SQUARES.digits_of_chunks)
    np.testing.assert_array_equal(got, sum_of_squares(rows))
