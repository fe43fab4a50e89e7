"""Convolution along the rows of a block; same as `shared.spec.convolution`.

On a GPU these are kernels for bfloat16.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Float

from jax_impl.ops import Kernels, Norm, alone, is_bfloat16, kernel_or_reference, stacked
from jax_impl.ops.gemm.layers import plain_rms_norm
from shared.spec.reduction_order import SQUARES


def convolved(
    values: Float[jax.Array, "R hidden"],
    base: Float[jax.Array, "taps hidden"],
    moved: Float[jax.Array, "R taps groups"],
    size: int,
    added: Float[jax.Array, "R hidden"] | None,
) -> Float[jax.Array, "R hidden"]:
    """Convolves each column over a row and the rows before it in its block, after `added`; float32.

    Products of two bfloat16 numbers are exact in float32, so fused multiply-add changes no bit.
    """
    (R, hidden), groups = values.shape, moved.shape[2]
    wide = values.astype(jnp.float32).reshape(-1, size, hidden)
    total = jnp.float32(0) if added is None else added.astype(jnp.float32)
    for tap, own in enumerate(base.astype(jnp.float32)):
        read = jnp.pad(wide[:, : size - tap], ((0, 0), (tap, 0), (0, 0))).reshape(R, hidden)
        by_group = read.reshape(R, groups, -1) * moved[:, tap, :, None].astype(jnp.float32)
        total = total + own * read + by_group.reshape(R, hidden)
    return total


def plain_before(
    normed: Float[jax.Array, "R hidden"],
    base: Float[jax.Array, "2 taps hidden"],
    moved: Float[jax.Array, "R 2 taps groups"],
    size: int,
) -> Float[jax.Array, "R hidden"]:
    """Applies the first convolution; the result is the input of attention or MLP."""
    return convolved(normed, base[0], moved[:, 0], size, None).astype(normed.dtype)


def kernel_before(
    kernels: Kernels,
    normed: Float[jax.Array, "R hidden"],
    base: Float[jax.Array, "2 taps hidden"],
    moved: Float[jax.Array, "R 2 taps groups"],
    size: int,
) -> Float[jax.Array, "R hidden"]:
    return kernels.convolution.before(normed, base, moved, size)


before = kernel_or_reference(kernel_before, plain_before, is_bfloat16)


def plain_behind(
    given: Float[jax.Array, "R hidden"],
    base: Float[jax.Array, "2 taps hidden"],
    moved: Float[jax.Array, "R 2 taps groups"],
    size: int,
    x: Float[jax.Array, "R hidden"],
    norm: Norm,
    eps: float,
) -> tuple[Float[jax.Array, "R hidden"], Float[jax.Array, "R hidden"]]:
    """Applies the second convolution, adds to the residual stream, and returns it and its norm."""
    x = convolved(given, base[1], moved[:, 1], size, x).astype(x.dtype)
    return x, plain_rms_norm(x, alone(norm), eps)


def kernel_behind(
    kernels: Kernels,
    given: Float[jax.Array, "R hidden"],
    base: Float[jax.Array, "2 taps hidden"],
    moved: Float[jax.Array, "R 2 taps groups"],
    size: int,
    x: Float[jax.Array, "R hidden"],
    norm: Norm,
    eps: float,
) -> tuple[Float[jax.Array, "R hidden"], Float[jax.Array, "R hidden"]]:
    norms, layer = stacked(norm)
    how = (size, x, norms, layer, eps)
    return kernels.convolution.behind(given, base, moved, *how, order=SQUARES)


behind = kernel_or_reference(kernel_behind, plain_behind, is_bfloat16)
