"""Norms, RoPE and cache write of the rows of a latent attention layer (Pallas, Triton backend).

The cache row of a token is final here: its normed latent, then its rotated rope key, each rounded
once. `head_product.latent_queries` rotates the queries.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

from kernels.kernel_limits import row_warps
from kernels.pallas_gpu.attention.qk_norm_rope_kv_write import early
from kernels.pallas_gpu.gemm.rope import store_rotated
from kernels.pallas_gpu.gemm.sum_of_squares import add_up
from shared.spec.reduction_order import SquaresOrder


class LatentRowsInputs(NamedTuple):
    """Rows of the projection, norm scales, RoPE angles."""

    rows: Any
    query_norm: Any
    latent_norm: Any
    cos: Any
    sin: Any


class LatentWrite(NamedTuple):
    """Layer, page tables, and request and write position of each row."""

    layer: Any
    table: Any
    request: Any
    places: Any
    is_real: Any


def latent_rows(
    projected: Float[jax.Array, "R columns"],
    query_norm: Float[jax.Array, "*L rq"] | None,
    latent_norm: Float[jax.Array, "*L r"],
    cos: Float[jax.Array, "R half"],
    sin: Float[jax.Array, "R half"],
    pools: Float[jax.Array, "L 1 P page 1 latent_and_rope"],
    layer: Int[jax.Array, " 1"],
    page_table: Int[jax.Array, "B table"],
    request: Int[jax.Array, " R"],
    places: Int[jax.Array, " R"],
    is_real: Bool[jax.Array, " R"],
    *,
    eps: float,
    is_interleaved: bool,
    order: SquaresOrder,
    interpret: bool = False,
) -> tuple[Float[jax.Array, "R rq"] | None, Float[jax.Array, "L 1 P page 1 latent_and_rope"]]:
    """Writes the rows' latents and rope keys to a layer's pool, and returns the query latents.

    Args:
      projected: Rows that begin with the query latent, if there is one, and end with the latent
        and the rope key.
      query_norm, latent_norm: Norm scales of the layer or of all layers; `query_norm` is None
        without query latents.
      cos, sin: RoPE cosine and sine of each row.
      pools, layer: Latent pools of all layers, and the index of the layer in all stacks. It is an
        operand, because XLA compiles kernels of equal text once.
      page_table, request, places, is_real: Page tables, and request and KV position of each row;
        padding is not written.
      eps: Epsilon of the norms.
      is_interleaved: Whether adjacent elements are rotated together; otherwise the halves are.
      order: Reduction order of squares.
      interpret: Run on a CPU.

    Returns:
      The normed query latents, None without query latents; and the pools after the writes.
    """
    R, queries, size = len(projected), None, latent_norm.shape[-1]
    if query_norm is not None:
        queries = jax.ShapeDtypeStruct((R, query_norm.shape[-1]), projected.dtype)
        size = max(size, query_norm.shape[-1])
    given = LatentRowsInputs(
        rows=projected, query_norm=query_norm, latent_norm=latent_norm, cos=cos, sin=sin
    )
    place = len([x for x in given if x is not None])
    pools, queries = pl.pallas_call(
        functools.partial(
            _latent_rows_kernel,
            eps=eps,
            is_interleaved=is_interleaved,
            order=order,
            interpret=interpret,
        ),
        grid=(R, 1 + (query_norm is not None)),
        out_shape=(jax.ShapeDtypeStruct(pools.shape, pools.dtype), queries),
        input_output_aliases={place: 0},
        compiler_params=pltriton.CompilerParams(num_warps=row_warps(size), num_stages=1),
        interpret=interpret,
        name="latent_rows",
    )(
        given,
        pools,
        LatentWrite(
            layer=layer,
            table=page_table,
            request=request,
            places=places,
            is_real=is_real.astype(jnp.int8),
        ),
    )
    return queries, pools


def _latent_rows_kernel(
    given, _, write, pools_ref, queries_ref, *, eps, is_interleaved, order, interpret
):
    """Two programs per row: its cache row, and its query latent if there is one."""
    row, layer = pl.program_id(0), write.layer[0]
    how = {"layer": layer, "eps": eps, "order": order, "interpret": interpret}
    normed = functools.partial(_normed, given.rows, row, **how)
    columns, rank, rope = given.rows.shape[1], given.latent_norm.shape[-1], 2 * given.cos.shape[1]

    @pl.when((pl.program_id(1) == 0) & (write.is_real[row] != 0))
    def _():
        place, page = write.places[row], pools_ref.shape[3]
        number = write.table[write.request[row], lax.div(place, page)]
        store = functools.partial(_store, pools_ref, layer, 0, number, lax.rem(place, page), 0)
        x, column = normed(columns - rank - rope, given.latent_norm)
        store(column, x, column < rank)
        store_rotated(
            given.rows,
            given.cos,
            given.sin,
            row,
            columns - rope,
            True,
            lambda column, x, keep: store(rank + column, x, keep),
            is_interleaved=is_interleaved,
        )

    if queries_ref is not None:

        @pl.when(pl.program_id(1) > 0)
        def _():
            x, column = normed(0, given.query_norm)
            _store(queries_ref, row, column, x, column < queries_ref.shape[1])


def _normed(rows_ref, row, start, norm_ref, *, layer, eps, order, interpret):
    """Returns the RMS norm of some columns of a row, from sums of squares per chunk, and their
    numbers.
    """
    lead, size = (layer,) if len(norm_ref.shape) == 2 else (), norm_ref.shape[-1]
    spread = pl.next_power_of_2(pl.cdiv(size, order.chunk))
    part = lax.iota(jnp.int32, spread)[:, None] * order.chunk
    column = part + lax.iota(jnp.int32, order.chunk)[None, :]
    inside = column < size
    x = pltriton.load(rows_ref.at[row, start + column], mask=inside, other=0.0)
    x = x.astype(jnp.float32)
    squares = add_up(add_up(x * x, order.digits).reshape(1, spread), order.digits_of_chunks)
    squares = early(squares, interpret)
    x = x * lax.rsqrt(squares[:, None] * (1.0 / size) + eps)
    return x * pltriton.load(norm_ref.at[(*lead, column)], mask=inside, other=0.0), column


def _store(ref, *at_and_values):
    """Stores the last axis of an array where the mask allows; see `pltriton.store`."""
    *at, column, x, keep = at_and_values
    # Elements that are not stored get an index out of bounds, for the interpreter.
    column = jnp.where(keep, column, ref.shape[-1])
    pltriton.store(ref.at[(*at, column)], x.astype(ref.dtype), mask=keep)
