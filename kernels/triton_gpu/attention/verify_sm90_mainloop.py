"""WGMMA main loop of `attention_layer_sm90` and `attention_sm90`: online softmax (Gluon).

Scores, weights and accumulators of a tile stay in the registers of a warpgroup, in WGMMA layout.
Threads exchange only the maximum of a row.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents

from kernels.triton_gpu.gemm.linear_sm90 import barrier

LOG2_E = gl.constexpr(1.4426950408889634)
NEGATIVE = gl.constexpr(-1e30)
LANES, TILE = gl.constexpr(64), gl.constexpr(64)
"""Pairs of a warpgroup, which are the rows of a WGMMA, and positions of a tile."""
ONES = gl.constexpr(16)
"""Columns of 1 in the WGMMA that sums the weights."""
WARPS = gl.constexpr(4)
_PART = gl.constexpr(32)
"""Value columns per step of the search for non-finite values."""


class WarpgroupPairs(NamedTuple):
    """Block of pairs and value columns of a warpgroup.

    Attributes:
      request, head: Request and KV head of the pairs.
      number: Index of the block, among those of the request and head.
      part: Index of the block of value columns.
    """

    request: Any
    head: Any
    number: Any
    part: Any


class HeadRowPairs(NamedTuple):
    """(row, query head) pairs, which are the rows of a WGMMA.

    Attributes:
      place: Index of each pair among the queries.
      is_one: Mask of the pairs that are not spare.
      first, until: Visible positions of each pair.
    """

    place: Any
    is_one: Any
    first: Any
    until: Any


class KVPipeline(NamedTuple):
    """Multistage pipeline of key and value tiles in shared memory, with its mbarriers.

    Attributes:
      k_tiles, v_tiles: Per stage, one tile of keys and `copied` tiles of values. If warpgroups
        share value tiles, each has a spare one after them, for a tile in which non-finite values
        are set to 0.
      keys_come, values_come: Barriers: a tile has arrived.
      is_free: Barriers: all warpgroups have finished a tile.
    """

    k_tiles: Any
    v_tiles: Any
    keys_come: Any
    values_come: Any
    is_free: Any


class SplitRange(NamedTuple):
    """Share of a request's positions that one program processes.

    Attributes:
      begin, end: First tile, and the end.
      whole_from, whole_until: Positions that are visible to all pairs; their values are used
        unchanged.
      old_from, old_until: Positions with values that are used unchanged in partly visible tiles
        too.
      base, units: First span of the request, and its number of spans.
      is_alone: Whether the request has one span, so that no partial result is stored.
      sharing: Number of programs of the request; 0 if this program has no share.
    """

    begin: Any
    end: Any
    whole_from: Any
    whole_until: Any
    old_from: Any
    old_until: Any
    base: Any
    units: Any
    is_alone: Any
    sharing: Any


class StoredArrays(NamedTuple):
    """Outputs of all rows, the projection that contains the gates, and the sinks of query heads."""

    out: Any
    gate: Any
    sinks: Any


class StoredLayout(NamedTuple):
    """Addresses of the epilogue.

    Attributes:
      out, gate, sinks: See `StoredArrays`.
      starts: First flat row of each request.
    """

    out: Any
    gate: Any
    sinks: Any
    starts: Any


class SpanPartials(NamedTuple):
    """Split-KV partial results of programs.

    Attributes:
      arrivals: Arrival counters of each request's programs.
      sums, peaks, totals: Partial results of each span: values (acc), peaks (m), totals (l).
    """

    arrivals: Any
    sums: Any
    peaks: Any
    totals: Any


class VerifyTileConfig(NamedTuple):
    """Tile config of the kernel.

    Attributes:
      groups: Consumer warpgroups.
      blocks, parts: Blocks of pairs of a request and KV head, and blocks of value columns.
      width: Columns of such a column block.
      copied: Column blocks that a program loads.
      stages: Pipeline stages.
      span, split: Positions of each.
      has_sinks: Whether query heads have sinks.
    """

    groups: int
    blocks: int
    parts: int
    width: int
    copied: int
    stages: int
    span: int
    split: int
    has_sinks: bool


@gluon.jit
def attend_pairs(
    queries,
    ones,
    pipeline,
    block,
    pairs,
    own,
    stored,
    partials,
    num_rows,
    counters,
    scale,
    heads: gl.constexpr,
    config: gl.constexpr,
    is_launched: gl.constexpr,
):
    """Accumulates a share; the last program to arrive combines the spans and writes the result."""
    peak, total, sums = no_sums(config.width)
    stride = num_rows * heads.q_heads
    each: gl.constexpr = config.span // TILE
    for unit in range(own.begin // each, gl.cdiv(own.end, each)):
        begin, end = gl.maximum(own.begin, unit * each), gl.minimum(own.end, (unit + 1) * each)
        peak, total, sums = sum_span(
            queries, ones, pipeline, pairs, own, begin, end, scale, 0, config
        )
        if not own.is_alone:
            place = pairs.place + (unit - own.base) * stride
            _store_span(partials, block.part, place, pairs.is_one, peak, total, sums, heads, config)
    if is_launched:
        # Not earlier: programs of the next kernel must not take registers that warps exchange.
        gdc_launch_dependents()
    is_last = own.is_alone & (own.sharing > 0)
    if (not own.is_alone) & (own.sharing > 0):
        barrier()
        counter = partials.arrivals + block.request * counters + gl.program_id(0)
        is_last = gl.atomic_add(counter, 1, sem="acq_rel") == own.sharing - 1
        if is_last:
            gl.store(counter, 0)
            peak, total, sums = no_sums(config.width)
            for unit in range(0, own.units):
                place = pairs.place + unit * stride
                more = _load_span(partials, block.part, place, pairs.is_one, heads, config)
                peak, total, sums = fold(peak, total, sums, more[0], more[1], more[2])
    if is_last:
        if config.has_sinks:
            total = with_sinks(total, peak, pairs, stored, heads)
        finish(stored, block, total, sums, heads, config)


@gluon.jit
def sum_span(
    queries,
    ones,
    pipeline,
    pairs,
    own,
    begin,
    end,
    scale,
    which: gl.constexpr,
    config: gl.constexpr,
):
    """Accumulates the program's tiles of a span in one warpgroup: tiles, splits, then the span."""
    of_scores: gl.constexpr = wide(TILE)
    of_values: gl.constexpr = wide(config.width)
    of_totals: gl.constexpr = wide(ONES)
    lanes: gl.constexpr = gl.SliceLayout(1, of_scores)
    peak, total, sums = no_sums(config.width)
    s_peak, s_total, s_sums = _no_split(config.width)
    zero = gl.zeros((LANES, TILE), gl.float32, layout=of_scores)
    for i in range(begin, end):
        step = i - own.begin
        slot = step % config.stages
        phase = (step // config.stages) & 1
        keys = pipeline.k_tiles.index(slot)
        v_slot = slot * config.copied + which % config.copied
        is_partly = (i * TILE < own.whole_from) | ((i + 1) * TILE > own.whole_until)
        if is_partly:
            mbarrier.wait(pipeline.values_come.index(slot), phase)
            values = pipeline.v_tiles.index(v_slot)
            is_zeroed = _nonfinite_positions(values, i * TILE, own, config.width)
            if gl.max(is_zeroed, 0) > 0:
                if config.groups > 1:
                    v_slot = config.stages * config.copied + which + 0 * slot
                cleaned = pipeline.v_tiles.index(v_slot)
                gets_nan = _zero_positions(
                    values, cleaned, is_zeroed, i * TILE, pairs, config.width
                )
                s_sums = gl.where(beside(gets_nan, config.width) > 0, float("nan"), s_sums)
        mbarrier.wait(pipeline.keys_come.index(slot), phase)
        scores = warpgroup_mma(queries, keys.permute((1, 0)), zero, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(num_outstanding=0, deps=(scores,)) * scale
        if is_partly:
            position = i * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, of_scores))
            scores = gl.where(visible(position, pairs), scores, NEGATIVE)
        highest = gl.maximum(s_peak, gl.max(scores, 1))
        # Before the first visible position, masked scores must not get the weight of the maximum.
        above = gl.where(highest == NEGATIVE, 0.0, highest)
        weights = gl.exp2(scores - above[:, None]).to(gl.bfloat16)
        mbarrier.wait(pipeline.values_come.index(slot), phase)
        decay = gl.exp2(s_peak - highest)
        s_peak = highest
        s_total = s_total * beside(decay, ONES)
        s_sums = s_sums * beside(decay, config.width)
        for_totals = gl.convert_layout(weights, gl.DotOperandLayout(0, of_totals, 2))
        for_values = gl.convert_layout(weights, gl.DotOperandLayout(0, of_values, 2))
        s_total = warpgroup_mma(for_totals, ones.permute((1, 0)), s_total, is_async=True)
        s_sums = warpgroup_mma(for_values, pipeline.v_tiles.index(v_slot), s_sums, is_async=True)
        s_total, s_sums = warpgroup_mma_wait(num_outstanding=0, deps=(s_total, s_sums))
        mbarrier.arrive(pipeline.is_free.index(slot), count=1)
        if ((i + 1) * TILE % config.split == 0) | (i + 1 == end):
            split_total = gl.convert_layout(gl.max(s_total, 1), lanes)
            peak, total, sums = fold(peak, total, sums, s_peak, split_total, s_sums)
            s_peak, s_total, s_sums = _no_split(config.width)
    return peak, total, sums


