"""Convolutions before and after the attention and MLP of a DFlash2 layer (Pallas, Triton backend).

Coefficients and rows are bfloat16, so each product is exact in float32. The sums have the bits of
the reference operations.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.kernel_limits import row_warps
from kernels.pallas_gpu.gemm.layers import store_row
from kernels.pallas_gpu.gemm.sum_of_squares import add_up
from shared.spec.reduction_order import SquaresOrder

BLOCK = 512  # columns per program, if no norm follows


def before(
    normed: Float[jax.Array, "R hidden"],
    base: Float[jax.Array, "2 taps hidden"],
    moved: Float[jax.Array, "R 2 taps groups"],
    size: int,
    *,
    interpret: bool = False,
) -> Float[jax.Array, "R hidden"]:
    """Implements `shared.spec.convolution.before`."""
    R, hidden = normed.shape
    return pl.pallas_call(
        functools.partial(_before_kernel, size=size),
        grid=(R, pl.cdiv(hidden, BLOCK)),
        out_shape=jax.ShapeDtypeStruct(normed.shape, normed.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="convolution_before",
    )(normed, base, moved)


def behind(
    given: Float[jax.Array, "R hidden"],
    base: Float[jax.Array, "2 taps hidden"],
    moved: Float[jax.Array, "R 2 taps groups"],
    size: int,
    x: Float[jax.Array, "R hidden"],
    norms: Float[jax.Array, "L hidden"],
    layer: Int[jax.Array, ""],
    eps: float,
    *,
    order: SquaresOrder,
    interpret: bool = False,
) -> tuple[Float[jax.Array, "R hidden"], Float[jax.Array, "R hidden"]]:
    """Implements `shared.spec.convolution.behind`.

    Stacked norm scales replace the norm; `layer` selects the one that the residual stream is read
    through next.
    """
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(
        functools.partial(_behind_kernel, size=size, eps=eps, order=order),
        grid=(len(x),),
        out_shape=(out, out),
        compiler_params=pltriton.CompilerParams(num_warps=row_warps(x.shape[1])),
        interpret=interpret,
        name="convolution_behind",
    )(given, base, moved, x, norms, layer.reshape(1))


def _before_kernel(values_ref, base_ref, moved_ref, out_ref, *, size):
    """One program per block of columns of a row."""
    column = pl.program_id(1) * BLOCK + lax.iota(jnp.int32, BLOCK)
    total = jnp.zeros(column.shape, jnp.float32)
    total = _added(total, 0, values_ref, base_ref, moved_ref, column, size)
    store_row(out_ref, total, column)


def _behind_kernel(
    values_ref,
    base_ref,
    moved_ref,
    x_ref,
    norms_ref,
    layer_ref,
    out_ref,
    normed_ref,
    *,
    size,
    eps,
    order,
):
    """One program per row: the residual sum and its norm."""
    hidden = x_ref.shape[1]
    chunks = pl.next_power_of_2(pl.cdiv(hidden, order.chunk))
    part = lax.iota(jnp.int32, chunks)[:, None] * order.chunk
    column = part + lax.iota(jnp.int32, order.chunk)[None, :]
    inside = column < hidden
    x = pltriton.load(x_ref.at[pl.program_id(0), column], mask=inside, other=0.0)
    total = _added(x.astype(jnp.float32), 1, values_ref, base_ref, moved_ref, column, size)
    store_row(out_ref, total, column)
    x = total.astype(out_ref.dtype).astype(jnp.float32)
    squares = add_up(add_up(x * x, order.digits).reshape(1, chunks), order.digits_of_chunks)
    x = x * lax.rsqrt(squares[:, None] * (1.0 / hidden) + eps)
    x = x * pltriton.load(norms_ref.at[layer_ref[0], column], mask=inside, other=0.0)
    store_row(normed_ref, x, column)


def _added(total, side, values_ref, base_ref, moved_ref, column, size):
    """Adds the taps of one of the two convolutions."""
    row, hidden, groups = pl.program_id(0), values_ref.shape[1], moved_ref.shape[3]
    inside, slot, group = column < hidden, row % size, column // (hidden // groups)
    for tap in range(base_ref.shape[1]):
        at = values_ref.at[jnp.maximum(row - tap, 0), column]
        read = pltriton.load(at, mask=inside & (slot >= tap), other=0.0).astype(jnp.float32)
        own = pltriton.load(base_ref.at[side, tap, column], mask=inside, other=0.0)
        total = total + own.astype(jnp.float32) * read
        by = pltriton.load(moved_ref.at[row, side, tap, group], mask=inside, other=0.0)
        total = total + by.astype(jnp.float32) * read
    return total
