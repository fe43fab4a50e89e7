"""Fixtures of the tests that call kernels."""

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def freed_executables() -> Iterator[None]:
    """What a file's cases have compiled is freed after them.

    Each executable of a CPU takes some memory maps, of which Linux gives a process 65,530; XLA
    crashes where it gets no more.
    """
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    """Kernels of Triton are interpreted where there is no GPU."""
    from tests.support.kernels import triton_interpreter

    with triton_interpreter():
        yield
