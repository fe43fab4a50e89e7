"""Kernels of a step are compiled before it runs, and none is launched meanwhile."""

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from torch_impl.compiling import compile_kernels


class Launches:
    """Stands where Triton launches kernels, and notes how it is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[tuple, bool]] = []

        def run(kernel: Any, *args: Any, grid: tuple, warmup: bool) -> None:
            self.seen.append((args, warmup))

        monkeypatch.setattr(JITFunction, "run", run)
        self.run = run


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def launch(*args: Any) -> None:
    JITFunction.run(None, *args, grid=(1,), warmup=False)


def test_kernels_are_told_of_and_not_launched(launches: Launches) -> None:
    compile_kernels(lambda: [launch(number) for number in range(3)])
    assert launches.seen == [((number,), True) for number in range(3)]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(64),
        lambda: torch.ones(64).new_empty(64),
        lambda: torch.empty_like(torch.ones(64)),
        lambda: torch.empty_strided((8, 8), (8, 1)),
    ],
)
def test_memory_that_no_kernel_has_written_is_zero(make, launches: Launches) -> None:
    torch.full((64,), 7.0)  # what is given back is not what it was before
    compile_kernels(lambda: launch(make().flatten().tolist()))
    assert launches.seen == [(([0.0] * 64,), True)]


def test_afterwards_kernels_are_launched_again_even_where_the_step_fails(
    launches: Launches,
) -> None:
    def fails() -> None:
        launch()
        raise RuntimeError("no such page")

    with pytest.raises(RuntimeError, match="no such page"):
        compile_kernels(fails)
    assert JITFunction.run is launches.run
    launch()
    assert [warmup for _, warmup in launches.seen] == [True, False]
