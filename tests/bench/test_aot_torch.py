"""Compilation of Triton kernels by Triton's compiler, which is stricter than the interpreter."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench.kernels import aot_torch
from bench.kernels.compiled import MOST_SHARED_BYTES, Kernel, faults_of_excuses
from bench.kernels.items import items_of
from bench.kernels.known_spills import TRITON
from tests.support.op_case import table, tables

# Triton is not imported: the tests of kernels import it as an interpreter.
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


def read(*options: str) -> subprocess.CompletedProcess:
    """Runs the bench in a process of its own: this one may interpret Triton."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "bench.kernels.aot_torch", *options]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


def first_of_each() -> list[str]:
    """Names of one large case of each function; other cases are other sizes of the same kernels."""
    large = [(op, case) for op in tables() for case in table(op) if case.is_large]
    return list({(op, case.function): f"{op}: {case}" for op, case in reversed(large)}.values())


@pytest.mark.parametrize(
    ("only", "least"),
    [
        pytest.param(["--only", *first_of_each()], 19, id="one case of each function"),
        pytest.param([], 90, id="all cases", marks=pytest.mark.matrix),
    ],
)
def test_triton_kernels_of_real_sizes_compile(only: list[str], least: int) -> None:
    done = read(*only)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(r"(\d+) kernels, (\d+) compiled, 0 faults", done.stdout)
    assert found is not None, done.stdout
    assert int(found[1]) >= 19
    assert int(found[2]) >= least


def test_aot_torch_whole_reports_kernel_resources() -> None:
    done = read("--whole", "--only", "slot_state: restore, 8 rows")
    assert done.returncode == 0, done.stdout + done.stderr
    kernel, *case, registers, spilled, shared = done.stdout.splitlines()[1].split()
    assert kernel == "_restore_kernel"
    assert " ".join(case).startswith("8 rows")
    assert 16 <= int(registers) <= 64
    assert spilled == shared == "0"


def test_aot_torch_reports_spills_once(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong, known = Kernel("_restore_kernel", 255, 8, 0), TRITON[0]
    compiler = SimpleNamespace(names=[], kernels=[])
    monkeypatch.setattr(aot_torch, "compiler_of", lambda is_whole: compiler)
    monkeypatch.setattr(aot_torch, "run", lambda case: compiler.kernels.extend([wrong, wrong]))
    restore, *_ = items_of(["slot_state: restore, "], Path())
    found, _ = aot_torch.examined(restore, is_whole=True)
    assert found.kernels == (wrong,)
    assert found.faults == (f"_restore_kernel of {restore.case} spills 8 bytes",)
    excused = next(item for item in items_of([], Path()) if item.case == known.cases[0])
    spilled = Kernel(known.kernel, 255, known.max_bytes, 0)
    monkeypatch.setattr(aot_torch, "run", lambda case: compiler.kernels.append(spilled))
    assert not aot_torch.examined(excused, is_whole=True)[0].faults
    (fault, *_) = faults_of_excuses([known], {(known, case) for case in known.cases[1:]})
    assert fault == f"{known.kernel} of {known.cases[0]} is excused and spills nothing"


def test_aot_torch_whole_float32_head_fits_shared_memory() -> None:
    # A persistent program with these tiles requires 278,552 bytes.
    done = read("--whole", "--only", "float32, head of 4,096 tokens")
    assert done.returncode == 0, done.stdout + done.stderr
    kernel, *_, shared = done.stdout.splitlines()[1].split()
    assert kernel == "_product_kernel"
    assert 0 < int(shared) <= MOST_SHARED_BYTES
