"""Main loop of `latent_attention`: online softmax over tiles of latent rows (Pallas, Triton
backend).
"""

from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.attention.attention import EXACT
from kernels.pallas_gpu.attention.head_dim_padding import load_kept
from kernels.pallas_gpu.attention.latent_combine import fold, split_of, split_tiles
from kernels.pallas_gpu.attention.online_softmax import NEGATIVE


class LatentWork(NamedTuple):
    """Compile-time settings.

    Attributes:
      rank, rope: Columns of the latent and of the rope key.
      width, rope_width: Columns of a loaded block of each; the latent has one or more blocks.
      near, split, far_split, tile: See `LatentAttentionOrder`.
      nodes: Width of the tree window.
      scale: Multiplier of the scores, times log2(e).
      lanes: (row, head) pairs of a program.
      blocks: Blocks of lanes of a request.
      sharing: Maximum programs that share the positions of a block.
      max_rows: Maximum rows of a request.
    """

    rank: int
    rope: int
    width: int
    rope_width: int
    near: int
    split: int
    far_split: int
    tile: int
    nodes: int
    scale: float
    lanes: int
    blocks: int
    sharing: int
    max_rows: int

    @property
    def columns(self) -> int:
        """Returns the number of loaded blocks of a latent."""
        return pl.cdiv(self.rank, self.width)


class LatentSums(NamedTuple):
    """Online softmax accumulator, transposed: blocks of values [width, lanes], maximum and total
    [lanes].
    """

    blocks: Any
    peak: Any
    total: Any

    @classmethod
    def nothing(cls, work: LatentWork) -> "LatentSums":
        """Returns an empty accumulator."""
        zeros = (jnp.zeros((work.width, work.lanes), jnp.float32),) * work.columns
        peak = jnp.full((work.lanes,), NEGATIVE, jnp.float32)
        return cls(zeros, peak, jnp.zeros((work.lanes,), jnp.float32))


class LatentRange(NamedTuple):
    """Positions that the lanes of a program attend to.

    Attributes:
      pool_ref, table_ref, window_ref: Latent pools, page tables and tree masks.
      layer, request: Indices of the layer and the request.
      row: Flat row of each lane.
      first_ref, until_ref: Visible positions of all rows before the window.
      whole_from, whole_until: Positions that are visible to all lanes.
      high: End of the positions that are read.
    """

    pool_ref: Any
    table_ref: Any
    window_ref: Any
    layer: Any
    request: Any
    row: Any
    first_ref: Any
    until_ref: Any
    whole_from: Any
    whole_until: Any
    high: Any


