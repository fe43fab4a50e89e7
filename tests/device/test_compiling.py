"""Kernels of a step are compiled before it runs, and none is launched meanwhile."""

import fcntl
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from tests.support import named_kernels
from torch_impl.compiling import compile_kernels, compile_line, kept_of


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


# A machine without a GPU says that it has one, which compiles and loads nothing.
COMPILES = """
import torch, triton
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource
from tests.support import named_kernels
from tests.support.triton_driver import Driver
from torch_impl.compiling import compile_kernels

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

compile_kernels(steps)
print("here", len(made))
for kernel in kernels:
    kernel.warmup(x, **how, grid=(1,))
how["sizes"] = named_kernels.Sizes(*how["sizes"])
named_kernels.third_kernel.warmup(place, **how, grid=(1,))
named_kernels.fourth_kernel.warmup(x, **how, grid=(1,))
print("after", len(made))
"""


def compiled(cache: Path, sizes: str) -> subprocess.CompletedProcess:
    """What a process says that compiles kernels before they run."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILES.replace("SIZES", sizes)]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def test_other_processes_compile_what_is_new_and_the_cache_gives_it(tmp_path: Path) -> None:
    first = compiled(tmp_path, "(5, 7)")
    assert first.stdout.split() == ["here", "0", "after", "0"], first.stderr
    are_done = sorted(tmp_path.glob("*/compiled"))
    assert len(are_done) == 4  # asked for twice, compiled once
    stamps = [path.stat().st_mtime_ns for path in are_done]
    assert compiled(tmp_path, "(5, 7)").stdout.split() == ["here", "0", "after", "0"]
    assert [path.stat().st_mtime_ns for path in are_done] == stamps  # by no process again


def test_a_kernel_that_another_rank_compiles_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    line = json.dumps({"module": named_kernels.__name__, "name": "first_kernel"})  # of no call
    kept = kept_of(named_kernels.first_kernel, line)
    with ThreadPoolExecutor() as pool, open(Path(kept.cache_dir) / "compiling", "w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        waiting = pool.submit(compile_line, line)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.2)
        kept.put("", "compiled", binary=False)
        fcntl.flock(other, fcntl.LOCK_UN)
        waiting.result(timeout=20)  # and it is not compiled, which would be an error
    with pytest.raises(KeyError):
        compile_line(line.replace("first", "second"))


def test_what_cannot_be_compiled_is_an_error_of_the_start(tmp_path: Path) -> None:
    failed = compiled(tmp_path, "('no number', 7)")
    assert failed.returncode == 1
    told = r"RuntimeError: (first|second)_kernel cannot be compiled: AttributeError: 'str' object"
    assert re.search(told, failed.stderr)
