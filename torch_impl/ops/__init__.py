"""The operations of a step, one module for each specification.

This package is the one place that decides, once and at import, which operations are kernels: where
there is a GPU, those of `KERNELS`. Triton is not installed on other machines, and there, as for
tensors on the CPU, every operation is plain torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from kernels.rooms import module_in
from kernels.tiles import Tiles

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Kernels:
    """The kernels of this machine's GPU, module by module, and their tiles."""

    acceptance: ModuleType
    encoder_attention: ModuleType
    attention: ModuleType
    convolution: ModuleType
    gdn_commit: ModuleType
    gdn_prefill: ModuleType
    gdn_layer: ModuleType
    draft_tree: ModuleType
    experts: ModuleType
    flatten_tree: ModuleType
    fp8_activations: ModuleType
    qk_norm_rope_kv_write: ModuleType
    layers: ModuleType
    lm_head_epilogue: ModuleType
    linear: ModuleType
    symmetric_memory: ModuleType
    attention_layer: ModuleType
    ngram: ModuleType
    gumbel_noise: ModuleType
    all_gather: ModuleType
    row_bounds: ModuleType
    rejection: ModuleType
    sampling: ModuleType
    slot_state: ModuleType
    verify_budget: ModuleType
    vocab_parallel: ModuleType
    kv_compaction: ModuleType
    tiles: Tiles


KERNELS: Kernels | None = None

if torch.cuda.is_available():
    _names = [field.name for field in fields(Kernels) if field.name != "tiles"]
    KERNELS = Kernels(
        **{name: module_in("kernels.triton_gpu", name) for name in _names},
        tiles=Tiles.load("triton_gpu", torch.cuda.get_device_name()),
    )


_is_plain = False


def kernels_on(device: torch.device) -> Kernels | None:
    """The kernels that operations on a device run; None where they are plain."""
    return None if _is_plain or device.type != "cuda" else KERNELS


def kernel_names() -> list[str]:
    """The modules of kernels that are taken on a GPU now."""
    is_any = KERNELS is not None and not _is_plain
    names = [field.name for field in fields(Kernels)]
    return [name for name in names if name != "tiles"] if is_any else []


def kernel_or_plain(
    kernel: Callable[Concatenate[Kernels, P], R],
    plain: Callable[P, R],
    takes: Callable[[Tensor], bool] = lambda x: True,
) -> Callable[P, R]:
    """An operation of this machine: `plain`, or with a GPU what its first argument asks for.

    Args:
      kernel: Takes the kernels, and what `plain` takes.
      plain: The operation in plain torch.
      takes: Whether the kernel takes such a first argument; of a record, its first field.
    """
    if KERNELS is None:
        return plain

    @wraps(plain)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        first = _first_array((*args, *kwargs.values()))
        kernels = kernels_on(first.device)
        if kernels is None or not takes(first):
            return plain(*args, **kwargs)
        return kernel(kernels, *args, **kwargs)

    return operation


def _first_array(args: tuple[Any, ...]) -> Tensor:
    """The first argument, or its first field where it is a record."""
    first = args[0] if isinstance(args[0], Tensor) else getattr(args[0], fields(args[0])[0].name)
    assert isinstance(first, Tensor)  # operations with kernels begin with one
    return first


def is_bfloat16(x: Tensor) -> bool:
    """Whether kernels for numbers of two bytes take an array."""
    return x.dtype == torch.bfloat16


@contextmanager
def plain() -> Iterator[None]:
    """Makes every operation the plain one of programs that are first run within it.

    For tests and benches, which compare; it holds for the whole process.
    """
    global _is_plain
    before, _is_plain = _is_plain, True
    try:
        yield
    finally:
        _is_plain = before


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
