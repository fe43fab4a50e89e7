"""Gate and output norm of Mamba2 layers (Pallas, Triton backend)."""

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
      layer: Index of the layer.
      eps: Epsilon of the norm.
      norm_size: Columns of a group of the norm.
      gates_first: True if the gate is applied before the norm.
      factor: Multiplier of the result.
      order: Reduction order of squares.
      interpret: Run on a CPU.
    """
    settings = {"eps": eps, "size": norm_size, "gates_first": gates_first, "factor": factor}
    return pl.pallas_call(
        partial(_gated_output_kernel, order=order, **settings),
        grid=(len(out), out.shape[1] // norm_size),
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=row_warps(norm_size)),
        interpret=interpret,
        name="mamba2_output_norm",
    )(out, projected, norm, layer)


def _gated_output_kernel(
    out_ref,
    projected_ref,
    norm_ref,
    layer_ref,
    result_ref,
    *,
    eps,
    size,
    gates_first,
    factor,
    order,
):
    """One program per row and group of the norm."""
    row, first, values = pl.program_id(0), pl.program_id(1) * size, out_ref.shape[1]
    chunks = lax.iota(jnp.int32, pl.next_power_of_2(pl.cdiv(size, order.chunk)))
    lane = chunks[:, None] * order.chunk + lax.iota(jnp.int32, order.chunk)[None, :]
    inside, column = lane < size, first + lane
    x = pltriton.load(out_ref.at[row, column], mask=inside, other=0.0).astype(jnp.float32)
    z = pltriton.load(projected_ref.at[row, column], mask=inside, other=0.0)
    gate = silu(z.astype(jnp.float32))
    if gates_first:
        x = x * gate
    if norm_ref is not None:
        sums, digits = add_up(x * x, order.digits), order.digits_of_chunks
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
