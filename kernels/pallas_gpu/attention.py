"""Attention of flat rows over paged KV, on the Triton lowering of Pallas.

A program sums one split of the positions for one block of rows of one request and one key head; a
second kernel combines the splits of each row. Splits and tiles lie at fixed positions, so the order
of a row's sums depends on nothing but where the row stands: not on the batch, not on how many rows
its request has. What must stay equal in the Triton twin is listed in `kernels/__init__.py`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Bool, Float, Int

from kernels.tiles import AttentionTiles

HEAD_SIZES = (16, 32, 64, 128, 256)
"""Powers of two, at least the fewest columns that a matrix unit takes."""

_LOG2_E = 1.4426950408889634
_NEGATIVE = -1e30  # finite, since -inf minus -inf is NaN in a tile that a row sees nothing of


def attend(
    q: Float[jax.Array, "R Hq D"],
    k_pages: Float[jax.Array, "P page Hk D"],
    v_pages: Float[jax.Array, "P page Hk D"],
    page_table: Int[jax.Array, "B table"],
    row_starts: Int[jax.Array, " B1"],
    first: Int[jax.Array, " R"],
    until: Int[jax.Array, " R"],
    window: Bool[jax.Array, "R N"],
    *,
    max_rows: int,
    split: int,
    tile: int,
    tiles: AttentionTiles,
    k_offset: int = 0,
    v_offset: int = 0,
    interpret: bool = False,
) -> Float[jax.Array, "R Hq D"]:
    """As `shared.spec.attention.attend`, for rows that lie together request by request.

    D is one of `HEAD_SIZES`. To read one layer of a pool that holds all of them, pass the
    whole pool for both, as pages, with the offsets: a slice would be copied for the kernel.

    Args:
      q, k_pages, v_pages, page_table, first, until, window: As in the specification.
      row_starts: First flat row of each request, and the end; rows past it are padding.
      max_rows: Most rows that a request can have.
      split, tile: Positions of a split and of a tile: the order of the sums.
      tiles: How the work is cut otherwise.
      k_offset, v_offset: Pages of the pool that lie before the layer's keys, and its values.
      interpret: Run on a CPU.
    """
    R, Hq, D = q.shape
    page, Hk = k_pages.shape[1:3]
    B, columns = page_table.shape
    group = Hq // Hk
    blocks, splits = pl.cdiv(max_rows * group, tiles.lanes), pl.cdiv(columns * page, split)
    sums, peaks, totals = pl.pallas_call(
        functools.partial(
            _split_kernel,
            group=group,
            lanes=tiles.lanes,
            ones=tiles.ones,
            blocks=blocks,
            split_length=split,
            tile=tile,
            nodes=window.shape[1],
            offsets=(k_offset, v_offset),
        ),
        grid=(splits * blocks, Hk, B),
        out_shape=[
            jax.ShapeDtypeStruct((splits, R, Hq, D), jnp.float32),
            jax.ShapeDtypeStruct((splits, R, Hq), jnp.float32),
            jax.ShapeDtypeStruct((splits, R, Hq), jnp.float32),
        ],
        compiler_params=pltriton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
        interpret=interpret,
        name="attend_split",
    )(
        *(q, k_pages, v_pages, page_table, row_starts, first, until),
        window.astype(jnp.int8) if window.shape[1] else jnp.zeros((1, 1), jnp.int8),
    )
    return pl.pallas_call(
        functools.partial(
            _combine_kernel, split_length=split, nodes=window.shape[1], reach=columns * page
        ),
        grid=(R, Hq),
        out_specs=pl.BlockSpec((None, None, D), lambda row, head: (row, head, 0)),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltriton.CompilerParams(num_warps=tiles.combine_warps, num_stages=2),
        interpret=interpret,
        name="attend_combine",
    )(sums, peaks, totals, row_starts, first, until)


def _split_kernel(
    q_ref,
    k_ref,
    v_ref,
    table_ref,
    starts_ref,
    first_ref,
    until_ref,
    window_ref,
    sums_ref,
    peaks_ref,
    totals_ref,
    *,
    group,
    lanes,
    ones,
    blocks,
    split_length,
    tile,
    nodes,
    offsets,
):
    """One program per split, block of rows, key head and request; writes nothing for empty ones."""
    split, block = lax.div(pl.program_id(0), blocks), lax.rem(pl.program_id(0), blocks)
    head, request = pl.program_id(1), pl.program_id(2)
    stop = starts_ref[request + 1]
    lane = block * lanes + lax.iota(jnp.int32, lanes)
    row = starts_ref[request] + lax.div(lane, group)
    q_head = head * group + lax.rem(lane, group)
    D, origin = q_ref.shape[2], split * split_length
    column = lax.iota(jnp.int32, D)

    @pl.when(starts_ref[request] + lax.div(block * lanes, group) < stop)
    def _():
        own = jnp.minimum(row, stop - 1)  # spare lanes repeat the last row and are not written
        first, until = pltriton.load(first_ref.at[own]), pltriton.load(until_ref.at[own])
        reach = table_ref.shape[1] * k_ref.shape[1]
        low = jnp.maximum(jnp.min(jnp.minimum(first, until)), origin)
        high = jnp.minimum(jnp.minimum(jnp.max(until) + nodes, reach), origin + split_length)

        @pl.when(low < high)
        def _():
            q = pltriton.load(q_ref.at[own[:, None], q_head[:, None], column[None, :]])
            refs = (k_ref, v_ref, table_ref, window_ref)
            add_tile = functools.partial(
                _add_tile, q, refs, request, head, (own, first, until), high, nodes, offsets
            )
            common = jnp.max(first), jnp.min(until)
            sums, peak, total = _over_tiles(add_tile, origin, tile, ones, (low, high), common, q)
            is_own = row < stop
            # A lane that is not written gets an index outside, for the interpreter.
            at = jnp.where(is_own, row, q_ref.shape[0])
            where = (split, at[:, None], q_head[:, None], column[None, :])
            pltriton.store(sums_ref.at[where], sums, mask=is_own[:, None])
            pltriton.store(peaks_ref.at[split, at, q_head], peak, mask=is_own)
            pltriton.store(totals_ref.at[split, at, q_head], total.max(axis=1), mask=is_own)


def _over_tiles(add_tile, origin, tile, ones, span, common, q):
    """The sums over the tiles of a split; those that every row sees whole need no mask.

    Args:
      add_tile: Adds the tile at a position to the sums.
      origin, tile: Where the split begins, and the positions of a tile.
      ones: Columns of ones.
      span: First position that any row sees, and the end.
      common: First position that all rows see, and the end.
      q: For the shape of the sums.
    """
    lanes, D = q.shape
    begin, end = lax.div(span[0] - origin, tile), pl.cdiv(span[1] - origin, tile)
    whole = jnp.clip(pl.cdiv(jnp.maximum(common[0] - origin, 0), tile), begin, end)
    partly = jnp.clip(lax.div(jnp.maximum(common[1] - origin, 0), tile), whole, end)
    position = lax.iota(jnp.int32, tile)

    def loop(start, stop, carry, is_masked):
        def body(i, carry):
            return add_tile(origin + i * tile + position, carry, is_masked)

        return lax.fori_loop(start, stop, body, carry)

    carry = (
        jnp.zeros((lanes, D), jnp.float32),
        jnp.full((lanes,), _NEGATIVE, jnp.float32),
        jnp.zeros((lanes, ones), jnp.float32),
    )
    carry = loop(begin, whole, carry, True)
    carry = loop(whole, partly, carry, False)
    return loop(partly, end, carry, True)


def _add_tile(q, refs, request, head, rows, high, nodes, offsets, position, carry, is_masked):
    """Adds the positions of one tile to the sums of the weighted values and of the weights."""
    k_ref, v_ref, table_ref, window_ref = refs
    own, first, until = rows
    sums, peak, total = carry
    page = k_ref.shape[1]
    exact = {"precision": lax.Precision.HIGHEST}  # float32 stays float32, no tf32
    inside = {"mask": position < high, "other": 0} if is_masked else {}
    number = pltriton.load(table_ref.at[request, lax.div(position, page)], **inside)
    inside = {"mask": (position < high)[:, None], "other": 0.0} if is_masked else {}
    place = lax.rem(position, page)[:, None]
    column = lax.iota(jnp.int32, q.shape[1])[None, :]
    k_at = ((number + offsets[0])[:, None], place, head, column)
    v_at = ((number + offsets[1])[:, None], place, head, column)

    k = pltriton.load(k_ref.at[k_at], **inside)
    scores = pltriton.dot(q, k.T, **exact) * (q.shape[1] ** -0.5 * _LOG2_E)
    v = pltriton.load(v_ref.at[v_at], **inside)
    if is_masked:
        seen = _seen(window_ref, own, first, until, position, nodes)
        scores = jnp.where(seen, scores, _NEGATIVE)
        # 0 x NaN is NaN: such values are taken out, and given back to the rows that see them.
        spoiled = jnp.max(jnp.where(jnp.abs(v) < jnp.inf, 0, 1), axis=1)  # [tile]
        v = jnp.where(spoiled[:, None] == 0, v, 0.0).astype(v.dtype)
        harmed = jnp.max(jnp.where(seen, spoiled[None, :], 0), axis=1)  # [lanes]
        sums = jnp.where(harmed[:, None] == 0, sums, jnp.nan)
    highest = jnp.maximum(peak, scores.max(axis=1))
    decay = jnp.exp2(peak - highest)[:, None]
    weights = jnp.exp2(scores - highest[:, None])
    if is_masked:
        weights = jnp.where(seen, weights, 0.0)
    weights = weights.astype(v.dtype)
    # The matrix unit adds in one order for any number of rows; a sum over lanes does not.
    ones = jnp.ones((position.shape[0], total.shape[1]), v.dtype)
    total = total * decay + pltriton.dot(weights, ones, **exact)
    return sums * decay + pltriton.dot(weights, v, **exact), highest, total


def _seen(window_ref, own, first, until, position, nodes):
    """Which positions of a tile each row sees."""
    seen = (position[None, :] >= first[:, None]) & (position[None, :] < until[:, None])
    if nodes:
        place = position[None, :] - until[:, None]
        inside = (place >= 0) & (place < nodes)
        at = (own[:, None], jnp.clip(place, 0, nodes - 1))
        seen |= pltriton.load(window_ref.at[at], mask=inside, other=0) != 0
    return seen


def _combine_kernel(
    sums_ref,
    peaks_ref,
    totals_ref,
    starts_ref,
    first_ref,
    until_ref,
    out_ref,
    *,
    split_length,
    nodes,
    reach,
):
    """One program per row and head: adds the splits that the row reaches, in order."""
    row, head = pl.program_id(0), pl.program_id(1)
    first, until = first_ref[row], until_ref[row]
    is_real = row < starts_ref[starts_ref.shape[0] - 1]
    low = lax.div(jnp.minimum(first, until), split_length)
    high = jnp.where(is_real, pl.cdiv(jnp.minimum(until + nodes, reach), split_length), low)

    def add(split, carry):
        sums, peak, total = carry
        highest = jnp.maximum(peak, peaks_ref[split, row, head])
        ours, theirs = jnp.exp2(peak - highest), jnp.exp2(peaks_ref[split, row, head] - highest)
        sums = sums * ours + sums_ref[split, row, head, :] * theirs
        return sums, highest, total * ours + totals_ref[split, row, head] * theirs

    start = (jnp.zeros(out_ref.shape, jnp.float32), jnp.float32(_NEGATIVE), jnp.float32(0))
    sums, _, total = lax.fori_loop(low, high, add, start)
    out_ref[...] = (sums / jnp.maximum(total, 1e-30)).astype(out_ref.dtype)
