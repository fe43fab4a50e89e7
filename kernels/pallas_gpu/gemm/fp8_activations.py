"""Dynamic FP8 quantisation of activations for W8A8 GEMMs (Pallas, Triton backend)."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Float8e4m3fn, Float32

from kernels.pallas_gpu.gemm.fp8_w8a8 import quantise
from shared.models.formats.fp8 import BLOCK

LINES, ROWS = 8, 128
"""Row multiples to which quantised rows and their scales are padded.

`linear_sm90` copies and loads whole groups. Padding rows are not written.
"""
_FEW = 64
_ROWS, _ROWS_OF_MANY, _WARPS = 4, 32, 4
"""Rows per program for at most `_ROWS` rows and for more, and warps."""


def quantised(
    x: Float[jax.Array, "R inputs"], *, interpret: bool = False
) -> tuple[Float8e4m3fn[jax.Array, "lines inputs"], Float32[jax.Array, "blocks rows"]]:
    """Implements `shared.spec.fp8_activations.quantised`, for whole blocks of inputs.

    Returns:
      The quantised rows, and the scales of each block of inputs, one row per block. Both have
      padding rows, see `LINES`.
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
        name="fp8_quantize",
    )(x)


def _quantising_kernel(x_ref, codes_ref, scales_ref, *, rows, is_compiled):
    """One program per block of inputs of some rows."""
    row, block = pl.program_id(0) * rows + lax.iota(jnp.int32, rows), pl.program_id(1)
    is_row = row < x_ref.shape[0]
    # Rows that are not read get an index outside the array, which the interpreter requires.
    column = block * BLOCK + lax.iota(jnp.int32, BLOCK)
    place = (jnp.where(is_row, row, x_ref.shape[0])[:, None], column[None, :])
    mask = jnp.broadcast_to(is_row[:, None], (rows, BLOCK))
    x = pltriton.load(x_ref.at[place], mask=mask, other=0.0).astype(jnp.float32)
    codes, scale = quantise(x, is_compiled)
    pltriton.store(codes_ref.at[place], codes, mask=mask)
    pltriton.store(scales_ref.at[jnp.full(row.shape, block), row], scale, mask=is_row)
