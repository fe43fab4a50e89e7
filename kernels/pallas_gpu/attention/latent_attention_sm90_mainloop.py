"""WGMMA main loop of `latent_attention_sm90`: online softmax over tiles of latent rows (Pallas,
Mosaic GPU).
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.latent_tiles import LATENT_COLUMNS
from kernels.pallas_gpu.attention.online_softmax import NEGATIVE
from kernels.pallas_gpu.attention.verify_sm90_mainloop import (
    LANES,
    OF_COLUMNS,
    OF_ROWS,
    TILE,
    beside,
    loaded_pairs,
    nothing,
    visible,
)
from kernels.pallas_gpu.gemm.ptx import (
    LAYOUT,
    divided,
    flushed_power_of_two,
    plus,
    product_of,
    sum_of,
    times,
)

GROUPS, BLOCKS, OWN = 2, 4, 2
"""Consumer warpgroups, blocks of latent columns, and those that a warpgroup accumulates."""
HALF = TILE // GROUPS
"""Positions of a tile of which a warpgroup computes the scores."""
_PART = 64
"""Latent columns per step of the search for non-finite values."""
_COUNTED = (1 << 30) // TILE
"""Units of a weight of 1 in the integer sum of weights."""


class LatentSm90Refs(NamedTuple):
    """Global memory references of a program.

    Attributes:
      q, pool, layer, table: Queries of the lanes of each block, cached rows of all layers, and see
        `attend_latent`.
      pairs: `first` and `until` of the lanes.
      bounds: Request of a block of lanes, its first tile, the end, and the range of positions that
        are visible to all of its lanes.
      out: Outputs of the lanes of each block.
      totals: Totals of programs, for each warpgroup and block of columns; registers hold the
        accumulator of one split only.
    """

    q: Any
    pool: Any
    layer: Any
    table: Any
    pairs: Any
    bounds: Any
    out: Any
    totals: Any


class LatentBuffers(NamedTuple):
    """Shared memory of a program.

    Attributes:
      queries, query_ropes: Blocks of latent columns of the queries, and their rope parts; the
        former also hold outputs.
      tiles, ropes: Per stage, the blocks of latent columns of a tile, and its rope keys.
      peaks, weights: Maxima of the scores of each warpgroup, and the weights of a tile.
      counts: Per warpgroup, the sums of its weights as integers, and the mask of unusable
        positions, then whether there are any. One array, since each is padded to 1 KiB.
      come, is_free: Barriers: a tile has arrived, both warpgroups have finished it.
      queries_come, queries_free: Barriers: the same for the queries of a block of lanes.
      meet: Barrier of both warpgroups.
    """

    queries: Any
    query_ropes: Any
    tiles: Any
    ropes: Any
    peaks: Any
    weights: Any
    counts: Any
    come: Any
    is_free: Any
    queries_come: Any
    queries_free: Any
    meet: Any


class LatentSm90Work(NamedTuple):
    """Compile-time settings.

    Attributes:
      blocks: Blocks of lanes.
      pages, page: Pages of the pool, and positions of a page.
      near, split, far_split: Tiles; see `LatentAttentionOrder`.
      scale: Multiplier of the scores, times log2(e).
      programs, stages: Programs of the launch, and pipeline stages.
    """

    blocks: int
    pages: int
    page: int
    near: int
    split: int
    far_split: int
    scale: float
    programs: int
    stages: int


class LatentItem(NamedTuple):
    """Block of lanes of a request.

    Attributes:
      place: Index of the first lane among all.
      request, begin, end, whole_from, whole_until: See `LatentSm90Refs.bounds`.
    """

    place: Any
    request: Any
    begin: Any
    end: Any
    whole_from: Any
    whole_until: Any


def _split_of(i, work):
    """Returns the split that contains tile `i`."""
    far = lax.div(jnp.maximum(i - work.near, 0), work.far_split)
    return lax.div(jnp.minimum(i, work.near), work.split) + far


def _split_begin(number, work):
    """Returns the first tile of a split."""
    nears = work.near // work.split
    far = jnp.maximum(number - nears, 0) * work.far_split
    return jnp.minimum(number, nears) * work.split + far


def attend_item(refs, shared, program, group, item, step, work):
    """Accumulates the tiles of a block of lanes in one warpgroup, and writes its outputs."""
    pairs = loaded_pairs(refs.pairs.at[i, pl.ds(item.place, LANES)] for i in range(2))

    def add_split(number, total):
        begin = jnp.maximum(_split_begin(number, work), item.begin)
        end = jnp.minimum(_split_begin(number + 1, work), item.end)
        add = functools.partial(_add_tile, shared, pairs, item, group, step, work)
        empty = nothing(LATENT_COLUMNS)
        split = (empty.value, empty.value, empty.peak, empty.total)
        *values, own_peak, own_total = lax.fori_loop(begin, end, add, split)
        peak, weight = total
        highest = jnp.maximum(peak, own_peak)
        ours, theirs = (flushed_power_of_two(x - highest, OF_ROWS) for x in (peak, own_peak))
        weight = sum_of(
            product_of(weight, ours, OF_ROWS), product_of(own_total, theirs, OF_ROWS), OF_ROWS
        )
        is_first, is_last = begin == item.begin, end == item.end

        for i, more in enumerate(values):
            at = refs.totals.at[program, group, i]
            old = lax.cond(
                is_first,
                lambda at=at: plgpu.layout_cast(jnp.zeros(at.shape, jnp.float32), LAYOUT),
                lambda at=at: plgpu.load(at, layout=LAYOUT, optimized=False),
            )
            across = (beside(x, LATENT_COLUMNS) for x in (ours, theirs))
            value = sum_of(*(product_of(x, y) for x, y in zip((old, more), across, strict=True)))

            # Both warpgroups have used the queries when they exchange the last weights.
            @pl.when(is_last)
            def _write(value=value, i=i):
                by = beside(jnp.maximum(weight, 1e-30), LATENT_COLUMNS)
                out = divided(value, by).astype(jnp.bfloat16)
                shared.queries[group * OWN + i] = out

            @pl.when(~is_last)
            def _store(value=value, at=at):
                at[...] = value

        return highest, weight

    empty = nothing(LATENT_COLUMNS)

    @pl.when(item.begin < item.end)
    def _attend():
        first, end = _split_of(item.begin, work), _split_of(item.end - 1, work) + 1
        lax.fori_loop(first, end, add_split, (empty.peak, empty.total))
        plgpu.commit_smem()
        lanes = pl.ds(item.place, LANES)
        for i in range(OWN):
            block = group * OWN + i
            columns = pl.ds(block * LATENT_COLUMNS, LATENT_COLUMNS)
            plgpu.copy_smem_to_gmem(shared.queries.at[block], refs.out.at[lanes, columns])
        plgpu.wait_smem_to_gmem(0)


def _add_tile(shared, pairs, item, group, first_step, work, i, split):
    """Adds a tile to the accumulator of a split: two blocks of values, maximum and total.

    A warpgroup computes the weights of one half of the positions, and reads the other's.
    """
    *values, peak, total = split
    slot = lax.rem(first_step + i - item.begin, work.stages)
    plgpu.barrier_wait(shared.come.at[slot])
    half = pl.ds(pl.multiple_of(group * HALF, HALF), HALF)

    def multiply(scores_ref):
        for j in range(BLOCKS):
            keys = shared.tiles.at[slot, j, half].transpose((1, 0))
            plgpu.wgmma(scores_ref, shared.queries.at[j], keys)
        keys = shared.ropes.at[slot, half].transpose((1, 0))
        plgpu.wgmma(scores_ref, shared.query_ropes, keys)
        return scores_ref[...]

    scores = pl.run_scoped(multiply, plgpu.ACC((LANES, HALF), jnp.float32))
    scores = times(scores, work.scale)
    is_partly = (i * TILE < item.whole_from) | ((i + 1) * TILE > item.whole_until)
    scores = lax.cond(
        is_partly,
        lambda scores: _masked(shared, pairs, scores, slot, group, i),
        lambda scores: scores,
        scores,
    )
    shared.peaks[group] = scores.max(axis=1)
    _meet(shared)
    highest = peak
    for number in range(GROUPS):
        highest = jnp.maximum(highest, _loaded(shared.peaks.at[number]))
    # Before the first visible position, masked scores must not get the weight of the maximum.
    above = jnp.where(highest == NEGATIVE, 0.0, highest)
    weights = flushed_power_of_two(scores - beside(above, HALF)).astype(jnp.bfloat16)
    shared.weights.at[:, half][...] = weights
    # Integers have the same sum in any order.
    counted = plus(times(weights.astype(jnp.float32), float(_COUNTED)), 0.5).astype(jnp.int32)
    shared.counts[0, group] = counted.sum(axis=1)
    decay = flushed_power_of_two(peak - highest, OF_ROWS)
    across = beside(decay, LATENT_COLUMNS)
    values = [product_of(value, across) for value in values]
    _meet(shared)
    weights = plgpu.load(shared.weights, layout=LAYOUT)
    counts = _loaded(shared.counts.at[0, 0]) + _loaded(shared.counts.at[0, 1])
    more = times(counts.astype(jnp.float32), 1 / _COUNTED, OF_ROWS)
    total = sum_of(product_of(total, decay, OF_ROWS), more, OF_ROWS)

    def accumulate(refs):
        for j, ref in enumerate(refs):
            plgpu.wgmma(ref, weights, shared.tiles.at[slot, group * OWN + j])

    values = pl.run_state(accumulate)(tuple(plgpu.ACC.init(value) for value in values))
    plgpu.barrier_arrive(shared.is_free.at[slot])
    return *values, highest, total


def _meet(shared):
    """Waits until both warpgroups have come here."""
    plgpu.barrier_arrive(shared.meet)
    plgpu.barrier_wait(shared.meet)


def _loaded(line):
    """Loads a value of each lane."""
    return plgpu.load(line, layout=OF_ROWS, optimized=False)


def _masked(shared, pairs, scores, slot, group, i):
    """Masks the scores of a tile, and sets the latents of unusable positions to 0.

    0 x NaN is NaN. The scores of lanes that attend to such positions are infinite, so their weights
    and results are NaN.
    """
    bad_ref, bad = shared.counts.at[1, group], None
    blocks = [shared.tiles.at[slot, j] for j in range(BLOCKS)]
    for block in [*blocks, shared.ropes.at[slot]]:
        for column in range(0, block.shape[1], _PART):
            part = plgpu.load(block.at[:, pl.ds(column, _PART)], layout=LAYOUT)
            is_bad = jnp.where(jnp.abs(part.astype(jnp.float32)) < jnp.inf, 0, 1).max(axis=1)
            bad = is_bad if bad is None else jnp.maximum(bad, is_bad)
    bad_ref[...] = bad
    half = pl.ds(pl.multiple_of(group * HALF, HALF), HALF)
    scores = jnp.where(_across(bad_ref.at[half], HALF) > 0, jnp.inf, scores)
    bad_ref[...] = _across(bad_ref, TILE).max(axis=1)  # equal for all lanes

    @pl.when(bad_ref[0] > 0)
    def _clean():
        # Both warpgroups have read the whole tile, then clean their columns of it.
        _meet(shared)
        for j in range(OWN):
            block = shared.tiles.at[slot, group * OWN + j]
            for column in range(0, LATENT_COLUMNS, _PART):
                at = slice(None), pl.ds(column, _PART)
                part = plgpu.load(block.at[at], layout=LAYOUT)
                is_bad = beside(bad, _PART) > 0
                block.at[at][...] = jnp.where(is_bad, jnp.zeros_like(part), part)
        plgpu.commit_smem()

    is_visible = visible(pairs, i * TILE + group * HALF, HALF)
    return jnp.where(is_visible, scores, NEGATIVE)


def _across(line, columns):
    """Loads a value of each position, and repeats it for all lanes."""
    line = plgpu.load(line, layout=OF_COLUMNS, optimized=False)
    return lax.broadcast_in_dim(line, (LANES, columns), [1])
