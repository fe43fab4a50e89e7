"""The operations of a step, one module for each specification.

This package is the one place that decides which operations are kernels: where there is a GPU, or a
program is made for one, those of `KERNELS`. Elsewhere, as in programs for another device of such a
machine, every operation is plain jnp.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial, wraps
from types import ModuleType
from typing import Any, Concatenate, NamedTuple, ParamSpec, Self, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Bool, Float, Int

from kernels.rooms import module_in
from kernels.tiles import Tiles

P = ParamSpec("P")
R = TypeVar("R")
Carry = TypeVar("Carry")

Place = int | Int[jax.Array, ""]
"""A layer's number among its kind."""


@dataclass(frozen=True)
class Kernels:
    """The kernels of a GPU, module by module, and their tiles."""

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

    @classmethod
    def of(cls, gpu: str) -> Self:
        """Those of a GPU, by the name that the driver gives it."""
        names = [field.name for field in fields(cls) if field.name != "tiles"]
        modules = {name: module_in("kernels.pallas_gpu", name) for name in names}
        return cls(**modules, tiles=Tiles.load("pallas_gpu", gpu))


def _is_on_gpu() -> bool:
    """Whether JAX has a GPU; where it has no device that the environment names, the start says."""
    try:
        return jax.default_backend() == "gpu"
    except (RuntimeError, AssertionError):
        return False


KERNELS = Kernels.of(jax.devices()[0].device_kind) if _is_on_gpu() else None
_is_plain = False


def kernels_on(device: jax.Device) -> Kernels | None:
    """The kernels that operations on a device run; None where they are plain."""
    return None if _is_plain or device.platform != "gpu" else KERNELS


def kernel_names() -> list[str]:
    """The modules of kernels that are taken on a GPU now."""
    is_any = KERNELS is not None and not _is_plain
    names = [field.name for field in fields(Kernels)]
    return [name for name in names if name != "tiles"] if is_any else []


def kernel_or_plain(
    kernel: Callable[Concatenate[Kernels, P], R],
    plain: Callable[P, R],
    takes: Callable[[jax.Array], bool] = lambda x: True,
    elsewhere: Callable[P, R] | None = None,
) -> Callable[P, R]:
    """An operation: `plain`, or where there are kernels what a program's platform asks for.

    Args:
      kernel: Takes the kernels, and what `plain` takes.
      plain: The operation in plain jnp.
      takes: Whether the kernel takes such a first argument; of a record, its first field.
      elsewhere: What programs for other devices run where there are kernels, if that is not `plain`
        because the results of the two must have one structure.
    """

    @wraps(plain)
    def operation(*args: P.args, **kwargs: P.kwargs) -> R:
        if KERNELS is None or _is_plain or not takes(_first_array((*args, *kwargs.values()))):
            return plain(*args, **kwargs)
        return lax.platform_dependent(
            cuda=partial(kernel, KERNELS, *args, **kwargs),
            default=partial(elsewhere or plain, *args, **kwargs),
        )

    return operation


def _first_array(args: tuple[Any, ...]) -> jax.Array:
    """The first argument, or its first field where it is a record."""
    return args[0] if isinstance(args[0], jax.Array) else args[0][0]


def operand(place: Place) -> Int[jax.Array, " 1"]:
    """A layer's number as an operand of a kernel: as a constant, each layer would compile one."""
    return jnp.asarray(place, jnp.int32).reshape(1)


class Scale(NamedTuple):
    """The scale of a norm where it lies in a stack, as `linear.Matrix`; float32."""

    values: Float[jax.Array, "layers size"]
    layer: Place


Norm = Float[jax.Array, " size"] | Scale
"""The scale of a norm, alone or in a stack."""


def alone(norm: Norm | None) -> Float[jax.Array, " size"] | None:
    """The scale of a norm out of its stack, where there is one."""
    return norm.values[norm.layer] if isinstance(norm, Scale) else norm


def in_stack(norm: Norm | None) -> tuple[Float[jax.Array, "L size"] | None, Int[jax.Array, ""]]:
    """As kernels take a scale: in a stack, which may be of one, with its place there."""
    if isinstance(norm, Scale):
        return norm.values, jnp.asarray(norm.layer, jnp.int32)
    return None if norm is None else norm[None], jnp.asarray(0, jnp.int32)


def is_bfloat16(x: jax.Array) -> bool:
    """Whether kernels for numbers of two bytes take an array."""
    return x.dtype == jnp.bfloat16


@contextmanager
def compiled_for(gpu: str) -> Iterator[None]:
    """Takes the kernels of a GPU, which need not be here, in programs that are traced within it.

    It holds for the whole process.

    Args:
      gpu: The name that the driver gives the GPU.
    """
    global KERNELS
    before, KERNELS = KERNELS, Kernels.of(gpu)
    try:
        yield
    finally:
        KERNELS = before


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


def when_any(
    flags: Bool[jax.Array, "*rows"],
    work: Callable[..., R],
    skipped: Callable[..., R],
    *arrays: jax.Array,
) -> R:
    """`work` of the arrays where a flag is set, else `skipped`, which must give the same then.

    A GPU always does the work: a branch would have to wait for the flags, and a step is one command
    buffer that nothing interrupts.
    """

    def by_data(*arrays: jax.Array) -> R:
        return lax.cond(flags.any(), work, skipped, *arrays)

    return lax.platform_dependent(*arrays, cuda=work, default=by_data)


def scan(
    body: Callable[[Carry, Any], tuple[Carry, Any]], carry: Carry, inputs: Any
) -> tuple[Carry, Any]:
    """`lax.scan`; on a GPU the steps are written out, for a command buffer has no loops."""

    def loop(carry: Carry, inputs: Any) -> tuple[Carry, Any]:
        return lax.scan(body, carry, inputs)

    def written_out(carry: Carry, inputs: Any) -> tuple[Carry, Any]:
        return lax.scan(body, carry, inputs, unroll=True)

    return lax.platform_dependent(carry, inputs, cuda=written_out, default=loop)