@gluon.jit
def with_sinks(total, peak, pairs, stored, heads: gl.constexpr):
    """Returns the total weight of each pair with the sink of its query head."""
    sink = gl.load(stored.sinks + pairs.place % heads.q_heads).to(gl.float32)
    return total + gl.exp2(sink * LOG2_E - peak)


@gluon.jit
def finish(stored, block, total, sums, heads: gl.constexpr, config: gl.constexpr):
    """Divides by the total weight, applies the sigmoid gate and writes the outputs of some rows."""
    q_heads: gl.constexpr = heads.q_heads
    group: gl.constexpr = q_heads // heads.k_heads
    lines: gl.constexpr = lines_of(config.width)
    starts_at = stored.starts + block.request
    lane = block.number * LANES + gl.arange(0, LANES, layout=gl.SliceLayout(1, lines))
    row, q_head = gl.load(starts_at) + lane // group, block.head * group + lane % group
    column = gl.arange(0, config.width, layout=gl.SliceLayout(0, lines))
    column = (block.part * config.width + column)[None, :]
    keep = (row < gl.load(starts_at + 1))[:, None] & (column >= 0)
    out = sums / gl.maximum(beside(total, config.width), 1e-30)
    if heads.gated:
        at = row.to(gl.int64) * heads.line + (2 * q_head + 1) * heads.D
        gate = gl.load(stored.gate + at[:, None] + column, mask=keep, other=0.0)
        gate = gl.convert_layout(gate, wide(config.width)).to(gl.float32)
        out = out / (1.0 + gl.exp2(gate * -LOG2_E))
    out = gl.convert_layout(out.to(gl.bfloat16), lines)
    at = (row.to(gl.int64) * q_heads + q_head)[:, None] * heads.D + column
    gl.store(stored.out + at, out, mask=keep)


