"""What a layer does with its heads before attention, in Pallas: norm, rotation, writing.

`mix` does it in the kernel that attends; where rows are many, `place` does it before `attend`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

from kernels.pallas_gpu.columns import columns_of, in_head, is_in_head, load_kept
from kernels.pallas_gpu.linear import let_next_start
from kernels.pallas_gpu.squares import add_up

_ROWS = 16  # of a program


def place(
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
    eps: float,
    digits: int,
    interpret: bool = False,
) -> tuple[Float[jax.Array, "R Hq D"], Float[jax.Array, "L 2 P page Hk D"]]:
    """Writes the rows' keys and values to a layer's pools, and gives the queries to attend with.

    The parts of `shared.spec.mix.mix` before its attention, or `mix_keys`, whose projection
    has no queries.

    Args:
      projected: Query heads, each with its gate behind it if `gated`; key heads; value heads.
      q_norm, k_norm: Scales of the heads' norms, if they have any; of the layer, or of all.
      cos, sin: Of the rotation at each row.
      kv, layer: The pools of all layers, and which is written. An operand: XLA compiles kernels
        of equal text once.
      page_table, request, places, is_real: Where the rows are written; padding is not.
      gated: Whether queries have gates.
      eps: Of the norms.
      digits: Of a unit of the squares: the order of the sums.
      interpret: Run on a CPU.

    Returns:
      The queries, and the pools after the writes.
    """
    R, (k_heads, D) = len(projected), kv.shape[4:]
    q_heads = (projected.shape[1] // D - 2 * k_heads) // (1 + gated)
    queries = [jax.ShapeDtypeStruct((R, q_heads, D), projected.dtype)] if q_heads else []
    found = pl.pallas_call(
        functools.partial(
            _place_kernel,
            q_heads=q_heads,
            gated=gated,
            has_norms=k_norm is not None,
            eps=eps,
            digits=digits,
            interpret=interpret,
        ),
        grid=(pl.cdiv(R, _ROWS), q_heads + k_heads),
        out_shape=[jax.ShapeDtypeStruct(kv.shape, kv.dtype), *queries],
        input_output_aliases={5: 0},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="place",
    )(
        projected,
        *(cos if norm is None else norm for norm in (q_norm, k_norm)),
        *(cos, sin, kv, layer, page_table, request, places, is_real.astype(jnp.int8)),
    )
    q = found[1] if queries else jnp.zeros((R, 0, D), projected.dtype)
    return q, found[0]


def _place_kernel(
    projected_ref,
    q_norm_ref,
    k_norm_ref,
    cos_ref,
    sin_ref,
    _,
    layer_ref,
    table_ref,
    request_ref,
    places_ref,
    real_ref,
    kv_ref,
    *q_refs,
    q_heads,
    gated,
    has_norms,
    eps,
    digits,
    interpret,
):
    """One program per block of rows and head, the query heads first."""
    R, D = projected_ref.shape[0], kv_ref.shape[5]
    row = early(pl.program_id(0) * _ROWS + lax.iota(jnp.int32, _ROWS), interpret)
    is_row, head, layer = row < R, pl.program_id(1), layer_ref[0]
    turn = functools.partial(
        turned,
        projected_ref,
        angles=(cos_ref, sin_ref),
        layer=layer,
        row=row,
        has_norms=has_norms,
        eps=eps,
        digits=digits,
        D=D,
    )
    if q_heads:

        @pl.when(head < q_heads)
        def _():
            q = turn(norm_ref=q_norm_ref, start=head * ((1 + gated) * D) + 0 * row, is_in=is_row)
            at = jnp.where(is_row, row, R)[:, None]  # outside, for the interpreter
            at = q_refs[0].at[at, head, columns_of(D)[None, :]]
            pltriton.store(at, q.astype(q_refs[0].dtype), mask=in_head(is_row[:, None], D))

    @pl.when(head >= q_heads)
    def _():
        is_real = is_row & (pltriton.load(real_ref.at[row], mask=is_row, other=0) != 0)
        request = pltriton.load(request_ref.at[row], mask=is_real, other=0)
        place = pltriton.load(places_ref.at[row], mask=is_real, other=0)
        start = (q_heads * (1 + gated) + head - q_heads) * D
        k = turn(norm_ref=k_norm_ref, start=start + 0 * row, is_in=is_real)
        write_pair(
            projected_ref, kv_ref, table_ref, layer, row, request, place, is_real,
            head - q_heads, start, k,
        )  # fmt: skip


def write_pair(projected_ref, kv_ref, table_ref, layer, row, request, place, is_in, head, start, k):
    """Writes the key and the value of some rows' key head at their places.

    `k` holds the keys, which began at column `start`; the values stand behind all keys.
    """
    _, _, P, page, k_heads, D = kv_ref.shape
    column, keep = columns_of(D)[None, :], in_head(is_in[:, None], D)
    values = start + k_heads * D + column
    v = pltriton.load(projected_ref.at[row[:, None], values], mask=keep, other=0.0)
    number = pltriton.load(table_ref.at[request, lax.div(place, page)], mask=is_in, other=0)
    # A row that is not written gets a page outside, for the interpreter.
    number, place = jnp.where(is_in, number, P)[:, None], lax.rem(place, page)[:, None]
    for which, x in enumerate((k.astype(kv_ref.dtype), v)):
        pltriton.store(kv_ref.at[layer, which, number, place, head, column], x, mask=keep)


def turned(x_ref, norm_ref, angles, layer, row, start, is_in, has_norms, eps, digits, D):
    """A head of some rows after its norm and the rotation, [rows, D] in float32.

    `start` is the head's first column.
    """
    fetched = fetch(x_ref, norm_ref, angles, layer, row, start, is_in, has_norms, D)
    return turn(fetched, angles[0].shape[1], has_norms, eps, digits, D)


def fetch(x_ref, norm_ref, angles, layer, row, start, is_in, has_norms, D):
    """What `turn` takes; each column is loaded beside the one that it is turned with."""
    half, column = angles[0].shape[1], columns_of(D)[None, :]
    keep = in_head(is_in[:, None], D)
    other = jnp.where(column < half, column + half, column - half)
    other = jnp.where(column < 2 * half, other, column)

    def load(ref, rows, columns, mask):
        return pltriton.load(ref.at[rows, columns], mask=mask, other=0.0).astype(jnp.float32)

    pair = [load(x_ref, row[:, None], start[:, None] + at, keep) for at in (column, other)]
    angle = jnp.where(column < half, column, column - half)
    both = [load(ref, row[:, None], angle, keep & (column < 2 * half)) for ref in angles]
    norms = None
    if has_norms:
        lead = (layer,) if len(norm_ref.shape) == 2 else ()
        scales = [norm_ref.at[(*lead, at[0])] for at in (column, other)]
        norms = [load_kept(at, is_in_head(D))[None, :] for at in scales]
    return pair, norms, both


def turn(fetched, half, has_norms, eps, digits, D):
    """See `turned`."""
    (x, y), norms, (cos, sin) = fetched
    if has_norms:
        mean = add_up(x * x, digits) * (1.0 / D)
        scale = lax.rsqrt(mean + eps)[:, None]
        x, y = (each * scale * norm for each, norm in zip((x, y), norms, strict=True))
    column = columns_of(D)[None, :]
    turned_x = x * cos + jnp.where(column < half, -y, y) * sin
    return jnp.where(column < 2 * half, turned_x, x)


def early(x, interpret):
    """Lets the next kernel start while this one runs; gives back `x`, whose use keeps it here."""
    return x if interpret else let_next_start(x)
