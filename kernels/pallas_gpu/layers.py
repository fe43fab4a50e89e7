"""What stands between the products of a layer, over whole rows, for Pallas."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.limits import row_warps
from kernels.pallas_gpu.squares import add_up, exponent_of, in_floats, units_of
from shared.spec.numerics import SquaresOrder


def beside(
    x: Float[jax.Array, "R size"],
    norms: Float[jax.Array, "L size"] | None,
    layer: Int[jax.Array, ""],
    *,
    order: SquaresOrder,
    interpret: bool = False,
) -> tuple[Float[jax.Array, "R size"] | None, Float[jax.Array, "R chunks"]]:
    """What stands beside rows that begin a stream.

    Args:
      norms: A stack of scales of norms; the rows are read through that of `layer`.

    Returns:
      The rows times the scale of the norm through which they are read, if it has one, and their
      squares in chunks, as `shared.spec.numerics.chunks_of_squares`.
    """
    shape = (len(x), pl.cdiv(x.shape[1], order.chunk))
    scaled = None if norms is None else jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = (scaled, jax.ShapeDtypeStruct(shape, jnp.float32))
    kernel = functools.partial(_beside_kernel, order=order)
    given = (x, norms, layer.reshape(1))
    return _over_rows(kernel, *given, out=out, name="beside", interpret=interpret)


def rms_norm(
    x: Float[jax.Array, "R size"],
    weight: Float[jax.Array, " size"] | None,
    eps: float,
    *,
    order: SquaresOrder,
    interpret: bool = False,
) -> Float[jax.Array, "R size"]:
    """As `shared.spec.layers.rms_norm`; without a weight, the scale is 1."""
    kernel = functools.partial(_norm_kernel, eps=eps, order=order)
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return _over_rows(kernel, x, weight, out=out, name="norm", interpret=interpret)


def _over_rows(kernel, x, *others, out, name, interpret):
    R, size = x.shape
    return pl.pallas_call(
        kernel,
        grid=(R,),
        out_shape=out,
        compiler_params=pltriton.CompilerParams(num_warps=row_warps(size)),
        interpret=interpret,
        name=name,
    )(x, *others)


def _beside_kernel(x_ref, norms_ref, layer_ref, scaled_ref, sums_ref, *, order):
    """One program a row: its squares in chunks, and the row scaled."""
    x, column, sums = _row(x_ref, order)
    chunks = sums_ref.shape[1]
    part = lax.iota(jnp.int32, sums.shape[0])
    at = jnp.minimum(part, chunks - 1)
    pltriton.store(sums_ref.at[pl.program_id(0), at], sums, mask=part < chunks)
    if norms_ref is not None:
        norm = norms_ref.at[layer_ref[0], column]
        x = x * pltriton.load(norm, mask=column < x_ref.shape[1], other=0.0)
        _store_row(scaled_ref, x, column)


def _norm_kernel(x_ref, weight_ref, out_ref, *, eps, order):
    """One program a row: its norm, by its squares in chunks."""
    x, column, sums = _row(x_ref, order)
    size, digits = x_ref.shape[1], order.digits_of_chunks
    exponent = exponent_of(sums.max(), digits)
    total = in_floats(units_of(sums, exponent, digits).sum(), exponent, digits)
    x = x * lax.rsqrt(total * (1.0 / size) + eps)
    if weight_ref is not None:
        x = x * pltriton.load(weight_ref.at[column], mask=column < size, other=0.0)
    _store_row(out_ref, x, column)


def _store_row(out_ref, x, column):
    size = out_ref.shape[1]
    # A column that is not written gets an index outside, for the interpreter.
    at = jnp.where(column < size, column, size)
    x = x.astype(out_ref.dtype)
    pltriton.store(out_ref.at[pl.program_id(0), at], x, mask=column < size)


def _row(x_ref, order):
    """A row as chunks, the column of each element, and the squares of the chunks."""
    size = x_ref.shape[1]
    chunks = pl.next_power_of_2(pl.cdiv(size, order.chunk))
    part = lax.iota(jnp.int32, chunks)[:, None] * order.chunk
    column = part + lax.iota(jnp.int32, order.chunk)[None, :]
    at = x_ref.at[pl.program_id(0), column]
    x = pltriton.load(at, mask=column < size, other=0.0).astype(jnp.float32)
    return x, column, add_up(x * x, order.digits)
