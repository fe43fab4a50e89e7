"""Main loop of `attention_layer`: online softmax over a share (Pallas, Triton backend)."""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.attention.attention import (
    add_tile,
    add_whole,
    load_rows,
    pages_of,
    scores_of,
)
from kernels.pallas_gpu.attention.online_softmax import NEGATIVE, SoftmaxState, fold
from kernels.pallas_gpu.attention.row_bounds import in_range, path_places


def sum_share(q, seen, new, bounds, number, share, order, sizes, *, store):
    """Accumulates the positions of a share: tiles into splits, splits into units, which are stored.

    A unit is a split or a span. A program with `is_alone` stores none. Positions that no row
    attends to are not read.
    """
    tile, (lanes, D) = order.tile, q.shape
    low, high = share.from_position, share.to_position
    begin = lax.div(low, tile)
    end = jnp.where(low < high, pl.cdiv(high, tile), begin)
    # Tiles without new positions that are fully visible to all lanes need no mask.
    whole = jnp.minimum(lax.div(jnp.minimum(seen.until.min(), bounds.new_from), tile), end)
    sees_first = seen.first.max() <= begin * tile
    whole = begin + sees_first.astype(jnp.int32) * jnp.maximum(whole - begin, 0)

    def add(i, carry):
        number, sums, *unit_sums = carry
        position, pages, number = pages_of(seen, number, i, tile)
        return number, *close(i, add_whole(q, seen, position, pages, sums, order), *unit_sums)

    def is_bad(position):
        is_one = (position[:, None] == new.places[None, :]) & new.is_bad[None, :]
        return jnp.max(is_one.astype(jnp.int32), axis=1) != 0

    def add_seen(position, pages, is_read, is_seen, sums):
        """Adds a tile that is not fully visible to all lanes."""
        if sizes.max_rows > 1:
            is_read &= ~is_bad(position)
        load = partial(load_rows, seen, pages=pages, position=position, mask=is_read[:, None])
        scores = scores_of(q, load(which=0), order)
        scores = jnp.where(is_seen, scores, NEGATIVE)
        highest = jnp.maximum(sums.peak, scores.max(axis=1))
        v = load(which=1)
        weights = jnp.where(is_seen, jnp.exp2(scores - highest[:, None]), 0.0).astype(v.dtype)
        return add_tile(sums, highest, weights, v)

    def add_masked(i, carry):
        number, sums, *unit_sums = carry
        position, pages, number = pages_of(seen, number, i, tile)
        is_read = (position >= bounds.seen_from) & (position < bounds.seen_until)
        is_seen = in_range(position, seen.first, seen.until)
        return number, *close(i, add_seen(position, pages, is_read, is_seen, sums), *unit_sums)

    def add_path(i, row, sums):
        """Adds a tile of a tree's window to the lanes of one row; see `path_places`."""
        position = i * tile + lax.iota(jnp.int32, tile)
        in_row = seen.row == row
        first = jnp.max(jnp.where(in_row, seen.first, 0))
        until = bounds.seen_until
        begin = jnp.maximum(first, until)
        place, is_node = path_places(seen.window_ref, row, until, begin, position, order.nodes)
        is_read = is_node | ((position >= first) & (position < until))
        column = jnp.where(is_read, lax.div(place, seen.kv_ref.shape[3]), 0)
        pages = pltriton.load(seen.table_ref.at[seen.request, column])[:, None]
        return add_seen(place, pages, is_read, is_read[None, :] & in_row[:, None], sums)

    def add_paths(i, carry):
        number, sums, *unit_sums = carry
        rows = seen.row.min(), seen.row.max() + 1
        sums = lax.fori_loop(*rows, partial(add_path, i), sums)
        return number, *close(i, sums, *unit_sums)

    def close(i, *sums):
        ends_split = (lax.rem((i + 1) * tile, order.split) == 0) | (i + 1 == end)
        return lax.cond(ends_split, partial(close_split, i), lambda *x: x, *sums)

    def close_split(i, sums, *unit_sums):
        sums = sums._replace(total=sums.total.max(axis=1))
        if not unit_sums:
            stored(i, sums)
            return (nothing,)
        ends_unit = (lax.rem((i + 1) * tile, share.unit) == 0) | (i + 1 == end)
        if share.is_alone is not None:
            ends_unit &= ~share.is_alone
        sums = fold(*unit_sums, sums)
        return nothing, lax.cond(ends_unit, partial(stored, i), lambda x: x, sums)

    def stored(i, sums):
        store(lax.div(i * tile, share.unit), sums)
        return SoftmaxState.nothing(lanes, D)

    nothing = SoftmaxState.nothing(lanes, D, order.ones)
    unit_sums = [SoftmaxState.nothing(lanes, D)] if sizes.may_span or sizes.splits > 1 else []
    summed = lax.fori_loop(begin, whole, add, (number, nothing, *unit_sums))
    if order.nodes == 0:
        return lax.fori_loop(whole, end, add_masked, summed)[-1]
    tree = jnp.minimum(jnp.maximum(lax.div(bounds.seen_until, tile), whole), end)
    summed = lax.fori_loop(whole, tree, add_masked, summed)
    return lax.fori_loop(tree, end, add_paths, summed)[-1]
