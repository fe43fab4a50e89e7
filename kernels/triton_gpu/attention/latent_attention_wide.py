"""Wide blocks of `latent_attention`: twice the lanes, with the total in global memory (Triton).

The accumulator of a split takes the registers that narrow blocks have for the accumulators of a
split and of all splits. The total is loaded and stored once per split. Tiles that all lanes see
have a loop of their own, without masks, so that shared memory has room for two tiles.
"""

import triton
import triton.language as tl

from kernels.triton_gpu.attention.attention import page_of
from kernels.triton_gpu.attention.latent_attention_mainloop import (
    LatentSums,
    load_block,
    load_latents,
    load_queries,
    load_rope,
    masked,
    no_sums,
    product,
    rescaled,
    scores_of,
    store_block,
    tile_at,
)
from kernels.triton_gpu.attention.latent_combine import fold, split_begin, split_of


@triton.jit
def attend_wide(
    q_at,
    seen,
    begin,
    end,
    splits,
    total,
    out_at,
    sizes: tl.constexpr,
    order: tl.constexpr,
    config: tl.constexpr,
):
    """Accumulates tiles [begin, end) by splits, and writes the outputs.

    Args:
      q_at, seen, begin, end, splits, sizes, order, config: See `sum_positions`.
      total: Addresses of the total of the program; lanes are contiguous.
      out_at: Outputs of all lanes.
    """
    page: tl.constexpr = sizes.page
    tile: tl.constexpr = order.tile
    queries = load_queries(q_at, splits, sizes, config)
    first = split_of(begin, order)
    until = tl.where(begin < end, split_of(end - 1, order) + 1, first)
    _store(total, no_sums(sizes, config))
    for number in tl.range(first, until, num_stages=1, disable_licm=True):
        start = tl.maximum(begin, split_begin(number, order))
        stop = tl.minimum(end, split_begin(number + 1, order))
        whole = tl.minimum(tl.maximum(seen.whole_until // tile, start), stop)
        whole = tl.where(start * tile < seen.whole_from, start, whole)
        sums = no_sums(sizes, config)
        number_at = page_of(seen.table, seen.columns, start, page, tile)
        for i in tl.range(start, whole, disable_licm=True):
            sums, number_at = _add_whole(sums, queries, seen, number_at, i, sizes, order)
        for i in tl.range(whole, stop, num_stages=1, disable_licm=True):
            sums, number_at = _add_masked(sums, queries, seen, number_at, i, sizes, order)
        _add_split(total, sums)
    tl.debug_barrier()  # as in `_add_split`
    lane = tl.arange(0, config.lanes)
    weight = tl.maximum(tl.load(total.totals + lane), 1e-30)
    for i in tl.static_range(triton.cdiv(sizes.rank, sizes.width)):
        value = tl.load(_block_at(total, i, sizes.width, config.lanes)) / weight[None, :]
        store_block(out_at, splits, value, i, sizes)


@triton.jit
def _add_whole(sums, queries, seen, page, i, sizes: tl.constexpr, order: tl.constexpr):
    """Adds a tile that is fully visible to all lanes; returns the page of the next tile too."""
    at, page = tile_at(seen, page, i, sizes, order)
    inside = (i * order.tile + tl.arange(0, order.tile) < seen.high)[:, None]
    latents, keys = load_latents(at, inside, sizes), load_rope(at, inside, sizes)
    scores = scores_of(queries[0], queries[1], latents, keys, seen.scale)
    sums, weights = rescaled(sums, scores, keys.dtype)
    blocks = sums.blocks
    # Always true: the copies of the next tile start before a branch, and after other products.
    if i * order.tile < seen.whole_until:
        blocks = ()
        for j in tl.static_range(len(latents)):
            blocks = blocks + (product(latents[j], weights, sums.blocks[j]),)
    return LatentSums(blocks=blocks, peak=sums.peak, total=sums.total), page


@triton.jit
def _add_masked(sums, queries, seen, page, i, sizes: tl.constexpr, order: tl.constexpr):
    """Same as `_add_whole` for any tile; latents are loaded again, without the unusable ones."""
    at, page = tile_at(seen, page, i, sizes, order)
    inside = (i * order.tile + tl.arange(0, order.tile) < seen.high)[:, None]
    latents, keys = load_latents(at, inside, sizes), load_rope(at, inside, sizes)
    scores = scores_of(queries[0], queries[1], latents, keys, seen.scale)
    scores, is_bad = masked(scores, seen, i, order)
    sums, weights = rescaled(sums, scores, keys.dtype)
    blocks = ()
    for j in tl.static_range(len(latents)):
        clean = load_block(at, inside & (is_bad == 0)[:, None], j, sizes)
        blocks = blocks + (product(clean, weights, sums.blocks[j]),)
    return LatentSums(blocks=blocks, peak=sums.peak, total=sums.total), page


@triton.jit
def _store(total, sums):
    """Stores the total of a program."""
    lanes: tl.constexpr = sums.peak.shape[0]
    lane = tl.arange(0, lanes)
    tl.store(total.peaks + lane, sums.peak)
    tl.store(total.totals + lane, sums.total)
    for i in tl.static_range(len(sums.blocks)):
        tl.store(_block_at(total, i, sums.blocks[i].shape[0], lanes), sums.blocks[i])


@triton.jit
def _add_split(total, more):
    """Merges the accumulator of a split into the total of a program."""
    lanes: tl.constexpr = more.peak.shape[0]
    lane = tl.arange(0, lanes)
    tl.debug_barrier()  # other threads may have stored what a thread loads
    old_peak, old = tl.load(total.peaks + lane), tl.load(total.totals + lane)
    peak = tl.maximum(old_peak, more.peak)
    ours, theirs = tl.exp2(old_peak - peak), tl.exp2(more.peak - peak)
    tl.debug_barrier()  # other threads may still load what a thread stores
    tl.store(total.peaks + lane, peak)
    tl.store(total.totals + lane, fold(old, more.total, ours, theirs))
    for i in tl.static_range(len(more.blocks)):
        at = _block_at(total, i, more.blocks[i].shape[0], lanes)
        value = fold(tl.load(at), more.blocks[i], ours[None, :], theirs[None, :])
        tl.store(at, value)


@triton.jit
def _block_at(total, i, width: tl.constexpr, lanes: tl.constexpr):
    """Returns the addresses of a block of columns of a total, [width, lanes]."""
    column = i * width + tl.arange(0, width)
    return total.sums + column[:, None] * lanes + tl.arange(0, lanes)[None, :]
