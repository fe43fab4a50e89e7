"""A driver that reports an absent GPU to Triton: it compiles and launches nothing."""

from importlib import import_module
from typing import Any

CAPABILITY = 90
"""Compute capability of an H200."""


class Driver:
    """Replaces Triton's driver."""

    def get_current_target(self) -> Any:
        compiler = import_module("triton.backends.compiler")
        return compiler.GPUTarget("cuda", CAPABILITY, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        """None that anything is launched on."""
        return 0
