"""Main loop of `latent_attention`: online softmax over tiles of latent rows (Triton)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.triton_gpu.attention.attention import NEGATIVE, page_of
from kernels.triton_gpu.attention.latent_combine import fold


class LatentSizes(NamedTuple):
    """Sizes of the operands.

    Attributes:
      heads: Query heads.
      rank, rope: Columns of the latent and of the rope key.
      width, rope_width: Columns of a loaded block of each; the latent has one or more blocks.
      page: Positions of a page.
    """

    heads: int
    rank: int
    rope: int
    width: int
    rope_width: int
    page: int


class LatentOrder(NamedTuple):
    """Compile-time settings of the reduction: positions of a span and a tile, and window nodes."""

    span: int
    tile: int
    nodes: int


class LatentConfig(NamedTuple):
    """Tile config of the kernel.

    Attributes:
      lanes: (row, head) pairs of a program.
      ones: Rows of 1 in the product that sums the weights, 16 per warp.
      sharing: Maximum programs that share the positions of a block of lanes.
      rows: Maximum rows of a request, rounded up to a power of two.
    """

    lanes: int
    ones: int
    sharing: int
    rows: int


class LatentSums(NamedTuple):
    """Online softmax accumulator, transposed: blocks of values [width, lanes], maximum [lanes], and
    total [ones, lanes] with equal rows.
    """

    blocks: Any
    peak: Any
    total: Any


class LatentRange(NamedTuple):
    """Positions that the lanes of a program attend to.

    Attributes:
      pool, table, columns: Latent rows of the layer, page table of the request, and its columns.
      window: Address of each lane's tree mask.
      first, until: Visible positions of each lane before the window.
      high: End of the positions that are read.
      scale: Multiplier of the scores, times log2(e).
    """

    pool: Any
    table: Any
    columns: Any
    window: Any
    first: Any
    until: Any
    high: Any
    scale: Any


@triton.jit
def sum_positions(
    q_at,
    seen,
    begin,
    end,
    units,
    sizes: tl.constexpr,
    order: tl.constexpr,
    config: tl.constexpr,
):
    """Accumulates tiles [begin, end): tiles into units, and units in total, or stores units."""
    rank: tl.constexpr = sizes.rank
    rope: tl.constexpr = sizes.rope
    page: tl.constexpr = sizes.page
    tile: tl.constexpr = order.tile
    lanes: tl.constexpr = config.lanes
    lane = tl.arange(0, lanes)[:, None]
    heads_at, is_lane = (
        q_at + units.place * (rank + rope) + lane * (rank + rope),
        lane < units.count,
    )
    q = _load_latents(heads_at, is_lane, sizes)
    q_rope = _load_rope(heads_at, is_lane, sizes)
    # Tiles that are fully visible to all lanes need no mask.
    whole = tl.minimum(tl.maximum(tl.cdiv(tl.max(seen.first), tile), begin), end)
    partly = tl.minimum(tl.maximum(tl.min(seen.until) // tile, whole), end)
    sums, whole_sums = _no_sums(sizes, config), _no_sums(sizes, config)
    for i in tl.range(begin, whole, num_stages=1):
        sums = _add_masked(q, q_rope, seen, i, sums, sizes, order)
        sums, whole_sums = _close(i, end, sums, whole_sums, units, sizes, config)
    page = page_of(seen.table, seen.columns, whole, page, tile)
    for i in range(whole, partly):
        at, page = _tile_at(seen, page, i, sizes, order)
        latents, keys = _load_latents(at, None, sizes), _load_rope(at, None, sizes)
        scores = _scores(q, q_rope, latents, keys, seen.scale)
        highest = tl.max(scores, axis=0)
        weights = tl.exp2(scores - highest[None, :]).to(keys.dtype)
        sums = _add_tile(sums, highest, weights, latents)
        sums, whole_sums = _close(i, end, sums, whole_sums, units, sizes, config)
    for i in tl.range(partly, end, num_stages=1):
        sums = _add_masked(q, q_rope, seen, i, sums, sizes, order)
        sums, whole_sums = _close(i, end, sums, whole_sums, units, sizes, config)
    return whole_sums


@triton.jit
def _no_sums(sizes: tl.constexpr, config: tl.constexpr):
    """Returns an empty accumulator."""
    rank: tl.constexpr = sizes.rank
    width: tl.constexpr = sizes.width
    lanes: tl.constexpr = config.lanes
    ones: tl.constexpr = config.ones
    values = ()
    for _ in tl.static_range(triton.cdiv(rank, width)):
        values = values + (tl.zeros((width, lanes), tl.float32),)
    peak = tl.full((lanes,), NEGATIVE, tl.float32)
    total = tl.zeros((ones, lanes), tl.float32)
    return LatentSums(blocks=values, peak=peak, total=total)


@triton.jit
def _tile_at(seen, number, i, sizes: tl.constexpr, order: tl.constexpr):
    """Returns the addresses of the rows of a tile, [tile, 1], and the page of the next tile.

    If pages consist of whole tiles, a tile has one base address, and the page is loaded one tile
    ahead, so key loads do not wait.
    """
    rank: tl.constexpr = sizes.rank
    rope: tl.constexpr = sizes.rope
    page: tl.constexpr = sizes.page
    tile: tl.constexpr = order.tile
    size: tl.constexpr = rank + rope
    row = tl.arange(0, tile)
    if page % tile == 0:
        base = number.to(tl.int64) * page + i * tile % page
        at = seen.pool + base * size + (row * size)[:, None]
        number = page_of(seen.table, seen.columns, i + 1, page, tile)
    else:
        position = i * tile + row
        pages = tl.load(seen.table + tl.minimum(position // page, seen.columns - 1))
        at = seen.pool + ((pages.to(tl.int64) * page + position % page) * size)[:, None]
    return at, number


@triton.jit
def _load_latents(at, keep, sizes: tl.constexpr):
    """Loads blocks of latent columns of the rows that `keep` selects, 0 elsewhere; None: all."""
    rank: tl.constexpr = sizes.rank
    width: tl.constexpr = sizes.width
    blocks = ()
    for i in tl.static_range(triton.cdiv(rank, width)):
        blocks = blocks + (_load_block(at, keep, i, sizes),)
    return blocks


@triton.jit
def _load_block(at, keep, i, sizes: tl.constexpr):
    """Loads one block of latent columns; columns past the latent are 0."""
    rank: tl.constexpr = sizes.rank
    width: tl.constexpr = sizes.width
    column = i * width + tl.arange(0, width)[None, :]
    if rank % width != 0:
        keep = column < rank if keep is None else keep & (column < rank)
    if keep is None:
        return tl.load(at + column)
    else:
        return tl.load(at + column, mask=keep, other=0.0)


@triton.jit
def _load_rope(at, keep, sizes: tl.constexpr):
    """Loads rope keys of the rows that `keep` selects; columns past the key are 0."""
    rank: tl.constexpr = sizes.rank
    rope: tl.constexpr = sizes.rope
    rope_width: tl.constexpr = sizes.rope_width
    column = tl.arange(0, rope_width)[None, :]
    if rope != rope_width:
        keep = column < rope if keep is None else keep & (column < rope)
    if keep is None:
        return tl.load(at + rank + column)
    else:
        return tl.load(at + rank + column, mask=keep, other=0.0)


@triton.jit
def _scores(q, q_rope, latents, keys, scale):
    """Computes the scores of a tile, [tile, lanes], in one chain: latent columns, then rope."""
    # "ieee": float32 stays float32, no tf32
    scores = tl.dot(latents[0], tl.trans(q[0]), input_precision="ieee")
    for i in tl.static_range(1, len(latents)):
        scores = tl.dot(latents[i], tl.trans(q[i]), scores, input_precision="ieee")
    return tl.dot(keys, tl.trans(q_rope), scores, input_precision="ieee") * scale


@triton.jit
def _add_masked(q, q_rope, seen, i, sums, sizes: tl.constexpr, order: tl.constexpr):
    """Adds a tile that is not fully visible to all lanes."""
    rank: tl.constexpr = sizes.rank
    rope: tl.constexpr = sizes.rope
    width: tl.constexpr = sizes.width
    page: tl.constexpr = sizes.page
    tile: tl.constexpr = order.tile
    nodes: tl.constexpr = order.nodes
    position = i * tile + tl.arange(0, tile)
    inside = position < seen.high
    number = tl.load(seen.table + position // page, mask=inside, other=0)
    row = number.to(tl.int64) * page + position % page
    at = seen.pool + (row * (rank + rope))[:, None]
    latents = _load_latents(at, inside[:, None], sizes)
    keys = _load_rope(at, inside[:, None], sizes)
    scores = _scores(q, q_rope, latents, keys, seen.scale)
    is_bad = tl.zeros((tile,), tl.int32)
    for j in tl.static_range(triton.cdiv(rank, width)):
        is_finite = tl.abs(latents[j]) < float("inf")
        is_bad = tl.maximum(is_bad, tl.max(tl.where(is_finite, 0, 1), axis=1))
    sees = (position[:, None] >= seen.first[None, :]) & (position[:, None] < seen.until[None, :])
    if nodes > 0:
        node = position[:, None] - seen.until[None, :]
        in_window = (node >= 0) & (node < nodes)
        sees |= tl.load(seen.window + node, mask=in_window, other=0).to(tl.int32) != 0
    scores = tl.where(sees, scores, NEGATIVE)
    highest = tl.max(scores, axis=0)
    weights = tl.where(sees, tl.exp2(scores - highest[None, :]), 0.0).to(keys.dtype)
    # 0 x NaN is NaN: non-finite latents are read as 0, and the lanes that attend to them get NaN.
    latents = _load_latents(at, (inside & (is_bad == 0))[:, None], sizes)
    gets_nan = tl.max(tl.where(sees, is_bad[:, None], 0), axis=0)
    blocks = ()
    for j in tl.static_range(triton.cdiv(rank, width)):
        blocks = blocks + (tl.where(gets_nan[None, :] == 0, sums.blocks[j], float("nan")),)
    sums = LatentSums(blocks=blocks, peak=sums.peak, total=sums.total)
    return _add_tile(sums, highest, weights, latents)


@triton.jit
def _add_tile(sums, highest, weights, latents):
    """Adds a tile, with weights relative to its own maximum, to the accumulator."""
    peak = tl.maximum(sums.peak, highest)
    ours, theirs = tl.exp2(sums.peak - peak)[None, :], tl.exp2(highest - peak)[None, :]
    # Tensor cores sum in one order for any number of lanes; a reduction over threads does not.
    units = tl.full((sums.total.shape[0], weights.shape[0]), 1.0, weights.dtype)
    more = tl.dot(units, weights, input_precision="ieee")
    total = sums.total * ours + more * theirs
    values = ()
    for i in tl.static_range(len(latents)):
        more = tl.dot(tl.trans(latents[i]), weights, input_precision="ieee")
        values = values + (sums.blocks[i] * ours + more * theirs,)
    return LatentSums(blocks=values, peak=peak, total=total)


@triton.jit
def _close(i, end, sums, whole_sums, units, sizes: tl.constexpr, config: tl.constexpr):
    """Stores a unit after its last tile, or adds it to the total if positions are not shared."""
    sharing: tl.constexpr = config.sharing
    if ((i + 1) % units.tiles == 0) | (i + 1 == end):
        if sharing > 1:
            _store_unit(units, i // units.tiles - units.base, sums, sizes)
        else:
            whole_sums = _fold_unit(whole_sums, sums)
        sums = _no_sums(sizes, config)
    return sums, whole_sums


@triton.jit
def _fold_unit(sums, more):
    """Merges two accumulators; `more` covers later positions."""
    peak = tl.maximum(sums.peak, more.peak)
    ours, theirs = tl.exp2(sums.peak - peak)[None, :], tl.exp2(more.peak - peak)[None, :]
    values = ()
    for i in tl.static_range(len(sums.blocks)):
        values = values + (fold(sums.blocks[i], more.blocks[i], ours, theirs),)
    return LatentSums(blocks=values, peak=peak, total=fold(sums.total, more.total, ours, theirs))


@triton.jit
def _store_unit(units, unit, sums, sizes: tl.constexpr):
    """Stores the accumulator of a unit."""
    at = unit * units.stride + units.place
    for i in tl.static_range(len(sums.blocks)):
        store_block(units.parts.sums, at, sums.blocks[i], units.count, i, sizes)
    lane = tl.arange(0, sums.peak.shape[0])
    tl.store(units.parts.peaks + at + lane, sums.peak, mask=lane < units.count)
    total = tl.max(sums.total, axis=0)
    tl.store(units.parts.totals + at + lane, total, mask=lane < units.count)


@triton.jit
def store_block(out_at, at, block, count, i, sizes: tl.constexpr):
    """Stores a block of columns, [width, lanes], of the first `count` lanes; `at` is the first."""
    rank: tl.constexpr = sizes.rank
    width: tl.constexpr = sizes.width
    lane = tl.arange(0, block.shape[1])[:, None]
    column = i * width + tl.arange(0, width)[None, :]
    out_at += at * rank + lane * rank + column
    tl.store(out_at, tl.trans(block), mask=(lane < count) & (column < rank))
