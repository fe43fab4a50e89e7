"""WGMMA main loop of `attention_layer_sm90` and `attention_sm90`: online softmax (Pallas, Mosaic
GPU).

Scores, weights and accumulators of a tile stay in the registers of a warpgroup, in WGMMA layout.
Threads exchange only the maximum of a row.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels.pallas_gpu.attention.online_softmax import NEGATIVE, SoftmaxState
from kernels.pallas_gpu.gemm.ptx import (
    LAYOUT,
    flushed_power_of_two,
    product_of,
    sum_of,
    times,
)

LANES, TILE = 64, 64
"""Pairs of a warpgroup, which are the rows of a WGMMA, and positions of a tile."""
ONES = 16
"""Columns of 1 in the WGMMA that sums the weights."""
GROUPS = 2
"""Consumer warpgroups of a program."""
_PART = 64
"""Value columns per step of the search for non-finite values."""
OF_ROWS, OF_COLUMNS = LAYOUT.reduce(1), LAYOUT.reduce(0)


class VerifyBuffers(NamedTuple):
    """Shared memory of a program.

    Attributes:
      queries, ones: Queries of each warpgroup, and the ones that sum the weights.
      keys, values: Tiles of each stage. If warpgroups share value tiles, each has a spare one after
        them, for a tile in which non-finite values are set to 0.
      lines: Rows of queries, gates and outputs, staged for copies; also zeros.
      bad: Per warpgroup, the mask of positions that are set to 0, and whether there are any.
      lines_come, keys_come, values_come, is_free, is_ready: Barriers: a copy has arrived (three),
        both warpgroups have finished a tile, the queries of both are loaded.
    """

    queries: Any
    ones: Any
    keys: Any
    values: Any
    lines: Any
    bad: Any
    lines_come: Any
    keys_come: Any
    values_come: Any
    is_free: Any
    is_ready: Any


class VerifyTileWork(NamedTuple):
    """Compile-time settings of the kernel.

    Attributes:
      group, piece: Query heads of a KV head, and query heads per copy.
      D, width: Size of a head, and the columns of it that a warpgroup processes.
      copied: KV heads, or column blocks of one, that a program loads.
      rows: Rows of a block.
      blocks, pages, programs: Blocks of a request, pages of the pool, and programs of a request.
      span, split, page: Positions of each.
      stages: Pipeline stages.
      scale: Multiplier of the scores, times log2(e).
      has_sinks: Whether query heads have sinks.
      gated: Whether there are gates.
    """

    group: int
    piece: int
    D: int
    width: int
    copied: int
    rows: int
    blocks: int
    pages: int
    programs: int
    span: int
    split: int
    page: int
    stages: int
    scale: float
    has_sinks: bool
    gated: bool

    @property
    def pieces(self) -> int:
        """Copies per row."""
        return self.group // self.piece

    @property
    def parts(self) -> int:
        """Column blocks of a head."""
        return self.D // self.width

    @property
    def is_shared(self) -> bool:
        """Returns whether both warpgroups read the same tiles."""
        return self.copied < GROUPS

    @property
    def spare(self) -> int:
        """Spare value tiles, one per warpgroup if tiles are shared."""
        return GROUPS if self.is_shared else 0


class SplitRange(NamedTuple):
    """Share of a request's positions that one program processes.

    Attributes:
      begin, end: First tile, and the end.
      base: First span of the request.
      is_alone: Whether the request has one span, so that no partial result is stored.
      is_one: Whether the program has a share.
    """

    begin: Any
    end: Any
    base: Any
    is_alone: Any
    is_one: Any


class PairMask(NamedTuple):
    """Attention bounds of the pairs of a warpgroup.

    Attributes:
      pairs: `first` and `until` of each pair.
      whole_from, whole_until: Positions that are visible to all pairs; their values are used
        unchanged.
      old_from, old_until: Positions with values that are used unchanged in partly visible tiles
        too.
    """

    pairs: dict[str, Any]
    whole_from: Any
    whole_until: Any
    old_from: Any
    old_until: Any


def loaded_pairs(lines):
    """Loads `first` and `until` of each pair; the keys are these names."""
    loaded = (plgpu.load(line, layout=OF_ROWS, optimized=False) for line in lines)
    return dict(zip(("first", "until"), loaded, strict=True))


def spans_of(share, work):
    """Returns the first span of a program's tiles, and the end."""
    each = work.span // TILE
    return lax.div(share.begin, each), pl.cdiv(share.end, each)


