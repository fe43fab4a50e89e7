"""Wide blocks of `latent_attention`: twice the lanes, with the total in global memory (Pallas,
Triton backend).

The accumulator of a split takes the registers that narrow blocks have for the accumulators of a
split and of all splits. The total is loaded and stored once per split. Tiles that all lanes see
have a loop of their own, without masks, so that shared memory has room for two tiles.
"""

from functools import partial

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.attention.latent_attention_mainloop import (
    LatentSums,
    load_block,
    load_latents,
    load_queries,
    load_rope,
    masked,
    page_of,
    product,
    rescaled,
    scores_of,
    store_block,
    tile_at,
)
from kernels.pallas_gpu.attention.latent_combine import fold, split_begin, split_of


def attend_wide(refs, seen, own, tiles, slot, work, interpret):
    """Accumulates tiles [begin, end) by splits, and writes the outputs.

    Args:
      refs, seen, own, tiles, work: See `latent_attention_mainloop.sum_positions`.
      slot: Index of the total of the program.
      interpret: Run on a CPU.
    """
    begin, end = tiles
    q = load_queries(refs.q, own, work)
    first = split_of(begin, work)
    until = jnp.where(begin < end, split_of(end - 1, work) + 1, first)
    _store(refs.parts, slot, LatentSums.nothing(work))

    def add_split(number, _):
        start = jnp.maximum(begin, split_begin(number, work))
        stop = jnp.minimum(end, split_begin(number + 1, work))
        whole = jnp.clip(lax.div(seen.whole_until, work.tile), start, stop)
        whole = jnp.where(start * work.tile < seen.whole_from, start, whole)

        def add_masked(carry):
            i, carry = carry
            return i + 1, _add_masked(i, carry, q, seen, work)

        carry = LatentSums.nothing(work), page_of(seen, start, work)
        carry = lax.fori_loop(start, whole, partial(_add_whole, q=q, seen=seen, work=work), carry)
        # Loops with a condition have no stages, for which shared memory has no room.
        carry = lax.while_loop(lambda carry: carry[0] < stop, add_masked, (whole, carry))[1]
        sums, _ = carry
        _add_split(refs.parts, slot, sums, interpret)

    lax.fori_loop(first, until, add_split, None)
    _wait(interpret)  # as in `_add_split`
    weight = jnp.maximum(pltriton.load(refs.parts.totals.at[slot]), 1e-30)
    for i in range(work.columns):
        value = pltriton.load(_block_of(refs.parts, slot, i, work.width)) / weight[None, :]
        store_block(refs.out, own, i, value.astype(refs.out.dtype))


def _add_whole(i, carry, q, seen, work):
    """Adds a tile that is fully visible to all lanes.

    Args:
      i: Index of the tile.
      carry: Accumulator, and the page of the tile.
      q, seen, work: Queries, their positions, and settings.

    Returns:
      The accumulator, and the page of the next tile.
    """
    sums, page = carry
    at, page = tile_at(seen, page, i, work)
    inside = (i * work.tile + lax.iota(jnp.int32, work.tile) < seen.high)[:, None]
    latents = load_latents(seen.pool_ref, at, inside, work)
    keys = load_rope(seen.pool_ref, at, inside, work)
    scores = scores_of(q[0], q[1], latents, keys, work)
    sums, weights = rescaled(sums, scores, keys.dtype)

    def add():
        pairs = zip(latents, sums.blocks, strict=True)
        return tuple(product(x, weights, y) for x, y in pairs)

    # Always true: the copies of the next tile start before a branch, and after other products.
    blocks = lax.cond(i * work.tile < seen.whole_until, add, lambda: sums.blocks)
    return sums._replace(blocks=blocks), page


def _add_masked(i, carry, q, seen, work):
    """Same as `_add_whole` for any tile; latents are loaded again, without the unusable ones."""
    sums, page = carry
    at, page = tile_at(seen, page, i, work)
    inside = (i * work.tile + lax.iota(jnp.int32, work.tile) < seen.high)[:, None]
    latents = load_latents(seen.pool_ref, at, inside, work)
    keys = load_rope(seen.pool_ref, at, inside, work)
    scores, is_bad = masked(scores_of(q[0], q[1], latents, keys, work), seen, i, work)
    sums, weights = rescaled(sums, scores, keys.dtype)
    keep, blocks = inside & (is_bad == 0)[:, None], []
    for j, block in enumerate(sums.blocks):
        clean = load_block(seen.pool_ref, at, keep, j, work)
        blocks.append(product(clean, weights, block))
    return sums._replace(blocks=tuple(blocks)), page


def _store(parts, slot, sums):
    """Stores the total of a program."""
    pltriton.store(parts.peaks.at[slot], sums.peak)
    pltriton.store(parts.totals.at[slot], sums.total)
    for i, block in enumerate(sums.blocks):
        pltriton.store(_block_of(parts, slot, i, block.shape[0]), block)


def _add_split(parts, slot, more, interpret):
    """Merges the accumulator of a split into the total of a program."""
    _wait(interpret)  # other threads may have stored what a thread loads
    old_peak, old = pltriton.load(parts.peaks.at[slot]), pltriton.load(parts.totals.at[slot])
    peak = jnp.maximum(old_peak, more.peak)
    ours, theirs = jnp.exp2(old_peak - peak), jnp.exp2(more.peak - peak)
    _wait(interpret)  # other threads may still load what a thread stores
    pltriton.store(parts.peaks.at[slot], peak)
    pltriton.store(parts.totals.at[slot], fold(old, more.total, ours, theirs))
    for i, block in enumerate(more.blocks):
        at = _block_of(parts, slot, i, block.shape[0])
        value = fold(pltriton.load(at), block, ours[None, :], theirs[None, :])
        pltriton.store(at, value)


def _block_of(parts, slot, i, width):
    """Returns the reference of a block of columns of a total, [width, lanes]."""
    return parts.sums.at[slot, pl.ds(i * width, width)]


def _wait(interpret):
    """Waits for the loads and stores of all threads of the program."""
    if not interpret:
        pltriton.debug_barrier()
