"""A fixture of the tests that call kernels."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    """Kernels of Triton are interpreted where there is no GPU."""
    from tests.support.kernels import triton_interpreter

    with triton_interpreter():
        yield
