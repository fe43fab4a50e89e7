"""Operations of a step, one module per specification.

This package alone decides which operations run kernels. Programs for a GPU, present or as an AOT
target, run the kernels in `KERNELS`. All other programs, also those for the CPU of a machine with a
GPU, run the reference implementations in jnp.
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

from kernels.kernel_limits import MOST_SEPARATE_BLOCKS, arrivals_of_experts
from kernels.rooms import module_in
from kernels.tiles import Tiles
from shared.spec import reduction_order

P = ParamSpec("P")
R = TypeVar("R")
Carry = TypeVar("Carry")

Place = int | Int[jax.Array, ""]
"""A layer's number among its kind."""


@dataclass(frozen=True)
class Kernels:
    """Kernel modules of a GPU and their tile configs."""

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

    @classmethod
    def of(cls, gpu: str) -> Self:
        """Returns the kernels of a GPU, given its name as reported by the driver."""
        names = [field.name for field in fields(cls) if field.name != "tiles"]
        modules = {name: module_in("kernels.pallas_gpu", name) for name in names}
        return cls(**modules, tiles=Tiles.load("pallas_gpu", gpu))


def _is_on_gpu() -> bool:
    """Returns True if JAX has a GPU; startup reports a missing device named by the environment."""
    try:
        return jax.default_backend() == "gpu"
    except (RuntimeError, AssertionError):
        return False


KERNELS = Kernels.of(jax.devices()[0].device_kind) if _is_on_gpu() else None
_is_plain = False


def kernels_on(device: jax.Device) -> Kernels | None:
    """Returns the kernels that operations on a device run, or None for reference operations."""
    return None if _is_plain or device.platform != "gpu" else KERNELS


def kernel_names() -> list[str]:
    """Returns the names of the kernel modules in use on a GPU."""
    is_any = KERNELS is not None and not _is_plain
    names = [field.name for field in fields(Kernels)]
    return [name for name in names if name != "tiles"] if is_any else []


def kernel_or_reference(
    kernel: Callable[Concatenate[Kernels, P], R],
    plain: Callable[P, R],
    takes: Callable[[jax.Array], bool] = lambda x: True,
    elsewhere: Callable[P, R] | None = None,
) -> Callable[P, R]:
    """Returns an operation that dispatches to a kernel or to its reference implementation.

    The platform of the program decides, if kernels are available.

    Args:
      kernel: Called with the kernels and the arguments of `reference_ops`.
      plain: Reference implementation in jnp.
      takes: Returns True if the kernel supports the first argument (its first field for a record).
      elsewhere: Implementation for programs of other devices on a machine with kernels, if not
        `reference_ops` because both results must have one structure.
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
    """Returns the first argument, or its first field if it is a record."""
    return args[0] if isinstance(args[0], jax.Array) else args[0][0]


def operand(place: Place) -> Int[jax.Array, " 1"]:
    """Returns a layer index as a kernel operand; as a constant it would compile once per layer."""
    return jnp.asarray(place, jnp.int32).reshape(1)


def reads_stacks(x: Float[jax.Array, "..."], device: jax.Device) -> bool:
    return kernels_on(device) is not None and is_bfloat16(x)


def zeros_of(rows: Float[jax.Array, "R size"], count: int) -> Int[jax.Array, " count"]:
    """Returns zeros in which kernels of a pass count, and which they reset.

    XLA does not know that kernels count in the zeros, and would make them a constant that programs
    share. So they are computed from the rows of the pass, by a shift that removes all bits.
    """
    bits = lax.bitcast_convert_type(rows[0, 0].astype(jnp.bfloat16), jnp.uint16)
    return jnp.full((count,), bits.astype(jnp.int32) >> 16)


def arrivals_of(rows: Float[jax.Array, "R hidden"]) -> Int[jax.Array, " counters"] | None:
    """Returns the counters of a stream for GEMMs in segments and for experts; None without."""
    if reduction_order.LINEAR.segments == 1:
        return None
    num_rows, hidden = rows.shape
    return zeros_of(rows, max(MOST_SEPARATE_BLOCKS, arrivals_of_experts(num_rows, hidden)))


class Scale(NamedTuple):
    """Norm scale that may be stored in a stack of layers, like `linear.Matrix`; float32."""

    values: Float[jax.Array, "layers size"]
    layer: Place


Norm = Float[jax.Array, " size"] | Scale
"""The scale of a norm, alone or in a stack."""


def alone(norm: Norm | None) -> Float[jax.Array, " size"] | None:
    """Returns the scale of a norm, taken out of its stack if it is in one."""
    return norm.values[norm.layer] if isinstance(norm, Scale) else norm


def stacked(norm: Norm | None) -> tuple[Float[jax.Array, "L size"] | None, Int[jax.Array, ""]]:
    """Returns a scale in the form of kernels: a stack (possibly of one) and the index in it."""
    if isinstance(norm, Scale):
        return norm.values, jnp.asarray(norm.layer, jnp.int32)
    return None if norm is None else norm[None], jnp.asarray(0, jnp.int32)


def is_bfloat16(x: jax.Array) -> bool:
    """Returns True if kernels for 2-byte numbers support an array."""
    return x.dtype == jnp.bfloat16


@contextmanager
def compiled_for(gpu: str) -> Iterator[None]:
    """Context in which programs are traced with the kernels of a GPU, which may be absent.

    It applies to the whole process.

    Args:
      gpu: Name of the GPU as reported by the driver.
    """
    global KERNELS
    before, KERNELS = KERNELS, Kernels.of(gpu)
    try:
        yield
    finally:
        KERNELS = before


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


def cond_any(
    flags: Bool[jax.Array, "*rows"],
    work: Callable[..., R],
    skipped: Callable[..., R],
    *arrays: jax.Array,
) -> R:
    """Runs `work` on the arrays if a flag is set, else `skipped`, whose result must be the same.

    A GPU always runs `work`: a branch would wait for the flags, but a step is one uninterrupted
    command buffer.
    """

    def by_data(*arrays: jax.Array) -> R:
        return lax.cond(flags.any(), work, skipped, *arrays)

    return lax.platform_dependent(*arrays, cuda=work, default=by_data)


def scan(
    body: Callable[[Carry, Any], tuple[Carry, Any]], carry: Carry, inputs: Any
) -> tuple[Carry, Any]:
    """Runs `lax.scan`, unrolled on a GPU because command buffers have no loops."""

    def loop(carry: Carry, inputs: Any) -> tuple[Carry, Any]:
        return lax.scan(body, carry, inputs)

    def written_out(carry: Carry, inputs: Any) -> tuple[Carry, Any]:
        return lax.scan(body, carry, inputs, unroll=True)

    return lax.platform_dependent(carry, inputs, cuda=written_out, default=loop)
