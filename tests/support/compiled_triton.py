"""Triton kernels compiled for an absent GPU, in a process that does not interpret Triton."""

import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HALF_BYTES = (228 * 2**10 - 2 * 2**10) // 2
"""Shared memory of a program, of two on a multiprocessor; each takes 1 KB more."""


class CompiledKernel(NamedTuple):
    """A kernel's name, its spilled bytes, registers of a thread and bytes of shared memory."""

    name: str
    spilled: int
    registers: int
    shared: int


def compiled_by(code: str, cache: Path) -> list[CompiledKernel]:
    """Runs code that prints the fields of each kernel that it compiles.

    Args:
      code: Python code.
      cache: Folder of Triton's cache.
    """
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    env |= {"PYTHONPATH": os.pathsep.join(sys.path)}
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return [CompiledKernel(name, *map(int, numbers)) for name, *numbers in lines]
