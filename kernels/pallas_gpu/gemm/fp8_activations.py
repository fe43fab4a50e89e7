"""Rows quantised to FP8, for Pallas."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Float8e4m3fn, Float32

from kernels.pallas_gpu.gemm.fp8_w8a8 import quantise
from shared.models.fp8 import BLOCK

LINES, ROWS = 8, 128
"""Codes lie in whole groups of so many rows, and their scales of so many, as `linear_described`
copies and loads them. Of the rows more than there are, nothing is written."""
_FEW = 64
_ROWS, _ROWS_OF_MANY, _WARPS = 4, 32, 4
"""Of a program, where rows are at most so few, and where there are more."""


def quantised(
    x: Float[jax.Array, "R inputs"], *, interpret: bool = False
) -> tuple[Float8e4m3fn[jax.Array, "lines inputs"], Float32[jax.Array, "blocks rows"]]:
    """As `shared.spec.fp8_activations.quantised`, of whole blocks of inputs.

    Returns:
      The codes, and the scales of each block of inputs, one row behind the other; both with rows
      more than there are, see `LINES`.
    """
    R, K = x.shape
    of_program = _ROWS if R <= _FEW else _ROWS_OF_MANY
    lines, rows = (pl.cdiv(R, whole) * whole for whole in (LINES, ROWS))
    return pl.pallas_call(
        partial(_quantising_kernel, rows=of_program, is_compiled=not interpret),
        grid=(pl.cdiv(R, of_program), K // BLOCK),
        out_shape=(
            jax.ShapeDtypeStruct((lines, K), jnp.float8_e4m3fn),
            jax.ShapeDtypeStruct((K // BLOCK, rows), jnp.float32),
        ),
        compiler_params=pltriton.CompilerParams(num_warps=_WARPS, num_stages=1),
        interpret=interpret,
        name="quantised",
    )(x)


def _quantising_kernel(x_ref, codes_ref, scales_ref, *, rows, is_compiled):
    """One program per block of inputs of some rows."""
    row, block = pl.program_id(0) * rows + lax.iota(jnp.int32, rows), pl.program_id(1)
    is_row = row < x_ref.shape[0]
    # A row that is not read gets an index outside, for the interpreter.
    column = block * BLOCK + lax.iota(jnp.int32, BLOCK)
    place = (jnp.where(is_row, row, x_ref.shape[0])[:, None], column[None, :])
    mask = jnp.broadcast_to(is_row[:, None], (rows, BLOCK))
    x = pltriton.load(x_ref.at[place], mask=mask, other=0.0).astype(jnp.float32)
    codes, scale = quantise(x, is_compiled)
    pltriton.store(codes_ref.at[place], codes, mask=mask)
    pltriton.store(scales_ref.at[jnp.full(row.shape, block), row], scale, mask=is_row)
