"""Compilation of Triton kernels before a step runs, without launching them."""

import fcntl
import os
import re
import subprocess
import sys
import time
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.counting import NO_TRITON
from torch_impl.triton_precompile import compile_kernels

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason=NO_TRITON)


class Launches:
    """Replaces Triton's launch function and records its calls."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[tuple[tuple, bool]] = []
        self.jit = import_module("triton.runtime.jit").JITFunction

        def run(kernel: Any, *args: Any, grid: tuple, warmup: bool) -> None:
            self.seen.append((args, warmup))

        monkeypatch.setattr(self.jit, "run", run)
        self.run = run

    def launch(self, *args: Any) -> None:
        """Launches a kernel as Triton does."""
        self.jit.run(None, *args, grid=(1,), warmup=False)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    return Launches(monkeypatch)


def test_compile_kernels_warms_up_without_launch(launches: Launches) -> None:
    compile_kernels(lambda: [launches.launch(number) for number in range(3)])
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
def test_compile_kernels_zeroes_new_memory(make, launches: Launches) -> None:
    torch.full((64,), 7.0)  # what is given back is not what it was before
    compile_kernels(lambda: launches.launch(make().flatten().tolist()))
    assert launches.seen == [(([0.0] * 64,), True)]


def test_compile_kernels_restores_launcher_after_error(
    launches: Launches,
) -> None:
    def fails() -> None:
        launches.launch()
        raise RuntimeError("no such page")

    with pytest.raises(RuntimeError, match="no such page"):
        compile_kernels(fails)
    assert launches.jit.run is launches.run
    launches.launch()
    assert [warmup for _, warmup in launches.seen] == [True, False]


# A machine without a GPU reports one that compiles and loads nothing.
COMPILES = """
import torch, triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from tests.support import named_kernels
from tests.support.triton_driver import Driver
from torch_impl.triton_precompile import compile_kernels

triton.runtime.driver.set_active(Driver())
made = []

def note(kind):
    make_ir = kind.make_ir
    kind.make_ir = lambda self, *rest: made.append(self.name) or make_ir(self, *rest)

note(ASTSource), note(GluonASTSource)
kernels = [named_kernels.first_kernel, named_kernels.second_kernel]
x, how = torch.zeros(16), {"lanes": 16, "sizes": SIZES, "enable_fp_fusion": False}
place = named_kernels.Place(x, 3)

def steps():
    for kernel in 2 * kernels:
        kernel[(1,)](x, **how)
    named = named_kernels.Sizes(*how["sizes"])
    named_kernels.third_kernel[(1,)](place, **how | {"sizes": named})
    named_kernels.fourth_kernel[(1,)](x, **how | {"sizes": named})

compile_kernels(steps, RANKS)
print("here", len(made))
for kernel in kernels:
    kernel.warmup(x, **how, grid=(1,))
how["sizes"] = named_kernels.Sizes(*how["sizes"])
named_kernels.third_kernel.warmup(place, **how, grid=(1,))
named_kernels.fourth_kernel.warmup(x, **how, grid=(1,))
print("after", len(made))
"""


def command(sizes: str, ranks: int = 1) -> list[str]:
    """Returns the command of a process that compiles kernels before they run."""
    text = COMPILES.replace("SIZES", sizes).replace("RANKS", str(ranks))
    return [sys.executable, "-c", text]


def surroundings(cache: Path) -> dict[str, str]:
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("TRITON_INTERPRET", None)
    return env


def compiled(cache: Path, sizes: str, ranks: int = 1) -> subprocess.CompletedProcess:
    """Returns the completed process, with its output."""
    how = {"env": surroundings(cache), "capture_output": True, "text": True}
    return subprocess.run(command(sizes, ranks), check=False, **how)


def test_compile_kernels_fills_cache_in_other_processes(tmp_path: Path) -> None:
    first = compiled(tmp_path, "(5, 7)")
    assert first.stdout.split() == ["here", "0", "after", "0"], first.stderr
    are_done = sorted(tmp_path.glob("*/compiled"))
    assert len(are_done) == 4  # requested twice, compiled once
    stamps = [path.stat().st_mtime_ns for path in are_done]
    assert compiled(tmp_path, "(5, 7)").stdout.split() == ["here", "0", "after", "0"]
    assert [path.stat().st_mtime_ns for path in are_done] == stamps  # by no process again


@pytest.mark.matrix
def test_compile_kernels_waits_last_for_other_rank(tmp_path: Path) -> None:
    cores = len(os.sched_getaffinity(0))
    assert compiled(tmp_path, "(5, 7)", ranks=cores).returncode == 0
    asked = sorted(tmp_path.glob("*/compiled"), key=lambda path: path.stat().st_mtime_ns)
    theirs, *others = asked
    for path in asked:
        path.unlink()
    how = {"env": surroundings(tmp_path), "stdout": subprocess.PIPE, "text": True}
    with (theirs.parent / "compiling").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        # With one core per rank, waiting for the first kernel in order would block.
        process = subprocess.Popen(command("(5, 7)", ranks=cores), **how)
        until = time.monotonic() + 60
        while not all(path.exists() for path in others):
            assert time.monotonic() < until, "the others were not compiled"
            time.sleep(0.05)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        theirs.write_text("")
        stamp = theirs.stat().st_mtime_ns
    assert process.communicate(timeout=60)[0].split() == ["here", "0", "after", "0"]
    assert theirs.stat().st_mtime_ns == stamp  # and was not compiled once more


def test_compile_error_fails_startup_naming_kernel(tmp_path: Path) -> None:
    failed = compiled(tmp_path, "('no number', 7)")
    assert failed.returncode == 1
    told = r"RuntimeError: (first|second)_kernel cannot be compiled: AttributeError: 'str' object"
    assert re.search(told, failed.stderr)
