"""WGMMA main loop of `latent_attention_sm90`: online softmax over tiles of latent rows (Gluon)."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from kernels.latent_tiles import LATENT_COLUMNS, SM90_RANK, SM90_ROPE
from kernels.triton_gpu.attention.verify_sm90_loads import pairs_of
from kernels.triton_gpu.attention.verify_sm90_mainloop import (
    LANES,
    NEGATIVE,
    TILE,
    WARPS,
    WarpgroupPairs,
    beside,
    lines_of,
    visible,
    wide,
)
from kernels.triton_gpu.gemm.linear_sm90 import barrier

GROUPS = gl.constexpr(2)
"""Consumer warpgroups of a program."""
HALF = gl.constexpr(TILE.value // 2)
"""Positions of a tile of which a warpgroup computes the scores."""
WIDTH, BLOCKS = gl.constexpr(LATENT_COLUMNS), gl.constexpr(4)
"""Columns and number of the blocks of a latent, of which a warpgroup accumulates two."""
ROPE, RANK = gl.constexpr(SM90_ROPE), gl.constexpr(SM90_RANK)
SIZE = gl.constexpr(SM90_RANK + SM90_ROPE)
_PART = gl.constexpr(32)
"""Latent columns per step of the clean-up of a tile."""


class LatentPipeline(NamedTuple):
    """Queries and the ring of tiles in shared memory, with their mbarriers.

    Attributes:
      queries, query_ropes: Blocks of latent columns of the queries, and their rope parts.
      tiles, ropes: Per stage, the blocks of latent columns of a tile, and its rope keys.
      come, is_free: Barriers: a tile has arrived, both warpgroups have finished it.
      queries_come, queries_free: Barriers: the same for the queries of a block of lanes.
      peaks, counts: Per warpgroup, the maxima of its scores, and the sums of its weights as
        integers.
      weights, bad: Weights of a tile, and the mask of unusable positions.
      meet: Barrier of both warpgroups, passed twice per tile.
    """

    queries: Any
    query_ropes: Any
    tiles: Any
    ropes: Any
    come: Any
    is_free: Any
    queries_come: Any
    queries_free: Any
    peaks: Any
    counts: Any
    weights: Any
    bad: Any
    meet: Any


class LatentResults(NamedTuple):
    """Outputs, and the totals of programs, for each warpgroup and block of columns.

    A program adds splits to a total in global memory: registers hold one accumulator only.
    """

    out: Any
    totals: Any


class LatentSm90Config(NamedTuple):
    """Sizes of the reduction and of the launch.

    Attributes:
      near, split, far_split: Tiles; see `LatentAttentionOrder`.
      blocks: Blocks of lanes of a request.
      stages: Pipeline stages.
    """

    near: int
    split: int
    far_split: int
    blocks: int
    stages: int


class LatentItem(NamedTuple):
    """Block of lanes of a request.

    Attributes:
      request, block: Indices of the request, and of the block of lanes in it.
      place, count: Index of the first lane among all, and the lanes of the request from it on.
      begin, end: First tile, and the end.
    """

    request: Any
    block: Any
    place: Any
    count: Any
    begin: Any
    end: Any


@gluon.jit
def item_of(
    number,
    seen,
    num_requests,
    columns,
    warps: gl.constexpr,
    heads: gl.constexpr,
    config: gl.constexpr,
):
    """Returns the work item `number`; the last blocks of requests, the longest, come first."""
    request, block = number % num_requests, config.blocks - 1 - number // num_requests
    start, stop = gl.load(seen.starts + request), gl.load(seen.starts + request + 1)
    lane: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    row = start + (block * LANES + gl.arange(0, LANES, layout=lane)) // heads.q_heads
    row = gl.maximum(gl.minimum(row, stop - 1), 0)
    first, until = gl.load(seen.first + row), gl.load(seen.until + row)
    low = gl.min(gl.minimum(first, until), 0)
    high = gl.minimum(gl.max(until, 0), columns * heads.page)
    begin = low // TILE
    # A block without visible positions reads one tile, which gives zeros.
    end = gl.maximum(gl.cdiv(high, TILE), begin + 1)
    end = gl.where(start + block * LANES // heads.q_heads < stop, end, begin)
    return LatentItem(
        request=request,
        block=block,
        place=start * heads.q_heads + block * LANES,
        count=(stop - start) * heads.q_heads - block * LANES,
        begin=begin,
        end=end,
    )


@gluon.jit
def attend_items(
    pipeline,
    seen,
    results,
    num_requests,
    columns,
    scale,
    which: gl.constexpr,
    heads: gl.constexpr,
    config: gl.constexpr,
):
    """Accumulates the items of a program in one warpgroup, and writes the results."""
    of_rows: gl.constexpr = gl.SliceLayout(1, wide(HALF))
    items = config.blocks * num_requests
    step, turn = 0 * items, 0 * items
    for number in range(gl.program_id(0), items, gl.num_programs(0)):
        item = item_of(number, seen, num_requests, columns, WARPS, heads, config)
        block = WarpgroupPairs(request=item.request, head=0, number=item.block, part=which)
        pairs = pairs_of(block, seen, HALF, heads)
        whole_from, whole_until = gl.max(pairs.first, 0), gl.min(pairs.until, 0)
        if item.begin < item.end:
            mbarrier.wait(pipeline.queries_come.index(0), turn & 1)
        peak = gl.full((LANES,), NEGATIVE, gl.float32, layout=of_rows)
        total = gl.zeros((LANES,), gl.float32, layout=of_rows)
        i = item.begin
        while i < item.end:
            tiles = gl.where(i < config.near, config.split, config.far_split)
            until = gl.minimum((i // tiles + 1) * tiles, item.end)
            own_peak = gl.full((LANES,), NEGATIVE, gl.float32, layout=of_rows)
            own_total = gl.zeros((LANES,), gl.float32, layout=of_rows)
            one = gl.zeros((LANES, WIDTH), gl.float32, layout=wide(WIDTH))
            other = gl.zeros((LANES, WIDTH), gl.float32, layout=wide(WIDTH))
            for number_of_tile in range(i, until):
                own_peak, own_total, one, other = _add_tile(
                    pipeline,
                    pairs,
                    number_of_tile,
                    step,
                    (number_of_tile * TILE < whole_from)
                    | ((number_of_tile + 1) * TILE > whole_until),
                    own_peak,
                    own_total,
                    one,
                    other,
                    scale,
                    which,
                    config,
                )
                step += 1
            highest = gl.maximum(peak, own_peak)
            ours, theirs = gl.exp2(peak - highest), gl.exp2(own_peak - highest)
            total = total * ours + own_total * theirs
            peak = highest
            is_first, is_last = i == item.begin, until == item.end
            _fold_block(results, item, one, ours, theirs, total, is_first, is_last, which, 0)
            _fold_block(results, item, other, ours, theirs, total, is_first, is_last, which, 1)
            i = until
        if item.begin < item.end:
            mbarrier.arrive(pipeline.queries_free.index(0), count=1)
            turn += 1


@gluon.jit
def _add_tile(
    pipeline,
    pairs,
    i,
    step,
    is_partly,
    peak,
    total,
    one,
    other,
    scale,
    which: gl.constexpr,
    config: gl.constexpr,
):
    """Adds a tile to the accumulator of a split.

    A warpgroup computes the weights of one half of the positions, and reads the other's.
    """
    of_scores: gl.constexpr = wide(HALF)
    unit: gl.constexpr = (1 << 30) // TILE
    slot = step % config.stages
    mbarrier.wait(pipeline.come.index(slot), (step // config.stages) & 1)
    scores = gl.zeros((LANES, HALF), gl.float32, layout=of_scores)
    for j in gl.static_range(BLOCKS):
        keys = pipeline.tiles.index(slot * BLOCKS + j).slice(which * HALF, HALF, dim=0)
        scores = warpgroup_mma(
            pipeline.queries.index(j), keys.permute((1, 0)), scores, use_acc=j > 0, is_async=True
        )
    keys = pipeline.ropes.index(slot).slice(which * HALF, HALF, dim=0)
    scores = warpgroup_mma(
        pipeline.query_ropes.index(0), keys.permute((1, 0)), scores, is_async=True
    )
    scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,)) * scale
    if is_partly:
        position = gl.arange(0, HALF, layout=gl.SliceLayout(0, of_scores))
        sees = visible(i * TILE + which * HALF + position, pairs)
        is_finite = (scores < float("inf")) & (scores > -float("inf"))
        is_used = is_finite | (pairs.is_one[:, None] == 0)
        is_bad = gl.max(gl.where(is_used, 0, 1), 0)
        pipeline.bad.slice(which * HALF, HALF).store(is_bad)
        scores = gl.where(is_bad[None, :] == 0, scores, float("inf"))
        scores = gl.where(sees, scores, NEGATIVE)
    own_peak = gl.max(scores, 1)
    pipeline.peaks.index(which).store(own_peak)
    mbarrier.arrive(pipeline.meet.index(0), count=1)
    mbarrier.wait(pipeline.meet.index(0), 0)
    if is_partly:
        _clean(pipeline, slot, which)
    theirs = pipeline.peaks.index(1 - which).load(gl.SliceLayout(1, of_scores))
    highest = gl.maximum(peak, gl.maximum(own_peak, theirs))
    ours = gl.exp2(peak - highest)
    # Before the first visible position, masked scores must not get the weight of the maximum.
    above = gl.where(highest == NEGATIVE, 0.0, highest)
    weights = gl.exp2(scores - above[:, None]).to(gl.bfloat16)
    pipeline.weights.slice(which * HALF, HALF, dim=1).store(weights)
    # Integers have the same sum in any order.
    more = gl.sum((weights.to(gl.float32) * unit + 0.5).to(gl.int32), 1)
    pipeline.counts.index(which).store(more)
    across = beside(ours, WIDTH)
    one, other = one * across, other * across
    mbarrier.arrive(pipeline.meet.index(0), count=1)
    mbarrier.wait(pipeline.meet.index(0), 1)
    weights = pipeline.weights.load(gl.DotOperandLayout(0, wide(WIDTH), 2))
    more += pipeline.counts.index(1 - which).load(gl.SliceLayout(1, of_scores))
    total = total * ours + more.to(gl.float32) * (1 / unit)
    values = pipeline.tiles.index(slot * BLOCKS + 2 * which)
    one = warpgroup_mma(weights, values, one, is_async=True)
    values = pipeline.tiles.index(slot * BLOCKS + 2 * which + 1)
    other = warpgroup_mma(weights, values, other, is_async=True)
    one, other = warpgroup_mma_wait(num_outstanding=0, deps=(one, other))
    mbarrier.arrive(pipeline.is_free.index(slot), count=1)
    return highest, total, one, other


@gluon.jit
def _clean(pipeline, slot, which: gl.constexpr):
    """Sets a warpgroup's latents of unusable positions to 0: 0 x NaN is NaN."""
    lines: gl.constexpr = lines_of(_PART)
    is_bad = pipeline.bad.load(gl.SliceLayout(1, lines))
    if gl.max(is_bad, 0) > 0:
        for j in gl.static_range(2):
            tile = pipeline.tiles.index(slot * BLOCKS + 2 * which + j)
            for i in gl.static_range(WIDTH // _PART):
                part = tile.slice(i * _PART, _PART, dim=1)
                clean = gl.where(is_bad[:, None] > 0, 0.0, part.load(lines))
                part.store(clean.to(gl.bfloat16))
        fence_async_shared()
        barrier()


@gluon.jit
def _fold_block(
    results,
    item,
    more,
    ours,
    theirs,
    total,
    is_first,
    is_last,
    which: gl.constexpr,
    number: gl.constexpr,
):
    """Adds a split to the total of a block of columns; the last split writes the outputs."""
    layout: gl.constexpr = wide(WIDTH)
    index = ((gl.program_id(0) * GROUPS + which) * 2 + number) * LANES
    lane = index + gl.arange(0, LANES, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout))
    at = results.totals + lane[:, None] * WIDTH + column[None, :]
    is_kept = (column[None, :] >= 0) & (lane[:, None] >= gl.where(is_first, 1 << 30, 0))
    value = gl.load(at, mask=is_kept, other=0.0, cache_modifier=".cg")
    value = value * beside(ours, WIDTH) + more * beside(theirs, WIDTH)
    if is_last:
        _write(results.out, item, value / beside(gl.maximum(total, 1e-30), WIDTH), which, number)
    else:
        gl.store(at, value)


@gluon.jit
def _write(out_at, item, value, which: gl.constexpr, number: gl.constexpr):
    """Writes a block of columns of the lanes that are not spare."""
    layout: gl.constexpr = wide(WIDTH)
    lane = gl.arange(0, LANES, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, layout)) + (2 * which + number) * WIDTH
    at = (item.place + lane).to(gl.int64)[:, None] * RANK + column[None, :]
    keep = (lane < item.count)[:, None] & (column >= 0)[None, :]
    gl.store(out_at + at, value.to(gl.bfloat16), mask=keep)
