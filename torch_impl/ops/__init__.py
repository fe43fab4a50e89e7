"""The operations of a step in plain torch, one module for each specification.

This package is the one place that decides, once and at import, whether an operation is a kernel;
here every operation is plain torch.
"""

from jaxtyping import Bool, Int
from torch import Tensor


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
