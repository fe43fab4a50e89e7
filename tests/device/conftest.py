"""Fixtures of the tests that call kernels."""

from collections.abc import Iterator
from typing import Any

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def freed_executables() -> Iterator[None]:
    """Frees the executables that a file's cases have compiled.

    Each CPU executable takes some memory maps. Linux limits a process to 65,530 of them, and XLA
    crashes above the limit.
    """
    yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def interpreted() -> Iterator[None]:
    """Kernels of Triton are interpreted where there is no GPU."""
    from tests.support.kernels import triton_interpreter

    with triton_interpreter():
        yield


@pytest.fixture
def copied_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the rows of the tiles of each launch of `linear_swap_ab`."""
    from tests.support.kernels import KERNELS

    module, calls = KERNELS["triton"]["linear"].linear_swap_ab, list[int]()
    healthy = module.launch

    def launch(*args: Any, config: Any, **how: Any) -> None:
        calls.append(config.rows)
        healthy(*args, config=config, **how)

    monkeypatch.setattr(module, "launch", launch)
    return calls
