"""Main loop of `latent_attention`: online softmax over tiles of latent rows (Pallas, Triton
backend).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.attention.attention import EXACT
from kernels.pallas_gpu.attention.head_dim_padding import load_kept
from kernels.pallas_gpu.attention.latent_combine import fold
from kernels.pallas_gpu.attention.online_softmax import NEGATIVE


class LatentWork(NamedTuple):
    """Compile-time settings.

    Attributes:
      rank, rope: Columns of the latent and of the rope key.
      width, rope_width: Columns of a loaded block of each; the latent has one or more blocks.
      span, tile: Positions of each.
      nodes: Width of the tree window.
      scale: Multiplier of the scores, times log2(e).
      lanes: (row, head) pairs of a program.
      ones: Rows of 1 in the product that sums the weights, 16 per warp.
      blocks: Blocks of lanes of a request.
      sharing: Maximum programs that share the positions of a block.
      max_rows: Maximum rows of a request.
    """

    rank: int
    rope: int
    width: int
    rope_width: int
    span: int
    tile: int
    nodes: int
    scale: float
    lanes: int
    ones: int
    blocks: int
    sharing: int
    max_rows: int

    @property
    def columns(self) -> int:
        """Returns the number of loaded blocks of a latent."""
        return pl.cdiv(self.rank, self.width)


class LatentSums(NamedTuple):
    """Online softmax accumulator, transposed: blocks of values [width, lanes], maximum [lanes], and
    total [ones, lanes] with equal rows.
    """

    blocks: Any
    peak: Any
    total: Any

    @classmethod
    def nothing(cls, work: LatentWork) -> "LatentSums":
        """Returns an empty accumulator."""
        zeros = (jnp.zeros((work.width, work.lanes), jnp.float32),) * work.columns
        peak = jnp.full((work.lanes,), NEGATIVE, jnp.float32)
        return cls(zeros, peak, jnp.zeros((work.ones, work.lanes), jnp.float32))


class LatentRange(NamedTuple):
    """Positions that the lanes of a program attend to.

    Attributes:
      pool_ref, table_ref, window_ref: Latent pools, page tables and tree masks.
      layer, request: Indices of the layer and the request.
      row: Flat row of each lane.
      first, until: Visible positions of each lane before the window.
      high: End of the positions that are read.
    """

    pool_ref: Any
    table_ref: Any
    window_ref: Any
    layer: Any
    request: Any
    row: Any
    first: Any
    until: Any
    high: Any


def sum_positions(refs, seen, own, tiles, close, more, work):
    """Accumulates tiles [begin, end).

    Args:
      refs, seen, work: See the classes.
      own: Row and head of each lane, and a mask of the lanes that are not spare.
      tiles: First tile, and the end.
      close: Function of a tile and the accumulators, called after each tile.
      more: Accumulators of `close` beside the first.
    """
    begin, end = tiles
    row, head, is_lane = own
    at = (row[:, None], head[:, None])
    q = _load_latents(refs.q, at, is_lane[:, None], work)
    q_rope = _load_rope(refs.q, at, is_lane[:, None], work)
    # Tiles that are fully visible to all lanes need no mask.
    whole = jnp.clip(pl.cdiv(jnp.max(seen.first), work.tile), begin, end)
    partly = jnp.clip(lax.div(jnp.min(seen.until), work.tile), whole, end)

    def add_masked(carry):
        i, sums, *rest = carry
        sums = _add_masked(q, q_rope, seen, i, sums, work)
        return i + 1, *close(i, (sums, *rest))

    def add_partly_visible(begin, end, sums):
        # Triton pipelines the loads of a `fori_loop`, which takes shared memory from the main loop.
        return lax.while_loop(lambda carry: carry[0] != end, add_masked, (begin, *sums))[1:]

    def add(i, carry):
        number, sums, *rest = carry
        at, number = _tile_at(seen, number, i, work)
        latents = _load_latents(seen.pool_ref, at, None, work)
        keys = _load_rope(seen.pool_ref, at, None, work)
        scores = _scores(q, q_rope, latents, keys, work)
        highest = scores.max(axis=0)
        weights = jnp.exp2(scores - highest[None, :]).astype(keys.dtype)
        return number, *close(i, (_add_tile(sums, highest, weights, latents), *rest))

    sums = add_partly_visible(begin, whole, (LatentSums.nothing(work), *more))
    carry = (_page_of(seen, whole, work), *sums)
    _, *sums = lax.fori_loop(whole, partly, add, carry)
    return add_partly_visible(partly, end, sums)


def _page_of(seen, i, work):
    """Returns the page in which tile `i` begins."""
    column = lax.div(i * work.tile, seen.pool_ref.shape[3])
    return seen.table_ref[seen.request, jnp.minimum(column, seen.table_ref.shape[1] - 1)]


def _tile_at(seen, number, i, work):
    """Returns the pool indices of the rows of a tile, and the page of the next tile.

    If pages consist of whole tiles, the page is loaded one tile ahead, so key loads do not wait.
    """
    page, row = seen.pool_ref.shape[3], lax.iota(jnp.int32, work.tile)
    if page % work.tile == 0:
        places = lax.rem(i * work.tile, page) + row
        return _places(seen, number, places), _page_of(seen, i + 1, work)
    position = i * work.tile + row
    column = jnp.minimum(lax.div(position, page), seen.table_ref.shape[1] - 1)
    pages = pltriton.load(seen.table_ref.at[seen.request, column])
    return _places(seen, pages[:, None], lax.rem(position, page)), number


def _places(seen, pages, places):
    """Returns the pool indices of rows: layer, plane, page, offset in the page, head."""
    return seen.layer, 0, pages, places[:, None], 0


def _load_latents(ref, at, keep, work):
    """Loads blocks of latent columns of the rows that `keep` selects, 0 elsewhere; None: all."""
    blocks = []
    for i in range(work.columns):
        column = i * work.width + lax.iota(jnp.int32, work.width)[None, :]
        blocks.append(_load(ref, at, column, keep, work.rank if work.rank % work.width else None))
    return tuple(blocks)


def _load_rope(ref, at, keep, work):
    """Loads rope keys of the rows that `keep` selects; columns past the key are 0."""
    column = work.rank + lax.iota(jnp.int32, work.rope_width)[None, :]
    is_padded = work.rope != work.rope_width
    return _load(ref, at, column, keep, work.rank + work.rope if is_padded else None)


def _load(ref, at, column, keep, end):
    """Loads columns of the rows that `keep` selects, 0 elsewhere; columns from `end` on are 0."""
    if end is not None:
        is_column = column < end
        keep = is_column if keep is None else keep & is_column
        # A column that is not read gets an index in bounds, for the interpreter.
        column = jnp.minimum(column, end - 1)
    return load_kept(ref.at[(*at, column)], keep)


def _scores(q, q_rope, latents, keys, work):
    """Computes the scores of a tile, [tile, lanes], in one chain: latent columns, then rope."""
    scores = pltriton.dot(latents[0], q[0].T, **EXACT)
    for more, queries in zip(latents[1:], q[1:], strict=True):
        scores += pltriton.dot(more, queries.T, **EXACT)
    return (scores + pltriton.dot(keys, q_rope.T, **EXACT)) * work.scale


def _add_masked(q, q_rope, seen, i, sums, work):
    """Adds a tile that is not fully visible to all lanes."""
    position = i * work.tile + lax.iota(jnp.int32, work.tile)
    inside, page = position < seen.high, seen.pool_ref.shape[3]
    column = jnp.minimum(lax.div(position, page), seen.table_ref.shape[1] - 1)
    pages = pltriton.load(seen.table_ref.at[seen.request, column], mask=inside, other=0)
    at = _places(seen, pages[:, None], lax.rem(position, page))
    latents = _load_latents(seen.pool_ref, at, inside[:, None], work)
    keys = _load_rope(seen.pool_ref, at, inside[:, None], work)
    scores = _scores(q, q_rope, latents, keys, work)
    is_bad = jnp.zeros((work.tile,), jnp.int32)
    for block in latents:
        is_nonfinite = jnp.where(jnp.abs(block) < jnp.inf, 0, 1)
        is_bad = jnp.maximum(is_bad, jnp.max(is_nonfinite, axis=1))
    sees = _visible(seen, position, work)
    scores = jnp.where(sees, scores, NEGATIVE)
    highest = scores.max(axis=0)
    weights = jnp.where(sees, jnp.exp2(scores - highest[None, :]), 0.0).astype(keys.dtype)
    # 0 x NaN is NaN: non-finite latents are read as 0, and the lanes that attend to them get NaN.
    latents = _load_latents(seen.pool_ref, at, (inside & (is_bad == 0))[:, None], work)
    gets_nan = jnp.max(jnp.where(sees, is_bad[:, None], 0), axis=0)
    blocks = tuple(jnp.where(gets_nan[None, :] == 0, x, jnp.nan) for x in sums.blocks)
    return _add_tile(sums._replace(blocks=blocks), highest, weights, latents)


def _visible(seen, position, work):
    """Returns the mask of the positions of a tile that each lane attends to, [tile, lanes]."""
    first, until, position = seen.first[None, :], seen.until[None, :], position[:, None]
    sees = (position >= first) & (position < until)
    if work.nodes:
        node = position - until
        inside = (node >= 0) & (node < work.nodes)
        at = (seen.row[None, :], jnp.clip(node, 0, work.nodes - 1))
        sees |= pltriton.load(seen.window_ref.at[at], mask=inside, other=0) != 0
    return sees


def _add_tile(sums, highest, weights, latents):
    """Adds a tile, with weights relative to its own maximum, to the accumulator."""
    peak = jnp.maximum(sums.peak, highest)
    ours, theirs = jnp.exp2(sums.peak - peak)[None, :], jnp.exp2(highest - peak)[None, :]
    # Tensor cores sum in one order for any number of lanes; a reduction over threads does not.
    units = jnp.ones((sums.total.shape[0], weights.shape[0]), weights.dtype)
    total = fold(sums.total, pltriton.dot(units, weights, **EXACT), ours, theirs)
    blocks = tuple(
        fold(block, pltriton.dot(latent.T, weights, **EXACT), ours, theirs)
        for block, latent in zip(sums.blocks, latents, strict=True)
    )
    return LatentSums(blocks, peak, total)


def merged(sums, more):
    """Merges two accumulators; `more` covers later positions."""
    peak = jnp.maximum(sums.peak, more.peak)
    ours, theirs = jnp.exp2(sums.peak - peak)[None, :], jnp.exp2(more.peak - peak)[None, :]
    pairs = zip(sums.blocks, more.blocks, strict=True)
    blocks = tuple(fold(one, other, ours, theirs) for one, other in pairs)
    return LatentSums(blocks, peak, fold(sums.total, more.total, ours, theirs))
