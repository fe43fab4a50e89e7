"""Attention of a picture's patches, which see each other, on the Triton lowering of Pallas.

A first kernel turns queries and keys and lays each head in blocks; then a program sums the values
of all patches for a block of rows of one head, tile by tile from the first patch on. So a row's
sums have one order, whatever the padding. What must stay equal in the Triton twin is listed in
`kernels/__init__.py`.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Int

from kernels.tiles import AttendAllTiles

LOG2_E = 1.4426950408889634
NEGATIVE = -1e30
EXACT = {"precision": lax.Precision.HIGHEST}  # float32 stays float32, no tf32


def attend_all(
    qkv: Float[jax.Array, "R columns"],
    cos: Float[jax.Array, "R half"],
    sin: Float[jax.Array, "R half"],
    count: Int[jax.Array, " 1"],
    *,
    tile: int,
    scale: float,
    tiles: AttendAllTiles,
    interpret: bool = False,
) -> Float[jax.Array, "R hidden"]:
    """As `shared.spec.attention.attend_all`, its heads side by side; rows of padding are 0.

    Args:
      tile: Patches that are added at once: the order of the sums.
      scale: What scores are multiplied by.
      tiles: How the work is cut otherwise.
      interpret: Run on a CPU.
    """
    (R, columns), D = qkv.shape, 2 * cos.shape[1]
    sizes = _sizes(columns // 3 // D, D)
    laid = pl.pallas_call(
        functools.partial(_lay_kernel, sizes=sizes),
        grid=(R,),
        out_shape=jax.ShapeDtypeStruct((R, sizes.width), qkv.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="lay",
    )(qkv, cos, sin)
    how = {"sizes": sizes, "tile": tile, "scale": scale * LOG2_E, "lanes": tiles.lanes}
    return pl.pallas_call(
        functools.partial(_attend_kernel, **how),
        grid=(pl.cdiv(R, tiles.lanes), sizes.heads),
        out_shape=jax.ShapeDtypeStruct((R, columns // 3), qkv.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="attend_all",
    )(laid, qkv, count)


class Sizes(NamedTuple):
    """Of a head, and of the blocks that hold it, which are powers of two.

    Attributes:
      heads: How many there are.
      main, rest: Columns of a head in each of its two blocks, or all of them and 0.
      main_block, rest_block: Columns of each block of queries and keys; those past the head's are
        0. Without a rest there is no second block.
      beside_block: Of the second block of values, which has a 1 behind the rest.
    """

    heads: int
    main: int
    rest: int
    main_block: int
    rest_block: int
    beside_block: int

    @property
    def padded(self):
        """Columns of the queries, or the keys, of a head."""
        return self.main_block + self.rest_block

    @property
    def turned(self):
        """Columns of the queries and keys of all heads."""
        return 2 * self.heads * self.padded

    @property
    def width(self):
        """Columns of all that is laid in blocks."""
        return self.turned + self.heads * self.beside_block


class Rows(NamedTuple):
    """Where queries and keys, and values lie; which head it is, and how many patches there are.

    Attributes:
      scale: Of scores, by which 2 is raised.
    """

    laid_ref: object
    qkv_ref: object
    head: jax.Array
    count: jax.Array
    scale: float


class Sums(NamedTuple):
    """Over some patches: the highest score, and the weighted values of both blocks.

    Behind the rest of the second stands the sum of the weights, as its values are 1.
    """

    peak: jax.Array
    main: jax.Array
    beside: jax.Array


def _sizes(heads, D):
    main = 1 << (D.bit_length() - 1)
    rest = D - main
    return Sizes(
        heads=heads,
        main=main,
        rest=rest,
        main_block=max(16, main),  # of fewer a matrix unit takes none
        rest_block=max(16, pl.next_power_of_2(rest)) if rest else 0,
        beside_block=max(16, pl.next_power_of_2(rest + 1)),
    )


def _lay_kernel(qkv_ref, cos_ref, sin_ref, out_ref, *, sizes):
    """One program a row: its queries and keys, turned, and its values' second blocks."""
    row, half = pl.program_id(0), cos_ref.shape[1]
    (heads, main, rest, main_block, _, beside_block), D = sizes, 2 * half
    column = lax.iota(jnp.int32, pl.next_power_of_2(sizes.width))

    def load(ref, at, mask):
        return pltriton.load(ref.at[row, at], mask=mask, other=0.0).astype(jnp.float32)

    within = lax.rem(column, sizes.padded)
    is_rest = within >= main_block
    place = jnp.where(is_rest, within - main_block + main, within)
    inside = (column < sizes.turned) & (place < jnp.where(is_rest, D, main))
    is_first = place < half
    pair = jnp.where(is_first, place, place - half)
    at = lax.div(column, sizes.padded) * D + place
    x, y = (
        load(qkv_ref, at, inside),
        load(qkv_ref, jnp.where(is_first, at + half, at - half), inside),
    )
    cos, sin = load(cos_ref, pair, inside), load(sin_ref, pair, inside)
    out = jnp.where(is_first, x * cos - y * sin, x * cos + y * sin)
    beside = jnp.maximum(column - sizes.turned, 0)
    part, head = lax.rem(beside, beside_block), lax.div(beside, beside_block)
    is_value = (column >= sizes.turned) & (column < sizes.width)
    value = load(qkv_ref, (2 * heads + head) * D + main + part, is_value & (part < rest))
    out = jnp.where(is_value, jnp.where(part == rest, 1.0, value), out)
    inside = column < sizes.width
    # A column that is not written gets an index outside, for the interpreter.
    to = out_ref.at[row, jnp.where(inside, column, sizes.width)]
    pltriton.store(to, out.astype(out_ref.dtype), mask=inside)


