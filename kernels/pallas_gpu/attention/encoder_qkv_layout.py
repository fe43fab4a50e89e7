"""RoPE and column-block layout of vision encoder queries, keys and values (Pallas, Triton backend).

Used by `bidirectional_attention` and `encoder_attention_sm90`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.encoder_head_sizes import EncoderHeadSizes


def pack_encoder_qkv(
    qkv: Float[jax.Array, "R columns"],
    cos: Float[jax.Array, "R half"],
    sin: Float[jax.Array, "R half"],
    count: Int[jax.Array, " 1"],
    rows: int,
    sizes: EncoderHeadSizes,
    *,
    interpret: bool,
) -> Float[jax.Array, "rows width"]:
    """Returns rotated queries and keys, and values: first blocks of all heads, then second blocks.

    Args:
      qkv, cos, sin, count: See `bidirectional_attention`.
      rows: Rows of the result; rows past the last patch repeat it.
      sizes: Columns of the heads and their blocks.
      interpret: Run on a CPU.
    """
    return pl.pallas_call(
        functools.partial(_pack_encoder_qkv_kernel, sizes=sizes),
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows, sizes.width), qkv.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="encoder_qkv_layout",
    )(qkv, cos, sin, count)


def _pack_encoder_qkv_kernel(qkv_ref, cos_ref, sin_ref, count_ref, out_ref, *, sizes):
    """One program per row: its rotated queries and keys, and its values."""
    row, half = pl.program_id(0), cos_ref.shape[1]
    patch = jnp.minimum(row, jnp.maximum(count_ref[0] - 1, 0))
    (heads, main, _, main_block, rest_block, beside_block), D = sizes, 2 * half
    column = lax.iota(jnp.int32, pl.next_power_of_2(sizes.width))

    def load(ref, at, mask):
        return pltriton.load(ref.at[patch, at], mask=mask, other=0.0).astype(jnp.float32)

    head, place = lax.div(column, main_block), lax.rem(column, main_block)
    is_rest, is_beside = column >= sizes.rests, column >= sizes.besides
    if rest_block:
        of_rest = column - sizes.rests
        head = jnp.where(is_rest, lax.div(of_rest, rest_block), head)
        place = jnp.where(is_rest, main + lax.rem(of_rest, rest_block), place)
    of_beside = column - sizes.besides
    head = jnp.where(is_beside, 2 * heads + lax.div(of_beside, beside_block), head)
    place = jnp.where(is_beside, main + lax.rem(of_beside, beside_block), place)
    inside = (column < sizes.width) & (place < jnp.where(is_rest, D, main))
    x = load(qkv_ref, head * D + place, inside)
    is_rotated, is_first = inside & (head < 2 * heads), place < half
    pair = jnp.where(is_first, place, place - half)
    y = load(qkv_ref, head * D + jnp.where(is_first, place + half, pair), is_rotated)
    cos, sin = load(cos_ref, pair, is_rotated), load(sin_ref, pair, is_rotated)
    out = jnp.where(is_first, x * cos - y * sin, x * cos + y * sin)
    out = jnp.where(head < 2 * heads, out, jnp.where(is_beside & (place == D), 1.0, x))
    inside = column < sizes.width
    # Columns that are not written get an index out of bounds, for the interpreter.
    to = out_ref.at[row, jnp.where(inside, column, sizes.width)]
    pltriton.store(to, out.astype(out_ref.dtype), mask=inside)
