"""Attention of a picture's patches, which see each other, on the Triton lowering of Pallas.

A first kernel turns queries and keys; then a program sums the values of all patches for a block of
rows of one head, tile by tile from the first patch on. So a row's sums have one order, whatever the
padding. What must stay equal in the Triton twin is listed in `kernels/__init__.py`.
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
    hidden = columns // 3
    turned = pl.pallas_call(
        _turn_kernel,
        grid=(R,),
        out_shape=jax.ShapeDtypeStruct((R, 2 * hidden), qkv.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="turn",
    )(qkv, cos, sin)
    sizes = {"D": D, "tile": tile, "scale": scale * LOG2_E}
    return pl.pallas_call(
        functools.partial(_attend_kernel, **sizes, lanes=tiles.lanes, ones=tiles.ones),
        grid=(pl.cdiv(R, tiles.lanes), hidden // D),
        out_shape=jax.ShapeDtypeStruct((R, hidden), qkv.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="attend_all",
    )(turned, qkv, count)


class Piece(NamedTuple):
    """Columns of a head as a block, whose size is a power of two.

    Attributes:
      first, width: Of the head's columns.
      block: Columns of the block; those past the head's are 0.
    """

    first: int
    width: int
    block: int


class Rows(NamedTuple):
    """Where queries and keys, and values lie; the head's first column, and how many patches.

    Attributes:
      scale: Of scores, by which 2 is raised.
    """

    turned_ref: object
    qkv_ref: object
    head: jax.Array
    count: jax.Array
    scale: float


class Sums(NamedTuple):
    """Over some patches: the highest score, the weights, and for each piece the weighted values."""

    peak: jax.Array
    total: jax.Array
    values: tuple[jax.Array, ...]


def _pieces(D: int) -> list[Piece]:
    """All of a head, or two parts of it."""
    main = 1 << (D.bit_length() - 1)
    parts = [(0, main), (main, D - main)]
    # Of fewer than 16 columns a matrix unit takes none.
    return [Piece(x, y, max(16, pl.next_power_of_2(y))) for x, y in parts if y]


def _turn_kernel(qkv_ref, cos_ref, sin_ref, out_ref):
    """One program a row: its queries and keys, turned."""
    row, (width, half) = pl.program_id(0), (out_ref.shape[1], cos_ref.shape[1])
    column = lax.iota(jnp.int32, pl.next_power_of_2(width))
    inside, place = column < width, lax.rem(column, 2 * half)
    is_first = place < half
    pair = jnp.where(is_first, place, place - half)
    other = jnp.where(is_first, column + half, column - half)

    def load(ref, at):
        return pltriton.load(ref.at[row, at], mask=inside, other=0.0).astype(jnp.float32)

    x, y, cos, sin = map(load, (qkv_ref, qkv_ref, cos_ref, sin_ref), (column, other, pair, pair))
    turned = jnp.where(is_first, x * cos - y * sin, x * cos + y * sin)
    # A column that is not written gets an index outside, for the interpreter.
    at = out_ref.at[row, jnp.where(inside, column, width)]
    pltriton.store(at, turned.astype(out_ref.dtype), mask=inside)


def _attend_kernel(turned_ref, qkv_ref, count_ref, out_ref, *, D, tile, scale, lanes, ones):
    """One program per block of rows and head."""
    first, head, count = pl.program_id(0) * lanes, pl.program_id(1), count_ref[0]
    row, pieces = first + lax.iota(jnp.int32, lanes), _pieces(D)
    sums = Sums(
        jnp.full((lanes,), NEGATIVE, jnp.float32),
        jnp.zeros((lanes, ones), jnp.float32),
        tuple(jnp.zeros((lanes, piece.block), jnp.float32) for piece in pieces),
    )
    # Padding's rows are those of the last patch again, of which nothing is kept.
    end = jnp.where(first < count, count, 0)
    patch = jnp.minimum(row, jnp.maximum(count - 1, 0))
    q = [_load(turned_ref, patch, head * D, piece) for piece in pieces]
    rows = Rows(turned_ref, qkv_ref, head * D, count, scale)
    add = functools.partial(_add_tile, q, rows, pieces, tile)
    sums = lax.fori_loop(0, pl.cdiv(end, tile), add, sums)
    weight = jnp.maximum(sums.total.max(axis=1), 1e-30)[:, None]
    (R, hidden), is_row = out_ref.shape, (row < out_ref.shape[0])[:, None]
    for piece, value in zip(pieces, sums.values, strict=True):
        column = lax.iota(jnp.int32, piece.block)[None, :]
        keep = is_row & (column < piece.width)
        # What is not written gets a place outside, for the interpreter.
        to_row = jnp.where(is_row, row[:, None], R)
        to = jnp.where(column < piece.width, head * D + piece.first + column, hidden)
        pltriton.store(out_ref.at[to_row, to], (value / weight).astype(out_ref.dtype), mask=keep)


def _add_tile(q, rows, pieces, tile, i, sums):
    """Adds a tile of patches to the sums of a block of rows.

    Behind the last patch stands that one again, with no weight. So the tile that is not whole is
    no other code: its loads, masked by rows in a loop of its own, gave the columns of a head's
    second block other values in one of the languages on an H100.
    """
    hidden, patch = rows.qkv_ref.shape[1] // 3, i * tile + lax.iota(jnp.int32, tile)
    beside = jnp.where(patch < rows.count, 0.0, NEGATIVE)
    patch = jnp.minimum(patch, rows.count - 1)
    keys = [_load(rows.turned_ref, patch, hidden + rows.head, piece) for piece in pieces]
    scores = pltriton.dot(q[0], keys[0].T, **EXACT)
    for mine, theirs in zip(q[1:], keys[1:], strict=True):
        scores += pltriton.dot(mine, theirs.T, **EXACT)
    scores = scores * rows.scale + beside[None, :]
    highest = jnp.maximum(sums.peak, scores.max(axis=1))
    weights = jnp.exp2(scores - highest[:, None]).astype(q[0].dtype)
    decay = jnp.exp2(sums.peak - highest)[:, None]
    # The matrix unit adds in one order for any number of rows; a sum over lanes does not.
    units = jnp.ones((tile, sums.total.shape[1]), weights.dtype)
    total = sums.total * decay + pltriton.dot(weights, units, **EXACT)
    values = [_load(rows.qkv_ref, patch, 2 * hidden + rows.head, piece) for piece in pieces]
    values = tuple(
        value * decay + pltriton.dot(weights, v, **EXACT)
        for value, v in zip(sums.values, values, strict=True)
    )
    return Sums(highest, total, values)


def _load(ref, row, first, piece):
    """A piece of the head of some rows; 0 past the piece."""
    column = lax.iota(jnp.int32, piece.block)[None, :]
    at = ref.at[row[:, None], first + piece.first + column]
    if piece.width == piece.block:
        return pltriton.load(at)
    return pltriton.load(at, mask=column < piece.width, other=0.0)
