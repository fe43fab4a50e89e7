"""Compiled host loops work in every installation."""

import numba
import pytest
from numba.core import caching

from shared.engine.jit import compiled


def test_compiled_works_without_writable_cache_folder(monkeypatch):
    """Same as in a read-only container for a user without a home folder."""
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])

    def twice(number: int) -> int:
        return 2 * number

    with pytest.raises(RuntimeError, match="no locator"):
        numba.njit(cache=True)(twice)
    assert compiled(twice)(21) == 42
