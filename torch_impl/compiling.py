"""The kernels of all steps, compiled side by side before one first runs.

Triton compiles a kernel at its first launch, one after the other. A pass over the steps that
launches none tells it of all: its memory is zeros, so that what no kernel has written names things
that exist, and they are steps of padding, whose results nobody reads.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_MOST_COMPILERS = 16
"""Threads that compile, at most; fewer where there are fewer cores."""
_EMPTY = (
    torch.ops.aten.empty,
    torch.ops.aten.empty_like,
    torch.ops.aten.empty_strided,
    torch.ops.aten.new_empty,
)


class _Zeros(TorchDispatchMode):
    """New memory is zeros."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket in _EMPTY else made


def compile_kernels(steps: Callable[[], object]) -> None:
    """Compiles every kernel that steps of padding launch, and launches none."""
    from triton import AsyncCompileMode
    from triton.runtime.jit import JITFunction

    launch = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return launch(self, *args, grid=grid, warmup=True, **kwargs)

    workers = min(os.cpu_count() or 1, _MOST_COMPILERS)
    with ThreadPoolExecutor(workers) as pool, AsyncCompileMode(pool):
        JITFunction.run = compile_only
        try:
            with _Zeros():
                steps()
        finally:
            JITFunction.run = launch
