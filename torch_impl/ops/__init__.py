"""Operations of a step, one module per specification.

This package alone decides, once and at import, which operations run kernels. On a machine with a
GPU these are the kernels in `KERNELS`. Machines without a GPU have no Triton; there, and for CPU
tensors, all operations run the reference implementations in torch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import wraps
from types import ModuleType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kernels.kernel_limits import MOST_SEPARATE_BLOCKS, arrivals_of_experts
from kernels.rooms import module_in
from kernels.tiles import Tiles

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Kernels:
    """Kernel modules of this machine's GPU and their tile configs."""

    acceptance: ModuleType
    best_prefixes: ModuleType
    encoder_attention: ModuleType
    attention: ModuleType
    convolution: ModuleType
    gdn_commit: ModuleType
    gdn_prefill: ModuleType
    gdn_layer: ModuleType
    mamba2_output: ModuleType
    mamba2_prefill: ModuleType
    draft_tree: ModuleType
    experts: ModuleType
    flatten_tree: ModuleType
    fp8_activations: ModuleType
    qk_norm_rope_kv_write: ModuleType
    latent_rows: ModuleType
    layers: ModuleType
    lm_head_epilogue: ModuleType
    linear: ModuleType
    lora: ModuleType
    head_product: ModuleType
    symmetric_memory: ModuleType
    attention_layer: ModuleType
    latent_attention: ModuleType
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
    """Returns the kernels that operations on a device run, or None for reference operations."""
    return None if _is_plain or device.type != "cuda" else KERNELS


def kernel_names() -> list[str]:
    """Returns the names of the kernel modules in use on a GPU."""
    is_any = KERNELS is not None and not _is_plain
    names = [field.name for field in fields(Kernels)]
    return [name for name in names if name != "tiles"] if is_any else []


def kernel_or_reference(
    kernel: Callable[Concatenate[Kernels, P], R],
    plain: Callable[P, R],
    takes: Callable[[Tensor], bool] = lambda x: True,
) -> Callable[P, R]:
    """Returns an operation that dispatches to a kernel or to its reference implementation.

    The device of the first argument decides, if kernels are available.

    Args:
      kernel: Called with the kernels and the arguments of `reference_ops`.
      plain: Reference implementation in torch.
      takes: Returns True if the kernel supports the first argument (its first field for a record).
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
    """Returns the first argument, or its first field if it is a record."""
    first = args[0] if isinstance(args[0], Tensor) else getattr(args[0], fields(args[0])[0].name)
    assert isinstance(first, Tensor)  # operations with kernels have a tensor first
    return first


def is_bfloat16(x: Tensor) -> bool:
    """Returns True if kernels for 2-byte numbers support an array."""
    return x.dtype == torch.bfloat16


def arrivals_of(rows: Float[Tensor, "R hidden"]) -> Int[Tensor, " counters"]:
    """Returns the counters of a stream for GEMMs in segments and for experts."""
    num_rows, hidden = rows.shape
    count = max(MOST_SEPARATE_BLOCKS, arrivals_of_experts(num_rows, hidden))
    return torch.zeros(count, dtype=torch.int32, device=rows.device)


@contextmanager
def reference_ops() -> Iterator[None]:
    """Context in which programs that run for the first time use reference operations only.

    It applies to the whole process. Tests and benchmarks use it for comparisons.
    """
    global _is_plain
    before, _is_plain = _is_plain, True
    try:
        yield
    finally:
        _is_plain = before


def any_row_set(flags: Bool[Tensor, "..."]) -> bool:
    """Returns True if work that only some rows need must run; skipping it changes no result.

    Reading a flag on a CPU is free. On a GPU it would synchronise and break graph capture, so the
    work always runs there.
    """
    return flags.is_cuda or bool(flags.any())


def clamp_rows(size: Int[Tensor, ""], bound: int, multiple: int) -> int:
    """Returns the number of elements of an array of length `bound` to process.

    On a CPU this is `size`, rounded up and at least 1. On a GPU it is the whole array, because the
    value is not read (see `any_row_set`).
    """
    if size.is_cuda:
        return bound
    return max(1, min(bound, -(-int(size) // multiple) * multiple))
