"""Norms, RoPE and cache write of the rows of a latent attention layer (Triton).

The cache row of a token is final here: its normed latent, then its rotated rope key, each rounded
once. `head_product.latent_queries` rotates the queries.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.kernel_limits import row_warps
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.rope import store_rotated
from kernels.triton_gpu.gemm.sum_of_squares import add_up
from shared.spec.reduction_order import SquaresOrder


class LatentRowsSizes(NamedTuple):
    """Sizes of a call, compile-time constants.

    Attributes:
      columns: Columns of the projection; the last are the latent and the rope key.
      query_rank, rank: Elements of a query latent and of a latent.
      half, is_interleaved: Rotation of the rope key.
      page: Positions of a page.
      chunk, digits, digits_of_chunks: Reduction order of squares.
    """

    columns: int
    query_rank: int
    rank: int
    half: int
    is_interleaved: bool
    page: int
    chunk: int
    digits: int
    digits_of_chunks: int


class LatentRowsInputs(NamedTuple):
    """Rows of the projection, norm scales, RoPE angles, and epsilon of the norms."""

    rows: Any
    query_norm: Any
    latent_norm: Any
    cos: Any
    sin: Any
    eps: Any


class LatentWrite(NamedTuple):
    """Pool of a layer, page tables, and request and write position of each row."""

    pool: Any
    table: Any
    request: Any
    places: Any
    is_real: Any


def latent_rows(
    projected: Float[Tensor, "R columns"],
    query_norm: Float[Tensor, " rq"] | None,
    latent_norm: Float[Tensor, " r"],
    cos: Float[Tensor, "R half"],
    sin: Float[Tensor, "R half"],
    pools: Float[Tensor, "L 1 P page 1 latent_and_rope"],
    layer: int,
    page_table: Int[Tensor, "B table"],
    request: Int[Tensor, " R"],
    places: Int[Tensor, " R"],
    is_real: Bool[Tensor, " R"],
    *,
    eps: float,
    is_interleaved: bool,
    order: SquaresOrder,
) -> Float[Tensor, "R rq"] | None:
    """Writes the rows' latents and rope keys to a layer's pool, and returns the query latents.

    Args:
      projected: Rows that begin with the query latent, if there is one, and end with the latent
        and the rope key.
      query_norm, latent_norm: Norm scales; `query_norm` is None without query latents.
      cos, sin: RoPE cosine and sine of each row.
      pools, layer: Latent pools of all layers, and the index of the layer to write, in place.
      page_table, request, places, is_real: Page tables, and request and KV position of each row;
        padding is not written.
      eps: Epsilon of the norms.
      is_interleaved: Whether adjacent elements are rotated together; otherwise the halves are.
      order: Reduction order of squares.

    Returns:
      The normed query latents; None without query latents.

    Raises:
      ValueError: The pools are not contiguous.
    """
    if not pools.is_contiguous():
        raise ValueError("the pools must be contiguous")
    R, rank, query_rank = len(projected), len(latent_norm), 0
    projected, cos, sin, table = (x.contiguous() for x in (projected, cos, sin, page_table))
    queries = None
    if query_norm is not None:
        query_rank = len(query_norm)
        queries = torch.empty((R, query_rank), dtype=projected.dtype, device=projected.device)
    sizes = LatentRowsSizes(
        columns=projected.shape[1],
        query_rank=query_rank,
        rank=rank,
        half=cos.shape[1],
        is_interleaved=is_interleaved,
        page=pools.shape[3],
        chunk=order.chunk,
        digits=order.digits,
        digits_of_chunks=order.digits_of_chunks,
    )
    _latent_rows_kernel[(R, 1 + (query_norm is not None))](
        LatentRowsInputs(
            rows=projected,
            query_norm=latent_norm if query_norm is None else query_norm,
            latent_norm=latent_norm,
            cos=cos,
            sin=sin,
            eps=eps,
        ),
        LatentWrite(
            pool=pools[layer],
            table=table,
            request=request.contiguous(),
            places=places.contiguous(),
            is_real=is_real.contiguous(),
        ),
        projected if queries is None else queries,
        table.shape[1],
        sizes=sizes,
        num_warps=row_warps(max(rank, query_rank)),
        **launching(projected),
    )
    return queries


@triton.jit(do_not_specialize=["table_columns"])
def _latent_rows_kernel(
    given, write, queries_at, table_columns, sizes: tl.constexpr, is_launched: tl.constexpr
):
    """Two programs per row: its cache row, and its query latent if there is one."""
    query_rank: tl.constexpr = sizes.query_rank
    row = tl.program_id(0).to(tl.int64)
    x_at = given.rows + row * sizes.columns
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    part = tl.program_id(1)
    if query_rank > 0 and part > 0:
        out_at = queries_at + row * query_rank
        _store_normed(x_at, given.query_norm, given.eps, out_at, query_rank, sizes)
    is_real = tl.load(write.is_real + row).to(tl.int32) != 0
    if (part == 0) & is_real:
        _write_row(x_at, row, given, write, table_columns, sizes)


@triton.jit
def _write_row(x_at, row, given, write, table_columns, sizes: tl.constexpr):
    """Writes the normed latent and the rotated rope key of a row to its page."""
    rank: tl.constexpr = sizes.rank
    half: tl.constexpr = sizes.half
    x_at += sizes.columns - rank - 2 * half
    request, place = tl.load(write.request + row).to(tl.int64), tl.load(write.places + row)
    number = tl.load(write.table + request * table_columns + place // sizes.page).to(tl.int64)
    out_at = write.pool + (number * sizes.page + place % sizes.page) * (rank + 2 * half)
    _store_normed(x_at, given.latent_norm, given.eps, out_at, rank, sizes)
    store_rotated(
        x_at + rank,
        given.cos + row * half,
        given.sin + row * half,
        out_at + rank,
        half,
        half,
        sizes.is_interleaved,
    )


@triton.jit
def _store_normed(x_at, norm_at, eps, out_at, size: tl.constexpr, sizes: tl.constexpr):
    """Stores the RMS norm of `size` elements, from sums of squares per chunk."""
    chunk: tl.constexpr = sizes.chunk
    spread: tl.constexpr = triton.next_power_of_2(triton.cdiv(size, chunk))
    column = tl.arange(0, spread)[:, None] * chunk + tl.arange(0, chunk)[None, :]
    inside = column < size
    x = tl.load(x_at + column, mask=inside, other=0.0).to(tl.float32)
    sums = tl.reshape(add_up(x * x, sizes.digits), (1, spread))
    squares = add_up(sums, sizes.digits_of_chunks)
    x = x * tl.rsqrt(squares[:, None] * (1.0 / size) + eps)
    x = x * tl.load(norm_at + column, mask=inside, other=0.0)
    tl.store(out_at + column, x.to(out_at.dtype.element_ty), mask=inside)