@gluon.constexpr_function
def wide(columns):
    """Returns the WGMMA accumulator layout of 64 rows."""
    return gl.NVMMADistributedLayout([3, 0], [WARPS.value, 1], [16, columns, 16])


@gluon.constexpr_function
def lines_of(columns):
    """Returns the layout in which a warpgroup loads and stores rows."""
    wide = min(columns // 8, 32)
    return gl.BlockedLayout([1, 8], [32 // wide, wide], [WARPS.value, 1], [1, 0])


@gluon.jit
def no_sums(D: gl.constexpr):
    """Returns an empty accumulator: peaks, totals and weighted values."""
    lanes: gl.constexpr = gl.SliceLayout(1, wide(TILE))
    peak = gl.full((LANES,), NEGATIVE, gl.float32, layout=lanes)
    total = gl.zeros((LANES,), gl.float32, layout=lanes)
    return peak, total, gl.zeros((LANES, D), gl.float32, layout=wide(D))


@gluon.jit
def _no_split(D: gl.constexpr):
    """Returns an empty accumulator of a split; its total has `ONES` equal columns."""
    lanes: gl.constexpr = gl.SliceLayout(1, wide(TILE))
    peak = gl.full((LANES,), NEGATIVE, gl.float32, layout=lanes)
    total = gl.zeros((LANES, ONES), gl.float32, layout=wide(ONES))
    return peak, total, gl.zeros((LANES, D), gl.float32, layout=wide(D))


@gluon.jit
def beside(x, columns: gl.constexpr):
    """Broadcasts a value of each pair over `columns` columns."""
    return gl.convert_layout(x, gl.SliceLayout(1, wide(columns)))[:, None]


@gluon.jit
def fold(peak, total, sums, more_peak, more_total, more_sums):
    """Merges two accumulators; `more` covers later positions."""
    D: gl.constexpr = sums.shape[1]
    highest = gl.maximum(peak, more_peak)
    ours, theirs = gl.exp2(peak - highest), gl.exp2(more_peak - highest)
    sums = sums * beside(ours, D) + more_sums * beside(theirs, D)
    return highest, total * ours + more_total * theirs, sums


@gluon.jit
def visible(position, pairs):
    """Returns the mask of positions that each pair attends to, [pairs, positions]."""
    position = position[None, :]
    return (position >= pairs.first[:, None]) & (position < pairs.until[:, None])


@gluon.jit
def _nonfinite_positions(values, begin, own, D: gl.constexpr):
    """Returns the mask of a tile's positions with a non-finite value, without old positions.

    0 x NaN is NaN: such values are set to 0, and the pairs that attend to them get NaN. Old
    positions (`old_from` to `old_until`) are used unchanged, as in a fully visible tile.
    """
    lines: gl.constexpr = lines_of(_PART)
    position = begin + gl.arange(0, TILE, layout=gl.SliceLayout(1, lines))
    highest = gl.zeros((TILE,), gl.int32, layout=gl.SliceLayout(1, lines))
    for i in gl.static_range(D // _PART):
        v = values.slice(i * _PART, _PART, dim=1).load(lines)
        highest = gl.maximum(highest, gl.max(v.to(gl.int16, bitcast=True).to(gl.int32) & 0x7FFF, 1))
    is_old = (position >= own.old_from) & (position < own.old_until)
    return ((highest >= 0x7F80) & (is_old == 0)).to(gl.int32)


@gluon.jit
def _zero_positions(values, cleaned, is_zeroed, begin, pairs, D: gl.constexpr):
    """Writes a tile to `cleaned` with some positions set to 0; returns the pairs that see them."""
    lines: gl.constexpr = lines_of(_PART)
    for i in gl.static_range(D // _PART):
        part = values.slice(i * _PART, _PART, dim=1).load(lines)
        part = gl.where(is_zeroed[:, None] > 0, 0.0, part).to(gl.bfloat16)
        cleaned.slice(i * _PART, _PART, dim=1).store(part)
    fence_async_shared()
    barrier()
    gets_nan = gl.zeros((LANES,), gl.int32, layout=gl.SliceLayout(1, wide(TILE)))
    number = gl.arange(0, TILE, layout=gl.SliceLayout(1, lines))
    for i in range(0, TILE):
        position = begin + i + gl.zeros((1,), gl.int32, layout=gl.SliceLayout(0, wide(TILE)))
        if gl.max(gl.where(number == i, is_zeroed, 0), 0) > 0:
            gets_nan |= gl.max(visible(position, pairs).to(gl.int32), 1)
    return gets_nan


@gluon.jit
def _span_at(place, part, heads: gl.constexpr, config: gl.constexpr):
    """Returns the offsets of a span's weighted values."""
    of_values: gl.constexpr = wide(config.width)
    place = gl.convert_layout(place, gl.SliceLayout(1, of_values)).to(gl.int64)
    column = gl.arange(0, config.width, layout=gl.SliceLayout(0, of_values))
    return place[:, None] * heads.D + (part * config.width + column)[None, :]


@gluon.jit
def _store_span(
    partials, part, place, is_one, peak, total, sums, heads: gl.constexpr, config: gl.constexpr
):
    keep = gl.convert_layout(is_one, gl.SliceLayout(1, wide(config.width)))[:, None]
    gl.store(partials.sums + _span_at(place, part, heads, config), sums, mask=keep)
    gl.store(partials.peaks + place, peak, mask=is_one)
    gl.store(partials.totals + place, total, mask=is_one)


@gluon.jit
def _load_span(partials, part, place, is_one, heads: gl.constexpr, config: gl.constexpr):
    keep = gl.convert_layout(is_one, gl.SliceLayout(1, wide(config.width)))[:, None]
    at = partials.sums + _span_at(place, part, heads, config)
    sums = gl.load(at, mask=keep, other=0.0, cache_modifier=".cg")
    peak = gl.load(partials.peaks + place, mask=is_one, other=NEGATIVE, cache_modifier=".cg")
    total = gl.load(partials.totals + place, mask=is_one, other=0.0, cache_modifier=".cg")
    return peak, total, sums
