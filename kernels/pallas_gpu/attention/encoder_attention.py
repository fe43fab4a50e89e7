"""Bidirectional vision encoder attention with online softmax (Pallas, Triton backend).

A first kernel applies RoPE to queries and keys and writes each head in column blocks. A program
then processes a block of rows of one head, tile by tile from the first patch. The reduction order
of a row therefore does not depend on the padding. `kernels/__init__.py` lists what must equal the
Triton twin.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.encoder_head_sizes import sizes_of
from kernels.pallas_gpu.attention.encoder_attention_sm90 import (
    encoder_attention_sm90,
    takes,
)
from kernels.pallas_gpu.attention.encoder_qkv_layout import pack_encoder_qkv
from kernels.tiles import EncoderAttentionTiles

LOG2_E = 1.4426950408889634
NEGATIVE = -1e30
EXACT = {"precision": lax.Precision.HIGHEST}  # float32 stays float32, no tf32


def bidirectional_attention(
    qkv: Float[jax.Array, "R columns"],
    cos: Float[jax.Array, "R half"],
    sin: Float[jax.Array, "R half"],
    count: Int[jax.Array, " 1"],
    *,
    tile: int,
    scale: float,
    tiles: EncoderAttentionTiles,
    interpret: bool = False,
) -> Float[jax.Array, "R hidden"]:
    """Same as `shared.spec.attention.bidirectional_attention`.

    Args:
      qkv, cos, sin, count: See the specification.
      tile: Patches of a tile; it fixes the reduction order.
      scale: Multiplier of the scores.
      tiles: Tile config.
      interpret: Run on a CPU.
    """
    (R, columns), D = qkv.shape, 2 * cos.shape[1]
    sizes = sizes_of(columns // 3 // D, D)
    if tiles.described and takes(qkv, D, tile):
        rows = pl.cdiv(R, tiles.groups * tile) * tiles.groups * tile
        laid = pack_encoder_qkv(qkv, cos, sin, count, rows, sizes, interpret=interpret)
        settings = {"heads": sizes.heads, "scale": scale * LOG2_E, "tiles": tiles}
        return encoder_attention_sm90(laid, count, R, **settings)
    laid = pack_encoder_qkv(qkv, cos, sin, count, R, sizes, interpret=interpret)
    settings = {"sizes": sizes, "tile": tile, "scale": scale * LOG2_E, "lanes": tiles.lanes}
    return pl.pallas_call(
        functools.partial(_attend_kernel, **settings),
        grid=(pl.cdiv(R, tiles.lanes), sizes.heads),
        out_shape=jax.ShapeDtypeStruct((R, columns // 3), qkv.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="encoder_attention",
    )(laid, count)


class PatchRows(NamedTuple):
    """Operands of a program: queries, keys and values, the head, and the number of patches.

    Attributes:
      scale: Multiplier of the scores, times log2(e).
    """

    laid_ref: object
    head: jax.Array
    count: jax.Array
    scale: float


class EncoderSoftmaxState(NamedTuple):
    """Online softmax accumulator: maximum score, weighted values of a head's two column blocks.

    Column `rest` of the second block is the total weight, because its values are 1.
    """

    peak: jax.Array
    main: jax.Array
    beside: jax.Array


def _attend_kernel(laid_ref, count_ref, out_ref, *, sizes, tile, scale, lanes):
    """One program per block of rows and head."""
    first, head, count = pl.program_id(0) * lanes, pl.program_id(1), count_ref[0]
    row, D = first + lax.iota(jnp.int32, lanes), sizes.main + sizes.rest
    sums = EncoderSoftmaxState(
        peak=jnp.full((lanes,), NEGATIVE, jnp.float32),
        main=jnp.zeros((lanes, sizes.main_block), jnp.float32),
        beside=jnp.zeros((lanes, sizes.beside_block), jnp.float32),
    )
    # Padding rows repeat the last patch; a block of padding alone adds no tile.
    end = jnp.where(first < count, count, 0)
    patch = jnp.minimum(row, jnp.maximum(count - 1, 0))
    q = _blocks(laid_ref, patch, head, sizes)
    rows = PatchRows(laid_ref, head, count, scale)
    add = functools.partial(_add_tile, q, rows, sizes, tile)
    sums = lax.fori_loop(0, pl.cdiv(end, tile), add, sums)
    is_weight = lax.iota(jnp.int32, sizes.beside_block)[None, :] == sizes.rest
    weight = jnp.maximum(jnp.where(is_weight, sums.beside, 0.0).max(axis=1), 1e-30)[:, None]
    _store(out_ref, sums.main / weight, row, head * D, sizes.main)
    if sizes.rest:
        _store(out_ref, sums.beside / weight, row, head * D + sizes.main, sizes.rest)


def _add_tile(q, rows, sizes, tile, i, sums):
    """Adds a tile of patches to the accumulators of a block of rows.

    The last patch is repeated to the end of its tile, with weight 0, so a partial tile needs no
    separate code. Masked loads in a separate loop gave the second column block of a head other
    values in one of the languages on an H100.
    """
    patch = i * tile + lax.iota(jnp.int32, tile)
    padding_bias = jnp.where(patch < rows.count, 0.0, NEGATIVE)
    patch = jnp.minimum(patch, rows.count - 1)
    keys = _blocks(rows.laid_ref, patch, sizes.heads + rows.head, sizes)
    scores = pltriton.dot(q[0], keys[0].T, **EXACT)
    for mine, theirs in zip(q[1:], keys[1:], strict=True):
        scores += pltriton.dot(mine, theirs.T, **EXACT)
    scores = scores * rows.scale + padding_bias[None, :]
    highest = jnp.maximum(sums.peak, scores.max(axis=1))
    weights = jnp.exp2(scores - highest[:, None]).astype(q[0].dtype)
    decay = jnp.exp2(sums.peak - highest)[:, None]
    v = _load(rows.laid_ref, patch, 2 * sizes.heads + rows.head, 0, sizes.main_block)
    main = sums.main * decay + pltriton.dot(weights, v, **EXACT)
    # Tensor cores sum in one order for any number of rows; a reduction over threads does not.
    v = _load(rows.laid_ref, patch, rows.head, sizes.besides, sizes.beside_block)
    beside = sums.beside * decay + pltriton.dot(weights, v, **EXACT)
    return EncoderSoftmaxState(highest, main, beside)


def _blocks(ref, row, head, sizes):
    """Loads one or both blocks of the queries or keys of some rows and a head."""
    blocks = [(0, sizes.main_block), (sizes.rests, sizes.rest_block)]
    return [_load(ref, row, head, first, width) for first, width in blocks if width]


def _load(ref, row, number, first, width):
    """Loads some rows of column block `number`; block 0 begins at column `first`."""
    column = first + number * width + lax.iota(jnp.int32, width)
    return pltriton.load(ref.at[row[:, None], column[None, :]])


def _store(out_ref, x, row, first, width):
    (R, hidden), column = out_ref.shape, lax.iota(jnp.int32, x.shape[1])[None, :]
    row, is_written = row[:, None], column < width
    # Elements that are not written get an index out of bounds, for the interpreter.
    to = out_ref.at[jnp.where(row < R, row, R), jnp.where(is_written, first + column, hidden)]
    pltriton.store(to, x.astype(out_ref.dtype), mask=(row < R) & is_written)