def sum_positions(refs, seen, own, tiles, store, work):
    """Accumulates tiles [begin, end) by splits.

    Args:
      refs, seen, work: See the classes.
      own: Row and head of each lane, and a mask of the lanes that are not spare.
      tiles: First tile, and the end.
      store: Function of a split and its accumulator that stores it; None adds it to the total.

    Returns:
      The total; None if splits are stored.
    """
    begin, end = tiles
    row, head, is_lane = own
    at = (row[:, None], head[:, None])
    q = _load_latents(refs.q, at, is_lane[:, None], work)
    q_rope = _load_rope(refs.q, at, is_lane[:, None], work)

    tree, row_begin, rows, stop = end, 0, 1, end
    if work.nodes > 0:
        # From tile `tree` on, each row reads the tiles along its own path.
        tree = jnp.minimum(jnp.maximum(lax.div(seen.whole_until, work.tile), begin), end)
        row_begin, rows = jnp.min(seen.row), jnp.max(seen.row) - jnp.min(seen.row) + 1
        stop = tree + (end - tree) * rows

    def add(step, carry):
        number, split, total = carry
        i, path_row = step, row_begin
        if work.nodes > 0:
            visit = jnp.maximum(step - tree, 0)
            i = jnp.minimum(step, tree) + lax.div(visit, rows)
            path_row += lax.rem(visit, rows)
            at, inside = _path_tile_at(seen, i, path_row, work)
        else:
            at, number = _tile_at(seen, number, i, work)
            inside = (i * work.tile + lax.iota(jnp.int32, work.tile) < seen.high)[:, None]
        latents = _load_latents(seen.pool_ref, at, inside, work)
        keys = _load_rope(seen.pool_ref, at, inside, work)
        scores = _scores(q, q_rope, latents, keys, work)
        # Tiles that are fully visible to all lanes need no mask.
        is_partly = (i * work.tile < seen.whole_from) | ((i + 1) * work.tile > seen.whole_until)
        scores, is_bad = lax.cond(
            is_partly,
            lambda: _masked(scores, seen, i, path_row, step < tree, work),
            lambda: (scores, jnp.zeros((work.tile,), jnp.int32)),
        )
        split, weights = _rescaled(split, scores, keys.dtype)

        def add_clean():
            place, is_read = at, inside
            if work.nodes > 0:  # computed again, to save registers
                place, is_read = _path_tile_at(seen, i, path_row, work)
            keep = is_read & (is_bad == 0)[:, None]
            load = partial(_load_block, seen.pool_ref, place, keep)
            loads = (partial(load, j, work) for j in range(len(q)))
            return tuple(
                _product(x(), weights, y) for x, y in zip(loads, split.blocks, strict=True)
            )

        def add_all():
            pairs = zip(latents, split.blocks, strict=True)
            return tuple(_product(latent, weights, block) for latent, block in pairs)

        split = split._replace(blocks=lax.cond(jnp.max(is_bad) > 0, add_clean, add_all))
        is_end = (lax.rem(i + 1, split_tiles(i, work)) == 0) | (i + 1 == end)
        if work.nodes > 0:
            is_end &= (step < tree) | (path_row == row_begin + rows - 1)
        return number, *lax.cond(is_end, lambda: close(i, split, total), lambda: (split, total))

    def close(i, split, total):
        if store is None:
            return LatentSums.nothing(work), merged(total, split)
        store(split_of(i, work), split)
        return LatentSums.nothing(work), None

    nothing = LatentSums.nothing(work)
    carry = _page_of(seen, begin, work), nothing, nothing if store is None else None
    return lax.fori_loop(begin, stop, add, carry)[-1]


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


def _path_tile_at(seen, i, row, work):
    """Returns the pool indices of a tile that a row of a tree reads, and their mask, [tile, 1].

    Tiles before the window are the same for all rows.
    """
    page, position = seen.pool_ref.shape[3], i * work.tile + lax.iota(jnp.int32, work.tile)
    until = seen.until_ref[row]
    place, is_node = _path_places(seen.window_ref, row, until, position, work.nodes)
    is_read = is_node | (position < until)
    # A position that is not read gets an index in bounds, for the interpreter.
    place = jnp.where(is_read, place, 0)
    pages = pltriton.load(seen.table_ref.at[seen.request, lax.div(place, page)])
    return _places(seen, pages[:, None], lax.rem(place, page)), is_read[:, None]


def _path_places(window_ref, row, until, position, nodes):
    """Returns where a row of a tree reads some positions of plain decoding.

    The nodes that the row attends to are at consecutive positions in the order of the sums, as in
    plain decoding, for any order of the window: a node has the bits of plain decoding.

    Args:
      window_ref, row: Windows of all rows, and the row.
      until: KV position of the window.
      position: Positions of plain decoding.
      nodes: Width of the window.

    Returns:
      Their KV positions, and which are of nodes; others are as they were.
    """
    is_node = _nodes_of(window_ref, row, nodes)
    node = lax.iota(jnp.int32, len(is_node))
    path_position = jnp.where(is_node != 0, until + jnp.cumsum(is_node) - 1, -1)
    is_here = path_position[None, :] == position[:, None]
    number = jnp.sum(jnp.where(is_here, node[None, :] + 1, 0), axis=1)  # from 1; 0: none
    return jnp.where(number > 0, until + number - 1, position), number > 0


def _nodes_of(window_ref, row, nodes):
    """Returns the window of a row as integers, padded to a power of two."""
    node = lax.iota(jnp.int32, pl.next_power_of_2(nodes))
    at = window_ref.at[row, jnp.minimum(node, nodes - 1)]
    return pltriton.load(at, mask=node < nodes, other=0).astype(jnp.int32)


def _places(seen, pages, places):
    """Returns the pool indices of rows: layer, array, page, offset in the page, head."""
    return seen.layer, 0, pages, places[:, None], 0


def _load_latents(ref, at, keep, work):
    """Loads blocks of latent columns of the rows that `keep` selects, 0 elsewhere."""
    return tuple(_load_block(ref, at, keep, i, work) for i in range(work.columns))


