"""Main loop of `latent_attention`: online softmax over tiles of latent rows (Triton)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.triton_gpu.attention.attention import (
    page_of,
)
from kernels.triton_gpu.attention.latent_combine import fold, split_of, split_tiles
from kernels.triton_gpu.attention.online_softmax import (
    NEGATIVE,
)


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
    """Compile-time settings of the reduction: sizes of `LatentAttentionOrder`, and window nodes."""

    near: int
    split: int
    far_split: int
    tile: int
    nodes: int


class LatentConfig(NamedTuple):
    """Tile config of the kernel.

    Attributes:
      lanes: (row, head) pairs of a program.
      sharing: Maximum programs that share the positions of a block of lanes.
      rows: Maximum rows of a request, rounded up to a power of two.
    """

    lanes: int
    sharing: int
    rows: int


class LatentSums(NamedTuple):
    """Online softmax accumulator, transposed: blocks of values [width, lanes], maximum and total
    [lanes].
    """

    blocks: Any
    peak: Any
    total: Any


class LatentRange(NamedTuple):
    """Positions that the lanes of a program attend to.

    Attributes:
      pool, table, columns: Latent rows of the layer, page table of the request, and its columns.
      row: Flat row of each lane.
      first, until, window: Visible positions of all rows; see `QueryRows`.
      whole_from, whole_until: Positions that are visible to all lanes.
      high: End of the positions that are read.
      scale: Multiplier of the scores, times log2(e).
    """

    pool: Any
    table: Any
    columns: Any
    row: Any
    first: Any
    until: Any
    window: Any
    whole_from: Any
    whole_until: Any
    high: Any
    scale: Any


@triton.jit
def sum_positions(
    q_at,
    seen,
    begin,
    end,
    splits,
    sizes: tl.constexpr,
    order: tl.constexpr,
    config: tl.constexpr,
):
    """Accumulates tiles [begin, end) by splits; returns the total, or stores each split."""
    rank: tl.constexpr = sizes.rank
    rope: tl.constexpr = sizes.rope
    page: tl.constexpr = sizes.page
    tile: tl.constexpr = order.tile
    lanes: tl.constexpr = config.lanes
    lane = tl.arange(0, lanes)[:, None]
    heads_at, is_lane = (
        q_at + splits.place * (rank + rope) + lane * (rank + rope),
        lane < splits.count,
    )
    q = _load_latents(heads_at, is_lane, sizes)
    q_rope = _load_rope(heads_at, is_lane, sizes)
    split, total = _no_sums(sizes, config), _no_sums(sizes, config)
    page = page_of(seen.table, seen.columns, begin, page, tile)
    tree, row_begin, rows, stop = end, 0, 1, end
    if order.nodes > 0:
        # From tile `tree` on, each row reads the tiles along its own path.
        tree = tl.minimum(tl.maximum(seen.whole_until // tile, begin), end)
        row_begin, rows = tl.min(seen.row), tl.max(seen.row) - tl.min(seen.row) + 1
        stop = tree + (end - tree) * rows
    # Without hoisted addresses, which would take registers from the accumulators.
    for step in tl.range(begin, stop, disable_licm=True):
        i, row = step, row_begin
        if order.nodes > 0:
            i = tl.minimum(step, tree) + tl.maximum(step - tree, 0) // rows
            row += tl.maximum(step - tree, 0) % rows
            at, inside = _path_tile_at(seen, i, row, sizes, order)
        else:
            at, page = _tile_at(seen, page, i, sizes, order)
            inside = (i * tile + tl.arange(0, tile) < seen.high)[:, None]
        latents, keys = _load_latents(at, inside, sizes), _load_rope(at, inside, sizes)
        scores = _scores(q, q_rope, latents, keys, seen.scale)
        is_bad, any_bad = tl.zeros((tile,), tl.int32), tl.zeros((), tl.int32)
        # Tiles that are fully visible to all lanes need no mask.
        if (i * tile < seen.whole_from) | ((i + 1) * tile > seen.whole_until):
            scores, is_bad = _masked(scores, seen, i, row, step < tree, order)
            any_bad = tl.max(is_bad)
        split, weights = _rescaled(split, scores, keys.dtype)
        if any_bad > 0:
            if order.nodes > 0:  # computed again, to save registers
                at, inside = _path_tile_at(seen, i, row, sizes, order)
            blocks = ()
            for j in tl.static_range(len(latents)):
                clean = _load_block(at, inside & (is_bad == 0)[:, None], j, sizes)
                blocks = blocks + (_product(clean, weights, split.blocks[j]),)
        else:
            blocks = ()
            for j in tl.static_range(len(latents)):
                blocks = blocks + (_product(latents[j], weights, split.blocks[j]),)
        split = LatentSums(blocks=blocks, peak=split.peak, total=split.total)
        is_end = ((i + 1) % split_tiles(i, order) == 0) | (i + 1 == end)
        if order.nodes > 0:
            is_end = is_end & ((step < tree) | (row == row_begin + rows - 1))
        if is_end:
            if config.sharing > 1:
                _store_split(splits, split_of(i, order) - splits.base, split, sizes)
            else:
                total = _fold(total, split)
            split = _no_sums(sizes, config)
    return total


@triton.jit
def _no_sums(sizes: tl.constexpr, config: tl.constexpr):
    """Returns an empty accumulator."""
    rank: tl.constexpr = sizes.rank
    width: tl.constexpr = sizes.width
    lanes: tl.constexpr = config.lanes
    values = ()
    for _ in tl.static_range(triton.cdiv(rank, width)):
        values = values + (tl.zeros((width, lanes), tl.float32),)
    peak = tl.full((lanes,), NEGATIVE, tl.float32)
    total = tl.zeros((lanes,), tl.float32)
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
def _path_tile_at(seen, i, row, sizes: tl.constexpr, order: tl.constexpr):
    """Returns the addresses of a tile that a row of a tree reads, [tile, 1], and their mask.

    Tiles before the window are the same for all rows.
    """
    page: tl.constexpr = sizes.page
    nodes: tl.constexpr = order.nodes
    position = i * order.tile + tl.arange(0, order.tile)
    until = tl.load(seen.until + row)
    place, is_node = _path_places(seen.window + row * nodes, until, position, nodes)
    is_read = is_node | (position < until)
    number = tl.load(seen.table + place // page, mask=is_read, other=0)
    at = seen.pool + (number.to(tl.int64) * page + place % page) * (sizes.rank + sizes.rope)
    return at[:, None], is_read[:, None]


@triton.jit
def _path_places(window_at, until, position, nodes: tl.constexpr):
    """Returns where a row of a tree reads some positions of plain decoding.

    The nodes that the row attends to are at consecutive positions in the order of the sums, as in
    plain decoding, for any order of the window: a node has the bits of plain decoding.

    Args:
      window_at: Window of the row.
      until: KV position of the window.
      position: Positions of plain decoding.
      nodes: Width of the window.

    Returns:
      Their KV positions, and which are of nodes; others are as they were.
    """
    node = tl.arange(0, triton.next_power_of_2(nodes))
    is_node = tl.load(window_at + node, mask=node < nodes, other=0).to(tl.int32)
    path_position = tl.where(is_node != 0, until + tl.cumsum(is_node) - 1, -1)
    is_here = path_position[None, :] == position[:, None]
    number = tl.sum(tl.where(is_here, node[None, :] + 1, 0), axis=1)  # from 1; 0: none
    return tl.where(number > 0, until + number - 1, position), number > 0


@triton.jit
def _load_latents(at, keep, sizes: tl.constexpr):
    """Loads blocks of latent columns of the rows that `keep` selects, 0 elsewhere."""
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
        keep &= column < rank
    return tl.load(at + column, mask=keep, other=0.0)


@triton.jit
def _load_rope(at, keep, sizes: tl.constexpr):
    """Loads rope keys of the rows that `keep` selects; columns past the key are 0."""
    rank: tl.constexpr = sizes.rank
    rope: tl.constexpr = sizes.rope
    rope_width: tl.constexpr = sizes.rope_width
    column = tl.arange(0, rope_width)[None, :]
    if rope != rope_width:
        keep &= column < rope
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
def _masked(scores, seen, i, row, is_shared, order: tl.constexpr):
    """Masks the scores of a tile; returns them, and the positions with unusable latents.

    0 x NaN is NaN: latents of positions without finite scores are read as 0. The scores of lanes
    that attend to them are infinite, so their weights and results are NaN. Only lanes of `row`
    attend to a tile that is not shared.
    """
    tile: tl.constexpr = order.tile
    nodes: tl.constexpr = order.nodes
    position = (i * tile + tl.arange(0, tile))[:, None]
    first, until = tl.load(seen.first + seen.row), tl.load(seen.until + seen.row)
    if nodes > 0:
        node = tl.arange(0, triton.next_power_of_2(nodes))
        is_node = tl.load(seen.window + row * nodes + node, mask=node < nodes, other=0)
        first, until = tl.minimum(first, until), until + tl.sum(is_node.to(tl.int32))
    sees = (position >= first[None, :]) & (position < until[None, :])
    if nodes > 0:
        sees &= (seen.row == row)[None, :] | is_shared
    is_bad = tl.max(tl.where(tl.abs(scores) < float("inf"), 0, 1), axis=1)
    scores = tl.where(is_bad[:, None] == 0, scores, float("inf"))
    return tl.where(sees, scores, NEGATIVE), is_bad


@triton.jit
def _rescaled(sums, scores, dtype: tl.constexpr):
    """Returns an accumulator relative to the maximum with a tile, with the weights of the tile in
    its total; and the weights.
    """
    unit: tl.constexpr = (1 << 30) // scores.shape[0]
    peak = tl.maximum(sums.peak, tl.max(scores, axis=0))
    ours = tl.exp2(sums.peak - peak)
    # Before the first visible position, masked scores must not get the weight of the maximum.
    above = tl.where(peak == NEGATIVE, 0.0, peak)
    weights = tl.exp2(scores - above[None, :]).to(dtype)
    # Integers have the same sum in any order.
    more = tl.sum((weights.to(tl.float32) * unit + 0.5).to(tl.int32), axis=0)
    total = sums.total * ours + more.to(tl.float32) * (1 / unit)
    blocks = ()
    for i in tl.static_range(len(sums.blocks)):
        blocks = blocks + (sums.blocks[i] * ours[None, :],)
    return LatentSums(blocks=blocks, peak=peak, total=total), weights


@triton.jit
def _product(latents, weights, value):
    """Adds the weighted latents of a tile to a block of values."""
    return tl.dot(tl.trans(latents), weights, value, input_precision="ieee")


@triton.jit
def _fold(sums, more):
    """Merges two accumulators; `more` covers later positions."""
    peak = tl.maximum(sums.peak, more.peak)
    ours, theirs = tl.exp2(sums.peak - peak), tl.exp2(more.peak - peak)
    values = ()
    for i in tl.static_range(len(sums.blocks)):
        values = values + (fold(sums.blocks[i], more.blocks[i], ours[None, :], theirs[None, :]),)
    return LatentSums(blocks=values, peak=peak, total=fold(sums.total, more.total, ours, theirs))


@triton.jit
def _store_split(splits, number, sums, sizes: tl.constexpr):
    """Stores the accumulator of a split; lanes are contiguous, as in the accumulator."""
    rank: tl.constexpr = sizes.rank
    width: tl.constexpr = sizes.width
    lane = tl.arange(0, sums.peak.shape[0])
    keep = lane < splits.count
    at = splits.parts.sums + number.to(tl.int64) * rank * splits.stride + splits.place
    for i in tl.static_range(len(sums.blocks)):
        column = (i * width + tl.arange(0, width))[:, None]
        mask = keep[None, :] if rank % width == 0 else keep[None, :] & (column < rank)
        tl.store(at + column * splits.stride + lane[None, :], sums.blocks[i], mask=mask)
    at = number * splits.stride + splits.place + lane
    tl.store(splits.parts.peaks + at, sums.peak, mask=keep)
    tl.store(splits.parts.totals + at, sums.total, mask=keep)


@triton.jit
def store_block(out_at, at, block, count, i, sizes: tl.constexpr):
    """Stores a block of columns, [width, lanes], of the first `count` lanes; `at` is the first."""
    rank: tl.constexpr = sizes.rank
    width: tl.constexpr = sizes.width
    lane = tl.arange(0, block.shape[1])[:, None]
    column = i * width + tl.arange(0, width)[None, :]
    out_at += at * rank + lane * rank + column
    tl.store(out_at, tl.trans(block), mask=(lane < count) & (column < rank))