def _attend_kernel(laid_ref, qkv_ref, count_ref, out_ref, *, sizes, tile, scale, lanes):
    """One program per block of rows and head."""
    first, head, count = pl.program_id(0) * lanes, pl.program_id(1), count_ref[0]
    row, D = first + lax.iota(jnp.int32, lanes), sizes.main + sizes.rest
    sums = Sums(
        peak=jnp.full((lanes,), NEGATIVE, jnp.float32),
        main=jnp.zeros((lanes, sizes.main_block), jnp.float32),
        beside=jnp.zeros((lanes, sizes.beside_block), jnp.float32),
    )
    # Padding's rows are those of the last patch again, of which nothing is kept.
    end = jnp.where(first < count, count, 0)
    patch = jnp.minimum(row, jnp.maximum(count - 1, 0))
    q = _blocks(laid_ref, patch, head * sizes.padded, sizes)
    rows = Rows(laid_ref, qkv_ref, head, count, scale)
    add = functools.partial(_add_tile, q, rows, sizes, tile)
    sums = lax.fori_loop(0, pl.cdiv(end, tile), add, sums)
    is_weight = lax.iota(jnp.int32, sizes.beside_block)[None, :] == sizes.rest
    weight = jnp.maximum(jnp.where(is_weight, sums.beside, 0.0).max(axis=1), 1e-30)[:, None]
    _store(out_ref, sums.main / weight, row, head * D, sizes.main)
    if sizes.rest:
        _store(out_ref, sums.beside / weight, row, head * D + sizes.main, sizes.rest)


def _add_tile(q, rows, sizes, tile, i, sums):
    """Adds a tile of patches to the sums of a block of rows.

    Behind the last patch stands that one again, with no weight. So the tile that is not whole is
    no other code: its loads, masked by rows in a loop of its own, gave the columns of a head's
    second block other values in one of the languages on an H100.
    """
    heads, D = sizes.heads, sizes.main + sizes.rest
    patch = i * tile + lax.iota(jnp.int32, tile)
    behind = jnp.where(patch < rows.count, 0.0, NEGATIVE)
    patch = jnp.minimum(patch, rows.count - 1)
    keys = _blocks(rows.laid_ref, patch, (heads + rows.head) * sizes.padded, sizes)
    scores = pltriton.dot(q[0], keys[0].T, **EXACT)
    for mine, theirs in zip(q[1:], keys[1:], strict=True):
        scores += pltriton.dot(mine, theirs.T, **EXACT)
    scores = scores * rows.scale + behind[None, :]
    highest = jnp.maximum(sums.peak, scores.max(axis=1))
    weights = jnp.exp2(scores - highest[:, None]).astype(q[0].dtype)
    decay = jnp.exp2(sums.peak - highest)[:, None]
    v = _load(rows.qkv_ref, patch, (2 * heads + rows.head) * D, sizes.main, sizes.main_block)
    main = sums.main * decay + pltriton.dot(weights, v, **EXACT)
    # The matrix unit adds in one order for any number of rows; a sum over lanes does not.
    first, width = sizes.turned + rows.head * sizes.beside_block, sizes.beside_block
    v = _load(rows.laid_ref, patch, first, width, width)
    beside = sums.beside * decay + pltriton.dot(weights, v, **EXACT)
    return Sums(highest, main, beside)


def _blocks(ref, row, first, sizes):
    """Of the queries or keys of some rows and a head, the one block or both."""
    widths = [each for each in (sizes.main_block, sizes.rest_block) if each]
    starts = [first, first + sizes.main_block]
    return [_load(ref, row, at, each, each) for at, each in zip(starts, widths, strict=False)]


def _load(ref, row, first, width, block):
    """Some columns of some rows as a block, whose others are 0."""
    column = lax.iota(jnp.int32, block)[None, :]
    at = ref.at[row[:, None], first + column]
    if width == block:
        return pltriton.load(at)
    return pltriton.load(at, mask=column < width, other=0.0)


def _store(out_ref, x, row, first, width):
    (R, hidden), column = out_ref.shape, lax.iota(jnp.int32, x.shape[1])[None, :]
    row, is_written = row[:, None], column < width
    # What is not written gets a place outside, for the interpreter.
    to = out_ref.at[jnp.where(row < R, row, R), jnp.where(is_written, first + column, hidden)]
    pltriton.store(to, x.astype(out_ref.dtype), mask=(row < R) & is_written)
