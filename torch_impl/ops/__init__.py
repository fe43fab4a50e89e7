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

from kernels.tiles import Tiles

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Kernels:
    """The kernels of this machine's GPU, module by module, and their tiles."""

    acceptance: ModuleType
    attend_all: ModuleType
    attention: ModuleType
    convolution: ModuleType
    delta_commit: ModuleType
    delta_feed: ModuleType
    delta_mix: ModuleType
    draft_tree: ModuleType
    experts: ModuleType
    flat_nodes: ModuleType
    fp8_activations: ModuleType
    heads: ModuleType
    layers: ModuleType
    leaves: ModuleType
    linear: ModuleType
    mailboxes: ModuleType
    mix: ModuleType
    ngram: ModuleType
    noise: ModuleType
    ranks: ModuleType
    reach: ModuleType
    rejection: ModuleType
    sampling: ModuleType
    slots: ModuleType
    verify_rows: ModuleType
    vocabulary: ModuleType
    window: ModuleType
    tiles: Tiles


KERNELS: Kernels | None = None

if torch.cuda.is_available():
    from kernels.triton_gpu import acceptance as acceptance_kernel
    from kernels.triton_gpu import attend_all as attend_all_kernel
    from kernels.triton_gpu import attention as attention_kernel
    from kernels.triton_gpu import convolution as convolution_kernel
    from kernels.triton_gpu import delta_commit as delta_commit_kernel
    from kernels.triton_gpu import delta_feed as delta_feed_kernel
    from kernels.triton_gpu import delta_mix as delta_mix_kernel
    from kernels.triton_gpu import draft_tree as draft_tree_kernel
    from kernels.triton_gpu import experts as experts_kernel
    from kernels.triton_gpu import flat_nodes as flat_nodes_kernel
    from kernels.triton_gpu import fp8_activations as fp8_activations_kernel
    from kernels.triton_gpu import heads as heads_kernel
    from kernels.triton_gpu import layers as layers_kernel
    from kernels.triton_gpu import leaves as leaves_kernel
    from kernels.triton_gpu import linear as linear_kernel
    from kernels.triton_gpu import mailboxes as mailboxes_kernel
    from kernels.triton_gpu import mix as mix_kernel
    from kernels.triton_gpu import ngram as ngram_kernel
    from kernels.triton_gpu import noise as noise_kernel
    from kernels.triton_gpu import ranks as ranks_kernel
    from kernels.triton_gpu import reach as reach_kernel
    from kernels.triton_gpu import rejection as rejection_kernel
    from kernels.triton_gpu import sampling as sampling_kernel
    from kernels.triton_gpu import slots as slots_kernel
    from kernels.triton_gpu import verify_rows as verify_rows_kernel
    from kernels.triton_gpu import vocabulary as vocabulary_kernel
    from kernels.triton_gpu import window as window_kernel

    KERNELS = Kernels(
        acceptance=acceptance_kernel,
        attend_all=attend_all_kernel,
        attention=attention_kernel,
        convolution=convolution_kernel,
        delta_commit=delta_commit_kernel,
        delta_feed=delta_feed_kernel,
        delta_mix=delta_mix_kernel,
        draft_tree=draft_tree_kernel,
        experts=experts_kernel,
        flat_nodes=flat_nodes_kernel,
        fp8_activations=fp8_activations_kernel,
        heads=heads_kernel,
        layers=layers_kernel,
        leaves=leaves_kernel,
        linear=linear_kernel,
        mailboxes=mailboxes_kernel,
        mix=mix_kernel,
        ngram=ngram_kernel,
        noise=noise_kernel,
        ranks=ranks_kernel,
        reach=reach_kernel,
        rejection=rejection_kernel,
        sampling=sampling_kernel,
        slots=slots_kernel,
        verify_rows=verify_rows_kernel,
        vocabulary=vocabulary_kernel,
        window=window_kernel,
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
