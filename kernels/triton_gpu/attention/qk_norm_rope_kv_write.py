"""QK norm, RoPE and KV cache write before attention (Triton).

`attention_layer` fuses them into its attention kernel. For many rows, `qk_norm_rope_kv_write` runs
before `attend`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton_gpu.attention.head_dim_padding import columns_of, in_head, load_head
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.sum_of_squares import add_up


def _rows_of(D: int) -> int:
    """Returns the rows of a program, which has all columns of a head."""
    return 16 if D <= 256 else 4


class HeadSizes(NamedTuple):
    """Head counts and sizes of a layer.

    Attributes:
      D: Elements of a head.
      page: Positions of a page.
      gated: Whether each query head is followed by its gate.
      line: Elements from one row of the projection to the next.
    """

    q_heads: int
    k_heads: int
    D: int
    page: int
    gated: bool
    line: int


class RopeArgs(NamedTuple):
    """QK norm and RoPE settings; `half` is half of the rotated elements."""

    half: int
    has_norms: bool
    digits: int


class Projected(NamedTuple):
    """Inputs of the heads: rows of the projection, norm scales and RoPE angles."""

    rows: Any
    q_norm: Any
    k_norm: Any
    cos: Any
    sin: Any
    eps: Any


class Pool(NamedTuple):
    """KV pools of a layer, and the page table of a request or of all requests."""

    k: Any
    v: Any
    table: Any


class Written(NamedTuple):
    """Request and write position of each row; padding is not written."""

    request: Any
    places: Any
    is_real: Any


class Fetched(NamedTuple):
    """Inputs of `rotate`: head elements and their RoPE partners, norm scales of both, and
    angles.
    """

    x: Any
    other: Any
    x_norm: Any
    other_norm: Any
    cos: Any
    sin: Any


def qk_norm_rope_kv_write(
    projected: Float[Tensor, "R outputs"],
    q_norm: Float[Tensor, " D"] | None,
    k_norm: Float[Tensor, " D"] | None,
    cos: Float[Tensor, "R half"],
    sin: Float[Tensor, "R half"],
    kv: Float[Tensor, "L 2 P page Hk D"],
    layer: int,
    page_table: Int[Tensor, "B table"],
    request: Int[Tensor, " R"],
    places: Int[Tensor, " R"],
    is_real: Bool[Tensor, " R"],
    *,
    gated: bool,
    has_kv: bool,
    eps: float,
    digits: int,
) -> Float[Tensor, "R Hq D"]:
    """Writes the rows' keys and values to a layer's pools, and returns the queries.

    Same as `shared.spec.attention_layer.attention_layer` up to attention, or as `write_kv` for a
    projection without queries.

    Args:
      projected: QKV projection: query heads, each followed by its gate if `gated`, then key heads,
        then value heads if `has_kv`.
      q_norm, k_norm: QK norm scales; None without norms.
      cos, sin: RoPE cosine and sine of each row.
      kv, layer: KV pools of all layers, and the index of the layer to write, in place.
      page_table, request, places, is_real: Page tables, and request and KV position of each row;
        padding is not written.
      gated: Whether each query head has a gate.
      has_kv: Whether the projection has keys and values; if not, none are written.
      eps: Epsilon of the norms.
      digits: Fractional bits of the fixed-point sums of squares; see `SquaresOrder`.

    Raises:
      ValueError: The pools are not contiguous.
    """
    if not kv.is_contiguous():
        raise ValueError("the pools must be contiguous")
    R, half, (page, k_heads, D) = len(projected), cos.shape[1], kv.shape[3:]
    projected, cos, sin, table = (x.contiguous() for x in (projected, cos, sin, page_table))
    q_heads = (projected.shape[1] // D - 2 * k_heads * has_kv) // (1 + gated)
    q = projected.new_empty((R, q_heads, D))
    _qk_norm_rope_kv_write_kernel[(triton.cdiv(R, _rows_of(D)), q_heads + k_heads * has_kv)](
        projected_of(projected, q_norm, k_norm, cos, sin, eps),
        Pool(k=kv[layer, 0], v=kv[layer, 1], table=table),
        Written(
            request=request.contiguous(),
            places=places.contiguous(),
            is_real=is_real.contiguous(),
        ),
        q,
        num_rows=R,
        columns=table.shape[1],
        heads=HeadSizes(
            q_heads=q_heads,
            k_heads=k_heads,
            D=D,
            page=page,
            gated=gated,
            line=projected.shape[1],
        ),
        turning=RopeArgs(half=half, has_norms=q_norm is not None, digits=digits),
        rows=_rows_of(D),
        num_warps=4,
        **launching(projected),
    )
    return q


def projected_of(
    projected: Float[Tensor, "R outputs"],
    q_norm: Float[Tensor, " D"] | None,
    k_norm: Float[Tensor, " D"] | None,
    cos: Float[Tensor, "R half"],
    sin: Float[Tensor, "R half"],
    eps: float,
) -> Projected:
    """Returns the operands of a kernel; without norms, the angles fill the unread scales."""
    return Projected(
        rows=projected,
        q_norm=cos if q_norm is None else q_norm,
        k_norm=cos if k_norm is None else k_norm,
        cos=cos,
        sin=sin,
        eps=eps,
    )


@triton.jit(do_not_specialize=["num_rows", "columns"])
def _qk_norm_rope_kv_write_kernel(
    projected,
    pool,
    written,
    q_at,
    num_rows,
    columns,
    heads: tl.constexpr,
    turning: tl.constexpr,
    rows: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of rows and head, the query heads first."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    D: tl.constexpr = heads.D
    each: tl.constexpr = (1 + heads.gated) * D
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    is_row, head = row < num_rows, tl.program_id(1)
    offset = row.to(tl.int64) * heads.line
    if head < heads.q_heads:
        offset += head * each
        q = load_rotated(projected, projected.q_norm, offset, row, is_row, heads, turning)
        at = (row.to(tl.int64) * heads.q_heads + head)[:, None] * D + columns_of(D)[None, :]
        tl.store(q_at + at, q.to(q_at.dtype.element_ty), mask=in_head(is_row[:, None], D))
    else:
        is_real = tl.load(written.is_real + row, mask=is_row, other=0).to(tl.int32) != 0
        request = tl.load(written.request + row, mask=is_real, other=0)
        place = tl.load(written.places + row, mask=is_real, other=0)
        head -= heads.q_heads
        request_pool = Pool(k=pool.k, v=pool.v, table=pool.table + request * columns)
        write_pair(projected, request_pool, offset, row, is_real, place, head, heads, turning)


@triton.jit
def write_pair(
    projected, pool, offset, row, is_in, place, head, heads: tl.constexpr, turning: tl.constexpr
):
    """Writes the keys and values of one KV head of some rows at their KV positions.

    `pool.table` is the page table of the rows' request, and may differ by row.
    """
    D: tl.constexpr = heads.D
    offset = offset + (heads.q_heads * (1 + heads.gated) + head) * D
    k = load_rotated(projected, projected.k_norm, offset, row, is_in, heads, turning)
    column, keep = columns_of(D)[None, :], in_head(is_in[:, None], D)
    values_at = projected.rows + (offset + heads.k_heads * D)[:, None] + column
    v = tl.load(values_at, mask=keep, other=0.0)
    number = tl.load(pool.table + place // heads.page, mask=is_in, other=0).to(tl.int64)
    at = (number * heads.page + place % heads.page) * heads.k_heads + head
    at = at[:, None] * D + column
    tl.store(pool.k + at, k.to(pool.k.dtype.element_ty), mask=keep)
    tl.store(pool.v + at, v, mask=keep)


@triton.jit
def load_rotated(
    projected, norm_at, offset, row, is_in, heads: tl.constexpr, turning: tl.constexpr
):
    """Returns a head of some rows after QK norm and RoPE, [rows, D] in float32."""
    fetched = fetch(projected, norm_at, offset, row, is_in, heads, turning)
    return rotate(fetched, projected.eps, heads, turning)


@triton.jit
def fetch(projected, norm_at, offset, row, is_in, heads: tl.constexpr, turning: tl.constexpr):
    """Loads the inputs of `rotate`; each column comes with its RoPE partner."""
    D: tl.constexpr = heads.D
    half: tl.constexpr = turning.half
    column, keep = columns_of(D)[None, :], in_head(is_in[:, None], D)
    partner = tl.where(column < half, column + half, column - half)
    partner = tl.where(column < 2 * half, partner, column)
    x = tl.load(projected.rows + offset[:, None] + column, mask=keep, other=0.0)
    other = tl.load(projected.rows + offset[:, None] + partner, mask=keep, other=0.0)
    angle = row.to(tl.int64)[:, None] * half + tl.where(column < half, column, column - half)
    is_rotated = keep & (column < 2 * half)
    cos = tl.load(projected.cos + angle, mask=is_rotated, other=0.0)
    sin = tl.load(projected.sin + angle, mask=is_rotated, other=0.0)
    x_norm, other_norm = cos, sin  # not read without norms
    if turning.has_norms:
        x_norm, other_norm = load_head(norm_at + column, D), load_head(norm_at + partner, D)
    return Fetched(x=x, other=other, x_norm=x_norm, other_norm=other_norm, cos=cos, sin=sin)


@triton.jit
def rotate(fetched, eps, heads: tl.constexpr, turning: tl.constexpr):
    """Applies QK norm and RoPE to loaded heads."""
    x, other = fetched.x.to(tl.float32), fetched.other.to(tl.float32)
    if turning.has_norms:
        mean = add_up(x * x, turning.digits) * (1.0 / heads.D)
        scale = tl.rsqrt(mean + eps)[:, None]
        x = x * scale * fetched.x_norm
        other = other * scale * fetched.other_norm
    column = columns_of(heads.D)[None, :]
    rotated = x * fetched.cos + tl.where(column < turning.half, -other, other) * fetched.sin
    return tl.where(column < 2 * turning.half, rotated, x)


@triton.jit
def is_bad_line(values_at, at, is_new, D: tl.constexpr):
    """Returns the new rows that have a NaN or infinite value; their values begin at `at`.

    0 x NaN is NaN: such values are not read, and the rows that attend to them get NaN.
    """
    keep = in_head(is_new[:, None], D)
    v = tl.load(values_at + at[:, None] + columns_of(D)[None, :], mask=keep, other=0)
    return tl.max(tl.where(tl.abs(v) < float("inf"), 0, 1), axis=1) > 0
