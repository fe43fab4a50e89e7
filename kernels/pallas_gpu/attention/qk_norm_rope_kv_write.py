"""QK norm, RoPE and KV cache write before attention (Pallas, Triton backend).

`attention_layer` fuses them into its attention kernel. For many rows, `qk_norm_rope_kv_write` runs
before `attend`.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

from kernels.pallas_gpu.attention.head_dim_padding import (
    columns_of,
    in_head,
    is_in_head,
    load_kept,
)
from kernels.pallas_gpu.gemm.linear_mainloop import let_next_start
from kernels.pallas_gpu.gemm.sum_of_squares import add_up


def _rows_of(D: int) -> int:
    """Returns the rows of a program, which has all columns of a head."""
    return 16 if D <= 256 else 4


class RopeArgs(NamedTuple):
    """QK norm and RoPE settings of heads of D elements; `half` is half of the rotated elements."""

    half: int
    has_norms: bool
    eps: float
    digits: int
    D: int


class Projected(NamedTuple):
    """Inputs of the heads: rows of the projection, norm scales and RoPE angles."""

    rows: Any
    q_norm: Any
    k_norm: Any
    cos: Any
    sin: Any


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
    projected: Float[jax.Array, "R outputs"],
    q_norm: Float[jax.Array, "*L D"] | None,
    k_norm: Float[jax.Array, "*L D"] | None,
    cos: Float[jax.Array, "R half"],
    sin: Float[jax.Array, "R half"],
    kv: Float[jax.Array, "L 2 P page Hk D"],
    layer: Int[jax.Array, " 1"],
    page_table: Int[jax.Array, "B table"],
    request: Int[jax.Array, " R"],
    places: Int[jax.Array, " R"],
    is_real: Bool[jax.Array, " R"],
    *,
    gated: bool,
    has_kv: bool,
    eps: float,
    digits: int,
    interpret: bool = False,
) -> tuple[Float[jax.Array, "R Hq D"], Float[jax.Array, "L 2 P page Hk D"]]:
    """Writes the rows' keys and values to a layer's pools, and returns the queries.

    Same as `shared.spec.attention_layer.attention_layer` up to attention, or as `write_kv` for a
    projection without queries.

    Args:
      projected: QKV projection: query heads, each followed by its gate if `gated`, then key heads,
        then value heads if `has_kv`.
      q_norm, k_norm: QK norm scales of the layer or of all layers; None without norms.
      cos, sin: RoPE cosine and sine of each row.
      kv, layer: KV pools of all layers, and the index of the layer to write. It is an operand,
        because XLA compiles kernels of equal text once.
      page_table, request, places, is_real: Page tables, and request and KV position of each row;
        padding is not written.
      gated: Whether each query head has a gate.
      has_kv: Whether the projection has keys and values; if not, none are written.
      eps: Epsilon of the norms.
      digits: Fractional bits of the fixed-point sums of squares; see `SquaresOrder`.
      interpret: Run on a CPU.

    Returns:
      The queries, and the pools after the writes.
    """
    R, (k_heads, D) = len(projected), kv.shape[4:]
    q_heads = (projected.shape[1] // D - 2 * k_heads * has_kv) // (1 + gated)
    queries = jax.ShapeDtypeStruct((R, q_heads, D), projected.dtype) if q_heads else None
    kv, q = pl.pallas_call(
        functools.partial(
            _qk_norm_rope_kv_write_kernel,
            q_heads=q_heads,
            gated=gated,
            turning=RopeArgs(cos.shape[1], q_norm is not None, eps, digits, D),
            interpret=interpret,
        ),
        grid=(pl.cdiv(R, _rows_of(D)), q_heads + k_heads * has_kv),
        out_shape=(jax.ShapeDtypeStruct(kv.shape, kv.dtype), queries),
        input_output_aliases={len(Projected._fields): 0},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="qk_norm_rope_kv_write",
    )(
        projected_of(projected, q_norm, k_norm, cos, sin),
        *(kv, layer, page_table),
        Written(request=request, places=places, is_real=is_real.astype(jnp.int8)),
    )
    return jnp.zeros((R, 0, D), projected.dtype) if q is None else q, kv


def projected_of(
    projected: Float[jax.Array, "R outputs"],
    q_norm: Float[jax.Array, "*L D"] | None,
    k_norm: Float[jax.Array, "*L D"] | None,
    cos: Float[jax.Array, "R half"],
    sin: Float[jax.Array, "R half"],
) -> Projected:
    """Returns the operands of a kernel; without norms, the angles fill the unread scales."""
    return Projected(
        rows=projected,
        q_norm=cos if q_norm is None else q_norm,
        k_norm=cos if k_norm is None else k_norm,
        cos=cos,
        sin=sin,
    )


def _qk_norm_rope_kv_write_kernel(
    projected,
    _,
    layer_ref,
    table_ref,
    written,
    kv_ref,
    q_ref,
    *,
    q_heads,
    gated,
    turning,
    interpret,
):
    """One program per block of rows and head, the query heads first."""
    R, D = projected.rows.shape[0], kv_ref.shape[5]
    rows = _rows_of(D)
    row = early(pl.program_id(0) * rows + lax.iota(jnp.int32, rows), interpret)
    is_row, head, layer = row < R, pl.program_id(1), layer_ref[0]

    def load_head_of(norm_ref, start, is_in):
        return load_rotated(projected, norm_ref, layer, row, start + 0 * row, is_in, turning)

    if q_ref is not None:

        @pl.when(head < q_heads)
        def _():
            q = load_head_of(projected.q_norm, head * ((1 + gated) * D), is_row)
            at = jnp.where(is_row, row, R)[:, None]  # out of bounds, for the interpreter
            at = q_ref.at[at, head, columns_of(D)[None, :]]
            pltriton.store(at, q.astype(q_ref.dtype), mask=in_head(is_row[:, None], D))

    @pl.when(head >= q_heads)
    def _():
        is_real = is_row & (pltriton.load(written.is_real.at[row], mask=is_row, other=0) != 0)
        request = pltriton.load(written.request.at[row], mask=is_real, other=0)
        place = pltriton.load(written.places.at[row], mask=is_real, other=0)
        start = (q_heads * (1 + gated) + head - q_heads) * D
        k = load_head_of(projected.k_norm, start, is_real)
        write_pair(
            projected.rows,
            kv_ref,
            table_ref,
            layer,
            row,
            request,
            place,
            is_real,
            head - q_heads,
            start,
            k,
        )


def write_pair(projected_ref, kv_ref, table_ref, layer, row, request, place, is_in, head, start, k):
    """Writes the keys and values of one KV head of some rows at their KV positions.

    `k` are the keys, from column `start` of the projection; the values follow all key heads.
    """
    _, _, P, page, k_heads, D = kv_ref.shape
    column, keep = columns_of(D)[None, :], in_head(is_in[:, None], D)
    values = start + k_heads * D + column
    v = pltriton.load(projected_ref.at[row[:, None], values], mask=keep, other=0.0)
    number = pltriton.load(table_ref.at[request, lax.div(place, page)], mask=is_in, other=0)
    # A row that is not written gets a page out of bounds, for the interpreter.
    number, place = jnp.where(is_in, number, P)[:, None], lax.rem(place, page)[:, None]
    for which, x in enumerate((k.astype(kv_ref.dtype), v)):
        pltriton.store(kv_ref.at[layer, which, number, place, head, column], x, mask=keep)


def load_rotated(projected, norm_ref, layer, row, start, is_in, turning):
    """Returns a head of some rows after QK norm and RoPE, [rows, D] in float32.

    `start` is the head's first column.
    """
    return rotate(fetch(projected, norm_ref, layer, row, start, is_in, turning), turning)


def fetch(projected, norm_ref, layer, row, start, is_in, turning):
    """Loads the inputs of `rotate`; each column comes with its RoPE partner."""
    half, column = turning.half, columns_of(turning.D)[None, :]
    keep = in_head(is_in[:, None], turning.D)
    partner = jnp.where(column < half, column + half, column - half)
    partner = jnp.where(column < 2 * half, partner, column)

    def load(ref, columns, mask):
        at = ref.at[row[:, None], columns]
        return pltriton.load(at, mask=mask, other=0.0).astype(jnp.float32)

    x, other = (load(projected.rows, start[:, None] + at, keep) for at in (column, partner))
    angle = jnp.where(column < half, column, column - half)
    is_rotated = keep & (column < 2 * half)
    cos, sin = (load(ref, angle, is_rotated) for ref in (projected.cos, projected.sin))
    x_norm = other_norm = None
    if turning.has_norms:
        lead = (layer,) if len(norm_ref.shape) == 2 else ()
        x_norm, other_norm = (
            load_kept(norm_ref.at[(*lead, at[0])], is_in_head(turning.D))[None, :]
            for at in (column, partner)
        )
    return Fetched(x=x, other=other, x_norm=x_norm, other_norm=other_norm, cos=cos, sin=sin)


def rotate(fetched, turning):
    """Applies QK norm and RoPE to loaded heads."""
    x, other = fetched.x, fetched.other
    if turning.has_norms:
        mean = add_up(x * x, turning.digits) * (1.0 / turning.D)
        scale = lax.rsqrt(mean + turning.eps)[:, None]
        x, other = x * scale * fetched.x_norm, other * scale * fetched.other_norm
    column = columns_of(turning.D)[None, :]
    rotated = x * fetched.cos + jnp.where(column < turning.half, -other, other) * fetched.sin
    return jnp.where(column < 2 * turning.half, rotated, x)


def early(x, interpret):
    """Lets the next kernel launch early (PDL); returns `x`, which must be used."""
    return x if interpret else let_next_start(x)


def is_bad_line(v):
    """Returns the new rows that have a NaN or infinite value.

    0 x NaN is NaN: such values are not read, and the rows that attend to them get NaN.
    """
    return jnp.max(jnp.where(jnp.abs(v) < jnp.inf, 0, 1), axis=1) > 0
