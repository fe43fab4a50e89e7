"""What a layer does with its heads before attention, in Triton: norm, rotation, writing.

`mix` does it in the kernel that attends; where rows are many, `place` does it before `attend`.
"""

import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton_gpu.columns import columns_of, in_head, load_head
from kernels.triton_gpu.linear import launching
from kernels.triton_gpu.squares import add_up

_ROWS = 16  # of a program


def place(
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
    eps: float,
    digits: int,
) -> Float[Tensor, "R Hq D"]:
    """Writes the rows' keys and values to a layer's pools, and gives the queries to attend with.

    The parts of `shared.spec.mix.mix` before its attention, or `mix_keys`, whose projection
    has no queries.

    Args:
      projected: Query heads, each with its gate behind it if `gated`; key heads; value heads.
      q_norm, k_norm: Scales of the heads' norms, if they have any.
      cos, sin: Of the rotation at each row.
      kv, layer: The pools of all layers, and which is written, in place.
      page_table, request, places, is_real: Where the rows are written; padding is not.
      gated: Whether queries have gates.
      eps: Of the norms.
      digits: Of a unit of the squares: the order of the sums.

    Raises:
      ValueError: The pools are not contiguous.
    """
    if not kv.is_contiguous():
        raise ValueError("the pools must be contiguous")
    rows = (projected, cos, sin, page_table, request, places, is_real)
    projected, cos, sin, page_table, *rows = (x.contiguous() for x in rows)
    R, (page, k_heads, D) = len(projected), kv.shape[3:]
    q_heads = (projected.shape[1] // D - 2 * k_heads) // (1 + gated)
    q = projected.new_empty((R, q_heads, D))
    _place_kernel[(triton.cdiv(R, _ROWS), q_heads + k_heads)](
        *(projected, cos if q_norm is None else q_norm, cos if k_norm is None else k_norm),
        *(cos, sin, q, kv[layer, 0], kv[layer, 1], page_table, *rows),
        *(R, page_table.shape[1], eps),
        q_heads=q_heads,
        k_heads=k_heads,
        D=D,
        half=cos.shape[1],
        gated=gated,
        has_norms=k_norm is not None,
        page=page,
        digits=digits,
        rows=_ROWS,
        num_warps=4,
        **launching(projected),
    )
    return q


@triton.jit(do_not_specialize=["num_rows", "columns"])
def _place_kernel(
    projected_at,
    q_norm_at,
    k_norm_at,
    cos_at,
    sin_at,
    q_at,
    k_at,
    v_at,
    table_at,
    request_at,
    places_at,
    real_at,
    num_rows,
    columns,
    eps,
    q_heads: tl.constexpr,
    k_heads: tl.constexpr,
    D: tl.constexpr,
    half: tl.constexpr,
    gated: tl.constexpr,
    has_norms: tl.constexpr,
    page: tl.constexpr,
    digits: tl.constexpr,
    rows: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of rows and head, the query heads first."""
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0) * rows + tl.arange(0, rows)
    is_row, head = row < num_rows, tl.program_id(1)
    width: tl.constexpr = (q_heads * (1 + gated) + 2 * k_heads) * D
    offset = row.to(tl.int64) * width
    if head < q_heads:
        offset += head * ((1 + gated) * D)
        q = turned(
            projected_at, offset, q_norm_at, cos_at, sin_at, row, is_row, eps,
            D, half, has_norms, digits,
        )  # fmt: skip
        at = (row.to(tl.int64) * q_heads + head)[:, None] * D + columns_of(D)[None, :]
        tl.store(q_at + at, q.to(q_at.dtype.element_ty), mask=in_head(is_row[:, None], D))
    else:
        is_real = tl.load(real_at + row, mask=is_row, other=0).to(tl.int32) != 0
        request = tl.load(request_at + row, mask=is_real, other=0)
        place = tl.load(places_at + row, mask=is_real, other=0)
        write_pair(
            projected_at, offset, k_norm_at, cos_at, sin_at, row, is_real, eps,
            k_at, v_at, table_at + request * columns, place, head - q_heads,
            q_heads * (1 + gated), k_heads, D, half, has_norms, page, digits,
        )  # fmt: skip


@triton.jit
def write_pair(
    projected_at,
    offset,
    norm_at,
    cos_at,
    sin_at,
    row,
    is_in,
    eps,
    k_at,
    v_at,
    table_at,
    place,
    head,
    before: tl.constexpr,
    k_heads: tl.constexpr,
    D: tl.constexpr,
    half: tl.constexpr,
    has_norms: tl.constexpr,
    page: tl.constexpr,
    digits: tl.constexpr,
):
    """Writes the key and the value of some rows' key head at their places.

    `before` is the number of heads that stand before the keys; `table_at` may differ by row.
    """
    offset = offset + (before + head) * D
    k = turned(
        projected_at, offset, norm_at, cos_at, sin_at, row, is_in, eps,
        D, half, has_norms, digits,
    )  # fmt: skip
    column, keep = columns_of(D)[None, :], in_head(is_in[:, None], D)
    v = tl.load(projected_at + (offset + k_heads * D)[:, None] + column, mask=keep, other=0.0)
    number = tl.load(table_at + place // page, mask=is_in, other=0).to(tl.int64)
    at = ((number * page + place % page) * k_heads + head)[:, None] * D + column
    tl.store(k_at + at, k.to(k_at.dtype.element_ty), mask=keep)
    tl.store(v_at + at, v, mask=keep)


@triton.jit
def turned(
    x_at,
    offset,
    norm_at,
    cos_at,
    sin_at,
    row,
    is_in,
    eps,
    D: tl.constexpr,
    half: tl.constexpr,
    has_norms: tl.constexpr,
    digits: tl.constexpr,
):
    """A head of some rows after its norm and the rotation, [rows, D] in float32."""
    fetched = fetch(x_at, offset, norm_at, cos_at, sin_at, row, is_in, D, half, has_norms)
    return turn(fetched, eps, D, half, has_norms, digits)


@triton.jit
def fetch(
    x_at,
    offset,
    norm_at,
    cos_at,
    sin_at,
    row,
    is_in,
    D: tl.constexpr,
    half: tl.constexpr,
    has_norms: tl.constexpr,
):
    """What `turn` takes; each column is loaded beside the one that it is turned with."""
    column, keep = columns_of(D)[None, :], in_head(is_in[:, None], D)
    other = tl.where(column < half, column + half, column - half)
    other = tl.where(column < 2 * half, other, column)
    x = tl.load(x_at + offset[:, None] + column, mask=keep, other=0.0)
    y = tl.load(x_at + offset[:, None] + other, mask=keep, other=0.0)
    angle = row.to(tl.int64)[:, None] * half + tl.where(column < half, column, column - half)
    is_turned = keep & (column < 2 * half)
    cos = tl.load(cos_at + angle, mask=is_turned, other=0.0)
    sin = tl.load(sin_at + angle, mask=is_turned, other=0.0)
    x_norm, y_norm = cos, sin  # nothing reads them without norms
    if has_norms:
        x_norm, y_norm = load_head(norm_at + column, D), load_head(norm_at + other, D)
    return x, y, x_norm, y_norm, cos, sin


@triton.jit
def turn(
    fetched,
    eps,
    D: tl.constexpr,
    half: tl.constexpr,
    has_norms: tl.constexpr,
    digits: tl.constexpr,
):
    """See `turned`."""
    x, y, cos, sin = fetched[0].to(tl.float32), fetched[1].to(tl.float32), fetched[4], fetched[5]
    if has_norms:
        mean = add_up(x * x, digits) * (1.0 / D)
        scale = tl.rsqrt(mean + eps)[:, None]
        x = x * scale * fetched[2]
        y = y * scale * fetched[3]
    column = columns_of(D)[None, :]
    turned_x = x * cos + tl.where(column < half, -y, y) * sin
    return tl.where(column < 2 * half, turned_x, x)