def sum_span(shared, share, span, group, mask, work):
    """Accumulates the program's tiles of a span in one warpgroup: tiles, splits, then the span."""

    def add(i, carry):
        split, sums = carry
        step = i - share.begin
        slot = lax.rem(step, work.stages)
        own = 0 if work.copied == 1 else group
        keys, number = shared.keys.at[slot], slot * work.copied + own
        is_partly = (i * TILE < mask.whole_from) | ((i + 1) * TILE > mask.whole_until)
        plgpu.barrier_wait(shared.values_come.at[slot])
        value, number = lax.cond(
            is_partly,
            lambda value: _zero_nonfinite(value, number, shared, group, i, mask, work),
            lambda value: (value, number),
            split.value,
        )
        values = shared.values.at[number]
        plgpu.barrier_wait(shared.keys_come.at[slot])

        def multiply(scores_ref):
            if work.parts == 1:
                queries = shared.queries.at[group]
                plgpu.wgmma(scores_ref, queries, keys.at[own].transpose((1, 0)))
            else:
                for part in range(work.parts):
                    queries = shared.queries.at[part]
                    plgpu.wgmma(scores_ref, queries, keys.at[part].transpose((1, 0)))
            return scores_ref[...]

        scores = pl.run_scoped(multiply, plgpu.ACC((LANES, TILE), jnp.float32))
        scores = times(scores, work.scale)
        scores = lax.cond(
            is_partly,
            lambda scores: jnp.where(visible(mask.pairs, i * TILE, TILE), scores, NEGATIVE),
            lambda scores: scores,
            scores,
        )
        highest = jnp.maximum(split.peak, scores.max(axis=1))
        # Before the first visible position, masked scores must not get the weight of the maximum.
        above = jnp.where(highest == NEGATIVE, 0.0, highest)
        weights = flushed_power_of_two(scores - beside(above, TILE)).astype(jnp.bfloat16)
        decay = flushed_power_of_two(split.peak - highest, OF_ROWS)
        value = product_of(value, beside(decay, work.width))
        total = product_of(split.total, beside(decay, ONES))

        def accumulate(value_ref, total_ref):
            plgpu.wgmma(total_ref, weights, shared.ones.at[pl.ds(0, ONES)].transpose((1, 0)))
            plgpu.wgmma(value_ref, weights, values)

        value, total = pl.run_state(lambda refs: accumulate(*refs))(
            (plgpu.ACC.init(value), plgpu.ACC.init(total))
        )
        plgpu.barrier_arrive(shared.is_free.at[slot])
        ends_split = (lax.rem((i + 1) * TILE, work.split) == 0) | (i + 1 == end)
        return lax.cond(
            ends_split, end_split, lambda *x: x, SoftmaxState(value, highest, total), sums
        )

    def end_split(split, sums):
        total = split.total.max(axis=1)
        return nothing(work.width, ONES), folded(sums, split._replace(total=total))

    each = work.span // TILE
    begin = jnp.maximum(share.begin, span * each)
    end = jnp.minimum(share.end, (span + 1) * each)
    return lax.fori_loop(begin, end, add, (nothing(work.width, ONES), nothing(work.width)))[1]


def nothing(width, *ones):
    """Returns an empty accumulator; within a split the total has `ones` equal columns."""
    total = jnp.zeros((LANES, *ones), jnp.float32)
    return SoftmaxState(
        plgpu.layout_cast(jnp.zeros((LANES, width), jnp.float32), LAYOUT),
        plgpu.layout_cast(jnp.full((LANES,), NEGATIVE, jnp.float32), OF_ROWS),
        plgpu.layout_cast(total, LAYOUT if ones else OF_ROWS),
    )


def beside(x, columns):
    """Broadcasts a value of each pair over `columns` columns."""
    return lax.broadcast_in_dim(x, (LANES, columns), [0])


def folded(sums, more):
    """Same as `online_softmax.fold`."""
    highest = jnp.maximum(sums.peak, more.peak)
    ours, theirs = (flushed_power_of_two(x.peak - highest, OF_ROWS) for x in (sums, more))

    def added(x, y, ours, theirs, layout):
        return sum_of(product_of(x, ours, layout), product_of(y, theirs, layout), layout)

    width = sums.value.shape[1]
    across = (beside(x, width) for x in (ours, theirs))
    return SoftmaxState(
        added(sums.value, more.value, *across, LAYOUT),
        highest,
        added(sums.total, more.total, ours, theirs, OF_ROWS),
    )


def visible(pairs, begin, columns):
    """Returns the mask of the positions that each pair attends to, `columns` from `begin` on."""
    shape = LANES, columns
    position = begin + plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=LAYOUT)
    first, until = (beside(pairs[name], columns) for name in ("first", "until"))
    return (position >= first) & (position < until)


def _zero_nonfinite(value, number, shared, group, i, mask, work):
    """Sets non-finite values of a tile to 0, because 0 x NaN is NaN.

    The accumulators of pairs that attend to them get NaN. Old positions (`old_from` to `old_until`)
    are used unchanged, as in a fully visible tile. Returns the accumulator, and the index of the
    tile to use.
    """
    values_ref, bad_ref, bad = shared.values.at[number], shared.bad.at[group], None
    for column in range(0, work.width, _PART):
        part = values_ref.at[:, pl.ds(column, _PART)]
        v = plgpu.load(part, layout=LAYOUT).astype(jnp.float32)
        bad_in_part = jnp.where(jnp.abs(v) < jnp.inf, 0, 1).max(axis=1)
        bad = bad_in_part if bad is None else jnp.maximum(bad, bad_in_part)
    position = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 0, layout=LAYOUT).max(axis=1)
    position += i * TILE
    is_old = (position >= mask.old_from) & (position < mask.old_until)
    is_zeroed = jnp.where(is_old, 0, bad)
    bad_ref[0] = is_zeroed
    across = plgpu.load(bad_ref.at[0], layout=OF_COLUMNS, optimized=False)
    across = lax.broadcast_in_dim(across, (LANES, TILE), [1])
    bad_ref[1] = across.max(axis=1)  # equal for all pairs

    def zero_positions(value):
        tile = work.stages * work.copied + group if work.is_shared else number
        for column in range(0, work.width, _PART):
            at = slice(None), pl.ds(column, _PART)
            v = plgpu.load(values_ref.at[at], layout=LAYOUT)
            clean = jnp.where(beside(is_zeroed, v.shape[1]) > 0, jnp.zeros_like(v), v)
            shared.values.at[tile].at[at][...] = clean
        plgpu.commit_smem()
        gets_nan = jnp.where(visible(mask.pairs, i * TILE, TILE), across, 0).max(axis=1)
        return jnp.where(beside(gets_nan, work.width) > 0, jnp.nan, value), tile

    return lax.cond(bad_ref[1, 0] > 0, zero_positions, lambda value: (value, number), value)
