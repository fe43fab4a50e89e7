"""Sums of the slots of a row, and the epilogue of an MoE block (Pallas, Triton backend)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.pallas_gpu.attention.qk_norm_rope_kv_write import early
from kernels.pallas_gpu.gemm.sum_of_squares import add_up
from kernels.tiles import ExpertsTiles
from shared.spec.reduction_order import SquaresOrder


class ExpertStream(NamedTuple):
    """Rows of the residual stream, the rows scaled for the next norm, and sums of squares."""

    rows: Any
    scaled: Any
    squares: Any


class ExpertEpilogue(NamedTuple):
    """Epilogue inputs: the residual, the weights of the slots, and the scale of the next norm.

    The scale is stored in a stack, with an index of its own.
    """

    rows: Any
    weights: Any
    norm: Any
    norm_layer: Any


def stream_of(epilogue: ExpertEpilogue, order: SquaresOrder) -> ExpertStream:
    """Returns the types of the results; the scaled rows are None without a norm."""
    of, (R, N) = jax.ShapeDtypeStruct, epilogue.rows.shape
    rows = of((R, N), epilogue.rows.dtype)
    squares = of((R, pl.cdiv(N, order.chunk)), jnp.float32)
    return ExpertStream(rows, None if epilogue.norm is None else rows, squares)


def sum_slots(
    parts: Float[jax.Array, "all_slots hidden"],
    ids: Int[jax.Array, "R slots"],
    epilogue: ExpertEpilogue,
    *,
    factor: float,
    squares_order: SquaresOrder,
    tiles: ExpertsTiles,
    interpret: bool = False,
) -> ExpertStream:
    """Adds the slots of all rows and applies the epilogue."""
    (R, N), columns = epilogue.rows.shape, tiles.sum_columns
    (out,) = pl.pallas_call(
        partial(
            _sum_kernel,
            factor=factor,
            columns=columns,
            squares_order=squares_order,
            interpret=interpret,
        ),
        grid=(R * pl.cdiv(N, columns),),
        out_shape=(stream_of(epilogue, squares_order),),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.sum_warps, num_stages=1),
        interpret=interpret,
        name="experts_sum",
    )(parts, ids, epilogue)
    return out._replace(scaled=out.rows if epilogue.norm is None else out.scaled)


def _sum_kernel(parts_ref, ids_ref, epilogue, stream, *, factor, columns, squares_order, interpret):
    """One program per row and block of outputs."""
    blocks = pl.cdiv(parts_ref.shape[1], columns)
    row, block = lax.div(pl.program_id(0), blocks), lax.rem(pl.program_id(0), blocks)

    @pl.when(ids_ref[row, 0] >= 0)
    def _():
        column = early(block * columns + lax.iota(jnp.int32, columns), interpret)
        place = (row, column, block)
        add_slots(parts_ref, epilogue, stream, place, factor, squares_order, interpret)


def add_slots(parts_ref, epilogue, stream, place, factor, order, interpret):
    """Adds the slots of a row in their order, each a rounded product, and applies the epilogue.

    Args:
      parts_ref: Outputs of all slots.
      epilogue, stream: Inputs of the epilogue, and its results.
      place: Row, columns and index of their block.
      factor: Multiplier of the sum.
      order: Reduction order of squares.
      interpret: Run on a CPU.
    """
    row, column, block = place
    N, slots = parts_ref.shape[1], epilogue.weights.shape[1]
    is_column, total = column < N, jnp.zeros(column.shape, jnp.float32)
    load = partial(pltriton.load, mask=is_column, other=0.0)
    for slot in range(slots):
        # Volatile loads bypass the L1 cache: other programs have written the values.
        part = load(parts_ref.at[row * slots + slot, column], volatile=not interpret)
        total += part * epilogue.weights[row, slot]
    if factor != 1:
        total = total * factor
    out = total + load(epilogue.rows.at[row, column]).astype(jnp.float32)
    out = out.astype(stream.rows.dtype)
    at = (row, jnp.where(is_column, column, N))
    pltriton.store(stream.rows.at[at], out, mask=is_column)
    out = out.astype(jnp.float32)
    if epilogue.norm is not None:
        norm = load(epilogue.norm.at[epilogue.norm_layer[0], column])
        scaled = out * norm.astype(jnp.float32)
        pltriton.store(stream.scaled.at[at], scaled.astype(stream.scaled.dtype), mask=is_column)
    squares, chunks = jnp.where(is_column, out * out, 0.0), stream.squares.shape[1]
    for part in range(len(column) // order.chunk):
        chunk = block * (len(column) // order.chunk) + part
        terms = jnp.where(lax.div(column, order.chunk) == chunk, squares, 0.0)
        is_chunk = jnp.full((1,), chunk) < chunks
        at = (jnp.full((1,), row), jnp.where(is_chunk, chunk, chunks))
        pltriton.store(stream.squares.at[at], add_up(terms[None, :], order.digits), mask=is_chunk)