def _load_block(ref, at, keep, i, work):
    """Loads one block of latent columns; columns past the latent are 0."""
    column = i * work.width + lax.iota(jnp.int32, work.width)[None, :]
    return _load(ref, at, column, keep, work.rank if work.rank % work.width else None)


def _load_rope(ref, at, keep, work):
    """Loads rope keys of the rows that `keep` selects; columns past the key are 0."""
    column = work.rank + lax.iota(jnp.int32, work.rope_width)[None, :]
    is_padded = work.rope != work.rope_width
    return _load(ref, at, column, keep, work.rank + work.rope if is_padded else None)


def _load(ref, at, column, keep, end):
    """Loads columns of the rows that `keep` selects, 0 elsewhere; columns from `end` on are 0."""
    if end is not None:
        is_column = column < end
        keep = keep & is_column
        # A column that is not read gets an index in bounds, for the interpreter.
        column = jnp.minimum(column, end - 1)
    return load_kept(ref.at[(*at, column)], keep)


def _scores(q, q_rope, latents, keys, work):
    """Computes the scores of a tile, [tile, lanes], in one chain: latent columns, then rope."""
    scores = pltriton.dot(latents[0], q[0].T, **EXACT)
    for more, queries in zip(latents[1:], q[1:], strict=True):
        scores += pltriton.dot(more, queries.T, **EXACT)
    return (scores + pltriton.dot(keys, q_rope.T, **EXACT)) * work.scale


def _masked(scores, seen, i, row, is_shared, work):
    """Masks the scores of a tile; returns them, and the positions with unusable latents.

    0 x NaN is NaN: latents of positions without finite scores are read as 0. The scores of lanes
    that attend to them are infinite, so their weights and results are NaN. Only lanes of `row`
    attend to a tile that is not shared.
    """
    position = (i * work.tile + lax.iota(jnp.int32, work.tile))[:, None]
    first = pltriton.load(seen.first_ref.at[seen.row])[None, :]
    until = pltriton.load(seen.until_ref.at[seen.row])[None, :]
    if work.nodes > 0:
        first, until = (
            jnp.minimum(first, until),
            until + jnp.sum(_nodes_of(seen.window_ref, row, work.nodes)),
        )
    sees = (position >= first) & (position < until)
    if work.nodes > 0:
        sees &= (seen.row == row)[None, :] | is_shared
    is_bad = jnp.max(jnp.where(jnp.abs(scores) < jnp.inf, 0, 1), axis=1)
    scores = jnp.where(is_bad[:, None] == 0, scores, jnp.inf)
    return jnp.where(sees, scores, NEGATIVE), is_bad


def _rescaled(sums, scores, dtype):
    """Returns an accumulator relative to the maximum with a tile, with the weights of the tile in
    its total; and the weights.
    """
    unit = 2**30 // scores.shape[0]
    peak = jnp.maximum(sums.peak, scores.max(axis=0))
    ours = jnp.exp2(sums.peak - peak)
    # Before the first visible position, masked scores must not get the weight of the maximum.
    above = jnp.where(peak == NEGATIVE, 0.0, peak)
    weights = jnp.exp2(scores - above[None, :]).astype(dtype)
    # Integers have the same sum in any order.
    more = jnp.sum((weights.astype(jnp.float32) * unit + 0.5).astype(jnp.int32), axis=0)
    total = sums.total * ours + more.astype(jnp.float32) * (1 / unit)
    blocks = tuple(block * ours[None, :] for block in sums.blocks)
    return LatentSums(blocks, peak, total), weights


def _product(latents, weights, value):
    """Adds the weighted latents of a tile to a block of values."""
    return value + pltriton.dot(latents.T, weights, **EXACT)


def merged(sums, more):
    """Merges two accumulators; `more` covers later positions."""
    peak = jnp.maximum(sums.peak, more.peak)
    ours, theirs = jnp.exp2(sums.peak - peak), jnp.exp2(more.peak - peak)
    pairs = zip(sums.blocks, more.blocks, strict=True)
    blocks = tuple(fold(one, other, ours[None, :], theirs[None, :]) for one, other in pairs)
    return LatentSums(blocks, peak, fold(sums.total, more.total, ours, theirs))
