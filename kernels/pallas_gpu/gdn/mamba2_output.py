"""Gate and output norm of Mamba2 layers (Pallas, Triton backend).

TP ranks that share a group of the norm gather the sums of squares of its chunks, which are in fixed
point, so that the bits do not depend on the number of ranks.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.kernel_limits import row_warps
from kernels.pallas_gpu.gdn.gdn_rows import silu
from kernels.pallas_gpu.gemm.sum_of_squares import add_up, exponent_of, in_floats, units_of
from shared.spec.reduction_order import SquaresOrder


def gated_output(
    out: Float[jax.Array, "R values"],
    projected: Float[jax.Array, "R outputs"],
    norm: Float[jax.Array, "*L values"] | None,
    sums: Float[jax.Array, "R chunks"] | None,
    first_chunk: Int[jax.Array, " 1"],
    layer: Int[jax.Array, " 1"],
    *,
    eps: float,
    norm_size: int,
    gates_first: bool,
    factor: float,
    order: SquaresOrder,
    interpret: bool = False,
) -> Float[jax.Array, "R values"]:
    """Implements `shared.spec.recurrent_mixer.gated_output`.

    Args:
      out: Outputs of the heads.
      projected: Output of the input projection, which begins with the gate z.
      norm: Weight of the layer's norm, or of all layers; None for the gate alone.
      sums: Sums of squares of all ranks' chunks if ranks share groups, see `squares_of_chunks`.
      first_chunk: Index of the first chunk of `out` among them.
      layer: Index of the layer.
      eps: Epsilon of the norm.
      norm_size: Columns of a group of the norm.
      gates_first: True if the gate is applied before the norm.
      factor: Multiplier of the result.
      order: Reduction order of squares.
      interpret: Run on a CPU.
    """
    columns = norm_size if sums is None else order.chunk
    settings = {"eps": eps, "size": norm_size, "gates_first": gates_first, "factor": factor}
    return pl.pallas_call(
        partial(_gated_output_kernel, columns=columns, order=order, **settings),
        grid=(len(out), out.shape[1] // columns),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=row_warps(columns)),
        interpret=interpret,
        name="mamba2_output_norm",
    )(out, projected, norm, sums, first_chunk, layer)


def squares_of_chunks(
    out: Float[jax.Array, "R values"],
    projected: Float[jax.Array, "R outputs"],
    *,
    gates_first: bool,
    order: SquaresOrder,
    interpret: bool = False,
) -> Float[jax.Array, "R chunks"]:
    """Computes the sums of squares of the norm's inputs in chunks, of which `out` has whole ones.

    Args:
      out, projected, gates_first, order, interpret: As in `gated_output`.
    """
    rows, values = out.shape
    return pl.pallas_call(
        partial(_squares_kernel, gates_first=gates_first, order=order),
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows, values // order.chunk), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=row_warps(values)),
        interpret=interpret,
        name="mamba2_output_squares",
    )(out, projected)


def _gated_output_kernel(
    out_ref,
    projected_ref,
    norm_ref,
    sums_ref,
    first_chunk_ref,
    layer_ref,
    result_ref,
    *,
    eps,
    size,
    columns,
    gates_first,
    factor,
    order,
):
    """One program per row and group of the norm, or chunk if ranks share groups."""
    row, first, values = pl.program_id(0), pl.program_id(1) * columns, out_ref.shape[1]
    lane, _ = _lanes(columns, order.chunk)
    inside, column = lane < columns, first + lane
    x, gate = _inputs_of(out_ref, projected_ref, row, column, inside)
    if gates_first:
        x = x * gate
    if norm_ref is not None:
        digits = order.digits_of_chunks
        if sums_ref is None:
            sums = add_up(x * x, order.digits)
        else:
            chunks = size // order.chunk
            place = lax.iota(jnp.int32, pl.next_power_of_2(chunks))
            start = (first_chunk_ref[0] + pl.program_id(1)) // chunks * chunks
            sums = pltriton.load(sums_ref.at[row, start + place], mask=place < chunks, other=0.0)
        exponent = exponent_of(sums.max(), digits)
        total = in_floats(units_of(sums, exponent, digits).sum(), exponent, digits)
        x = x * lax.rsqrt(total * (1.0 / size) + eps)
        at = (layer_ref[0],) if len(norm_ref.shape) > 1 else ()
        x = x * pltriton.load(norm_ref.at[(*at, column)], mask=inside, other=0.0)
    if not gates_first:
        x = x * gate
    x = x * factor
    # Columns that are not stored get an index outside the array, which the interpreter requires.
    to = result_ref.at[row, jnp.where(inside, column, values)]
    pltriton.store(to, x.astype(result_ref.dtype), mask=inside)


def _squares_kernel(out_ref, projected_ref, sums_ref, *, gates_first, order):
    """One program per row."""
    row, (_, values), (_, chunks) = pl.program_id(0), out_ref.shape, sums_ref.shape
    column, place = _lanes(values, order.chunk)
    x, gate = _inputs_of(out_ref, projected_ref, row, column, column < values)
    if gates_first:
        x = x * gate
    to = sums_ref.at[row, jnp.where(place < chunks, place, chunks)]
    pltriton.store(to, add_up(x * x, order.digits), mask=place < chunks)


def _lanes(columns, chunk):
    """Returns the columns of a program, [spread, chunk], and the numbers of its chunks."""
    place = lax.iota(jnp.int32, pl.next_power_of_2(pl.cdiv(columns, chunk)))
    return place[:, None] * chunk + lax.iota(jnp.int32, chunk)[None, :], place


def _inputs_of(out_ref, projected_ref, row, column, inside):
    """Loads outputs of heads, and their gates, in float32."""
    x = pltriton.load(out_ref.at[row, column], mask=inside, other=0.0).astype(jnp.float32)
    z = pltriton.load(projected_ref.at[row, column], mask=inside, other=0.0)
    return x, silu(z.astype(jnp.float32))
