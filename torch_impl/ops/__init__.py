"""The operations of a step, one module for each specification.

This package is the one place that decides, once and at import, which operations are kernels: those
of `KERNELS` where there is a GPU. Triton is not installed on other machines, and there, as for
tensors on the CPU, every operation is plain torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from jaxtyping import Bool, Int
from torch import Tensor

KERNELS: dict[str, ModuleType] = {}
"""The operations that are kernels on a GPU, by name."""

if torch.cuda.is_available():
    from kernels.triton_gpu import attention as triton_attention

    KERNELS["attention"] = triton_attention


@contextmanager
def plain() -> Iterator[None]:
    """Makes every operation the plain one of programs that are first run within it.

    For tests and benches, which compare; it holds for the whole process.
    """
    kernels = dict(KERNELS)
    KERNELS.clear()
    try:
        yield
    finally:
        KERNELS.update(kernels)


def any_row(flags: Bool[Tensor, "..."]) -> bool:
    """Whether work that only some rows need must run at all; skipping it changes no result.

    Reading a flag on a CPU is free. On a GPU it would be a wait and break graph capture, so there
    the work always runs.
    """
    return flags.is_cuda or bool(flags.any())


def at_most(size: Int[Tensor, ""], bound: int, multiple: int) -> int:
    """How far an array that is `bound` long must be worked through: `size` rounded up, at least 1.

    As with `any_row` the number is read where that is free; a GPU works through all of it.
    """
    if size.is_cuda:
        return bound
    return max(1, min(bound, -(-int(size) // multiple) * multiple))
