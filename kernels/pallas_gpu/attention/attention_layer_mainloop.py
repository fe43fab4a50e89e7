"""Main loop of `attention_layer`: online softmax over a share (Pallas, Triton backend)."""

from functools import partial
from typing import Any, NamedTuple

import jax
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
from kernels.pallas_gpu.attention.row_bounds import is_in as is_in_bits
from kernels.pallas_gpu.attention.row_bounds import visible


class LayerRows(NamedTuple):
    """First row of each request, and the write position and bounds of each row."""

    starts: Any
    places: Any
    is_real: Any
    first: Any
    until: Any
    paths: Any


class NewRows(NamedTuple):
    """KV positions of a request's new rows, and a mask of the rows with a non-finite value.

    With a tree, `bits` are the mask's bits, by node.
    """

    places: jax.Array
    is_bad: jax.Array
    bits: tuple[jax.Array, jax.Array] | None


class PositionRange(NamedTuple):
    """Share of a request's positions that one program processes.

    Attributes:
      low, high: First position that a row of the request attends to, and the end.
      from_position, to_position: The same for this program.
      unit: Positions per partial result: those of a span or of a split.
      by_span: Whether a unit is a span; used for long requests.
      share_begin, share_end: First position of this program, and of the next one.
      number, sharing: Index of this program, and the number of programs.
      is_alone: Whether this program processes the whole request, within one span, and keeps its
        accumulator in registers; None if no program may.
    """

    low: jax.Array
    high: jax.Array
    from_position: jax.Array
    to_position: jax.Array
    unit: jax.Array | int
    by_span: jax.Array | bool
    share_begin: jax.Array
    share_end: jax.Array
    number: jax.Array
    sharing: jax.Array
    is_alone: jax.Array | None


def sum_share(q, seen, new, first_ref, bounds, number, share, order, sizes, *, store):
    """Accumulates the positions of a share: tiles into splits, splits into units, which are stored.

    A unit is a split or a span. A program with `is_alone` stores none. Positions that no row
    attends to are not read. If `sizes` are separate, all tiles of a tree are those of its window.
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

    def bad_at(position):
        is_one = (position[:, None] == new.places[None, :]) & new.is_bad[None, :]
        return jnp.max(is_one.astype(jnp.int32), axis=1) != 0

    def add_seen(position, pages, is_in, is_bad, is_seen, sums):
        """Adds positions that are not visible to all lanes.

        0 x NaN is NaN: a non-finite new value is not read, and makes the weights NaN that are not
        0.
        """
        mask = (is_in & ~is_bad)[:, None]
        load = partial(load_rows, seen, pages=pages, position=position, mask=mask)
        scores = scores_of(q, load(which=0), order)
        scores = jnp.where(is_seen, scores, NEGATIVE)
        highest = jnp.maximum(sums.peak, scores.max(axis=1))
        v = load(which=1)
        weights = jnp.where(is_bad[None, :], jnp.nan, jnp.exp2(scores - highest[:, None]))
        weights = jnp.where(is_seen, weights, 0.0).astype(v.dtype)
        return add_tile(sums, highest, weights, v)

    def add_masked(i, carry):
        number, sums, *unit_sums = carry
        position, pages, number = pages_of(seen, number, i, tile)
        is_in = (position >= bounds.seen_from) & (position < bounds.seen_until)
        # The new positions of a tree are in its own tiles.
        has_new = sizes.max_rows > 1 and order.nodes == 0 and not sizes.is_separate
        is_bad = bad_at(position) if has_new else jnp.zeros(position.shape, bool)
        is_seen = visible(position, seen.first, seen.until)
        return number, *close(
            i, add_seen(position, pages, is_in, is_bad, is_seen, sums), *unit_sums
        )

    def add_paths(step, carry):
        """Adds a tile of a tree's window to the lanes of some rows.

        The nodes that a row attends to are at consecutive positions in the order of the sums, as in
        plain decoding, for any order of the window: a node has the bits of plain decoding.
        Positions of several rows follow each other, and those of other rows have weight 0.
        """
        number, sums, *unit_sums = carry
        i, row = lax.div(step, steps), first_row + lax.rem(step, steps) * sizes.path_rows
        member = lax.iota(jnp.int32, sizes.path_rows * tile)
        position = i * tile + lax.rem(member, tile)
        place = position - bounds.seen_until
        in_window, is_before = (place >= 0) & (place < order.nodes), place < 0
        if sizes.path_rows > 1:
            row = row + lax.div(member, tile)
            in_window, is_before = in_window & (row <= last_row), is_before & (row <= last_row)
            row = jnp.minimum(row, last_row)
            first, is_own = pltriton.load(first_ref.at[row]), seen.row[:, None] == row[None, :]
        else:
            first, is_own = first_ref[row], (seen.row == row)[:, None]
        at = seen.window_ref.at[row, jnp.clip(place, 0, order.nodes - 1)]
        node = pltriton.load(at, mask=in_window, other=order.nodes)
        is_path = node < order.nodes
        is_in = is_path | ((position >= first) & is_before)
        is_bad = is_in_bits(*(jnp.broadcast_to(x, node.shape) for x in new.bits), node, order.nodes)
        position = jnp.where(is_path, bounds.seen_until + node, position)
        column = jnp.where(is_in, lax.div(position, seen.kv_ref.shape[3]), 0)
        pages = pltriton.load(seen.table_ref.at[seen.request, column])[:, None]
        sums = add_seen(position, pages, is_in, is_bad, is_in[None, :] & is_own, sums)
        is_last = lax.rem(step, steps) == steps - 1
        return number, *lax.cond(is_last, partial(close, i), lambda *x: x, sums, *unit_sums)

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
    summed = (number, nothing, *unit_sums)
    tree = begin
    if not sizes.is_separate:
        summed = lax.fori_loop(begin, whole, add, summed)
        tree = jnp.minimum(jnp.maximum(lax.div(bounds.seen_until, tile), whole), end)
        begin = whole
    if order.nodes == 0:
        return lax.fori_loop(begin, end, add_masked, summed)[-1]
    if not sizes.is_separate:
        summed = lax.fori_loop(begin, tree, add_masked, summed)
    first_row, last_row = seen.row.min(), seen.row.max()
    steps = pl.cdiv(last_row + 1 - first_row, sizes.path_rows)
    return lax.fori_loop(tree * steps, end * steps, add_paths, summed)[-1]
