"""Token bitmasks of grammars: each bit is the token at its index."""

from __future__ import annotations

import numpy as np
import pytest

from shared.spec import grammar_bitmask
from tests.support.implementations import each_implementation


def _packed(allowed: np.ndarray) -> np.ndarray:
    """Whole words of bits, by numpy's own packing; those past the vocabulary are ones."""
    missing = -allowed.shape[1] % 32
    padded = np.pad(allowed, ((0, 0), (0, missing)), constant_values=True)
    return np.packbits(padded, axis=1, bitorder="little").view(np.int32)


@each_implementation
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 270])
def test_allowed_matches_packed_mask(vocab, implementation):
    rng = np.random.default_rng(vocab)
    wanted = rng.random((5, vocab)) < 0.5
    index = np.array([3, 0, 4, 4, 1], np.int32)
    bits = _packed(wanted)
    assert np.array_equal(grammar_bitmask.allowed(bits, index, vocab), wanted[index])
    got = implementation("grammar_bitmask").allowed(bits, index, vocab)
    assert np.array_equal(got, wanted[index])


def test_allowed_of_ones_allows_every_token():
    assert grammar_bitmask.allowed(np.full((1, 2), -1, np.int32), np.zeros(2, np.int32), 40).all()
