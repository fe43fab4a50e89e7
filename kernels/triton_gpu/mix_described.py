"""The attention of `mix` by a Hopper's wide matrix unit and tensor descriptors (TMA), in Gluon.

A program has up to 64 pairs of a row and a query head, which are the 64 rows that the matrix units
of a warpgroup take at once. One warp more copies tiles of keys and values ahead. Tiles, splits and
spans are those of `mix`, added in its order, so that the bits are its bits. The queries are made,
and the keys and values written, by `place`.

The sums over a span of 2,048 positions stay in registers; programs leave each other no less, so
that a long request is shared out by whole spans.
"""

import torch
import triton
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import MixTiles
from kernels.triton_gpu.heads import Heads
from kernels.triton_gpu.linear import launching
from kernels.triton_gpu.linear_described import copy_tile, is_on_hopper
from kernels.triton_gpu.pair_sums import (
    LANES,
    LOG2_E,
    ONES,
    TILE,
    WARPS,
    Cut,
    Pairs,
    Ring,
    Share,
    Stored,
    attend_pairs,
    lines_of,
    own_pairs,
    wide,
)
from shared.spec.mix import BOUNDS

COLUMNS = gl.constexpr(128)
"""Most columns of the values of a program; a larger head has several."""
_BOUNDS = gl.constexpr(BOUNDS)
_COPYING_REGISTERS = gl.constexpr(24)
_REGISTERS, _MORE_REGISTERS = 128, 168
"""Of a thread where two programs are to have room on a multiprocessor, and where one has."""


def takes(kv: Float[Tensor, "L 2 P page Hk D"], tile: int) -> bool:
    """Whether `mix_described` can be called: with bfloat16, whole tiles in a page, and on a Hopper.

    Args:
      kv: The pools.
      tile: Positions of one.
    """
    page, _, D = kv.shape[3:]
    is_whole = page % TILE.value == 0 and tile == TILE.value
    return is_whole and D in (64, 128, 256) and kv.dtype == torch.bfloat16 and is_on_hopper()


def mix_described(
    q: Float[Tensor, "R Hq D"],
    gate: Float[Tensor, "R outputs"] | None,
    kv: Float[Tensor, "L 2 P page Hk D"],
    layer: int,
    bounds: Int[Tensor, "B bounds"],
    arrivals: Int[Tensor, "B counters"],
    page_table: Int[Tensor, "B table"],
    row_starts: Int[Tensor, " B1"],
    first: Int[Tensor, " R"],
    until: Int[Tensor, " R"],
    window: Bool[Tensor, "R N"],
    *,
    max_rows: int,
    span: int,
    split: int,
    scale: float,
    tiles: MixTiles,
) -> Float[Tensor, "R outputs_of_heads"]:
    """As `mix.mix` behind `place`, of arrays that `takes` accepts.

    Args:
      q: Of `place`, which has written the new keys and values.
      gate: The projection that the queries come from, if each has its gate there behind it.
      kv, layer, bounds, arrivals, page_table, row_starts, first, until, window: See `mix.mix`.
      max_rows, span, split, scale, tiles: The same.
    """
    read = (q, page_table, row_starts, first, until, window)
    q, table, starts, first, until, window = (x.contiguous() for x in read)
    gate, gated = q if gate is None else gate.contiguous(), gate is not None
    (R, Hq, D), (page, Hk), (B, columns) = q.shape, kv.shape[3:5], table.shape
    blocks = triton.cdiv(max_rows * (Hq // Hk), LANES.value)
    width, spans = min(D, COLUMNS.value), triton.cdiv(columns * page, span)
    parts = D // width
    out = q.new_empty((R, Hq * D))
    sums = q.new_empty((spans, R, Hq, D), dtype=torch.float32)
    peaks, totals = q.new_empty((2, spans, R, Hq), dtype=torch.float32)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    keys, values = (x.view(-1, Hk * D) for x in kv[layer])
    _mix_described_kernel[(Hk * blocks * parts, B, min(tiles.programs, spans))](
        q,
        TensorDescriptor.from_tensor(keys, [TILE.value, D], layout),
        TensorDescriptor.from_tensor(values, [TILE.value, width], layout),
        *(table, starts, first, until, window if window.shape[1] else until),
        *(bounds, arrivals),
        *(out, gate, sums, peaks, totals),
        num_rows=R,
        num_requests=B,
        columns=columns,
        counters=arrivals.shape[1],
        scale=scale * LOG2_E.value,
        heads=Heads(q_heads=Hq, k_heads=Hk, D=D, page=page, gated=gated),
        cut=Cut(
            blocks=blocks,
            parts=parts,
            width=width,
            stages=tiles.stages,
            nodes=window.shape[1],
            span=span,
            split=split,
            lines=gate.shape[1],
        ),
        num_warps=WARPS.value,
        maxnreg=_REGISTERS if parts == 1 else _MORE_REGISTERS,
        **launching(q),
    )
    return out


@gluon.jit(do_not_specialize=["num_rows", "num_requests", "columns", "counters"])
def _mix_described_kernel(
    q_at, k_of, v_of, table_at, starts_at, first_at, until_at, window_at, bounds_at, arrivals_at,
    out_at, gate_at, sums_at, peaks_at, totals_at, num_rows, num_requests, columns, counters,
    scale, heads: gl.constexpr, cut: gl.constexpr, is_launched: gl.constexpr,
):  # fmt: skip
    """One program per block of pairs and part of a key head's values, request, and share."""
    q_heads: gl.constexpr = heads.q_heads
    k_heads: gl.constexpr = heads.k_heads
    group: gl.constexpr = q_heads // k_heads
    D: gl.constexpr = heads.D
    stages: gl.constexpr = cut.stages
    lanes: gl.constexpr = gl.SliceLayout(1, wide(TILE))
    lines: gl.constexpr = lines_of(D)
    part, block, head = own_pairs(cut)
    request, share = gl.program_id(1), gl.program_id(2)
    bounds_at += request * _BOUNDS
    low, seen_from = gl.load(bounds_at), gl.load(bounds_at + 1)
    seen_until, new_from = gl.load(bounds_at + 2), gl.load(bounds_at + 3)
    start, stop = gl.load(starts_at + request), gl.load(starts_at + request + 1)
    num_real = gl.load(starts_at + num_requests)
    has_rows = start + block * LANES // group < stop
    high = gl.minimum(seen_until + cut.nodes, columns * heads.page)
    base = low // cut.span
    spans = gl.maximum(gl.cdiv(high, cut.span) - base, 1)
    each = gl.cdiv(spans, gl.minimum(gl.num_programs(2), spans))
    sharing = gl.where(has_rows, gl.cdiv(spans, each), 0)
    begin = gl.maximum(low, (base + share * each) * cut.span) // TILE
    end = gl.cdiv(gl.minimum(high, (base + (share + 1) * each) * cut.span), TILE)
    end = gl.where((low < high) & (share < sharing), gl.maximum(end, begin), begin)

    lane = block * LANES + gl.arange(0, LANES, layout=lanes)
    row = gl.maximum(gl.minimum(start + lane // group, stop - 1), 0)
    first, until = gl.load(first_at + row), gl.load(until_at + row)
    pairs = Pairs(
        place=row * q_heads + head * group + lane % group,
        is_one=start + lane // group < stop,
        first=first,
        until=until,
        low=_bits(window_at, start, stop, block, 0, group, cut.nodes, lanes),
        high=_bits(window_at, start, stop, block, 32, group, cut.nodes, lanes),
    )
    q_lane = block * LANES + gl.arange(0, LANES, layout=gl.SliceLayout(1, lines))
    q_row = gl.maximum(gl.minimum(start + q_lane // group, stop - 1), 0)
    q_place = q_row * q_heads + head * group + q_lane % group

    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(gl.bfloat16, [LANES, D], swizzled)
    ones = gl.allocate_shared_memory(gl.bfloat16, [ONES, TILE], swizzled)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    ring = Ring(
        k_tiles=gl.allocate_shared_memory(gl.bfloat16, [stages, TILE, D], k_of.layout),
        v_tiles=gl.allocate_shared_memory(gl.bfloat16, [stages, TILE, cut.width], v_of.layout),
        keys_come=gl.allocate_shared_memory(gl.int64, [stages, 1], barrier),
        values_come=gl.allocate_shared_memory(gl.int64, [stages, 1], barrier),
        is_free=gl.allocate_shared_memory(gl.int64, [stages, 1], barrier),
    )
    for i in gl.static_range(stages):
        mbarrier.init(ring.keys_come.index(i), count=1)
        mbarrier.init(ring.values_come.index(i), count=1)
        mbarrier.init(ring.is_free.index(i), count=1)

    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    if (share == 0) & (block == 0) & (part == 0):
        _clear_padding(out_at, num_real + request, num_rows, num_requests, head, group * D, k_heads)
    column = gl.arange(0, D, layout=gl.SliceLayout(0, lines))
    queries.store(gl.load(q_at + q_place.to(gl.int64)[:, None] * D + column[None, :]))
    ones.store(gl.full((ONES, TILE), 1.0, gl.bfloat16, layout=lines_of(TILE)))
    fence_async_shared()
    own = Share(
        begin=begin,
        end=end,
        whole_from=gl.max(first, 0),
        whole_until=gl.minimum(gl.min(until, 0), new_from),
        old_from=seen_from,
        old_until=gl.minimum(seen_until, new_from),
        base=base,
        units=gl.where(low < high, spans, 0),
        is_alone=spans == 1,
        sharing=gl.where(share < sharing, sharing, 0),
    )
    stored = Stored(
        out=out_at,
        gate=gate_at,
        starts=starts_at,
        arrivals=arrivals_at,
        sums=sums_at,
        peaks=peaks_at,
        totals=totals_at,
    )
    gl.warp_specialize(
        [
            (
                attend_pairs,
                (queries, ones, ring, pairs, own, stored, num_rows, counters, scale, heads, cut),
            ),
            (_copy, (k_of, v_of, ring, table_at + request * columns, columns, own.begin, own.end,
                     head * D, part * cut.width, heads, cut)),
        ],
        [1],
        [_COPYING_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _bits(
    window_at, start, stop, block, begin: gl.constexpr, group: gl.constexpr, nodes: gl.constexpr,
    lanes: gl.constexpr,
):  # fmt: skip
    """32 nodes of each pair's window as the bits of a number."""
    wide: gl.constexpr = gl.BlockedLayout([1, 16], [16, 2], [WARPS, 1], [1, 0])
    if nodes <= begin:
        return gl.zeros((LANES,), gl.int32, layout=lanes)
    else:
        lane = block * LANES + gl.arange(0, LANES, layout=gl.SliceLayout(1, wide))
        row = gl.maximum(gl.minimum(start + lane // group, stop - 1), 0)
        bit = gl.arange(0, 32, layout=gl.SliceLayout(0, wide))
        at = window_at + row.to(gl.int64)[:, None] * nodes + (begin + bit)[None, :]
        is_set = gl.load(at, mask=(begin + bit < nodes)[None, :], other=0).to(gl.int32)
        return gl.convert_layout(gl.sum(is_set << bit[None, :], 1), lanes)


@gluon.jit
def _clear_padding(
    out_at, begin, num_rows, turns, head, size: gl.constexpr, k_heads: gl.constexpr
):  # fmt: skip
    """Writes 0 for a key head's queries of every `turns`th row from `begin` on."""
    line: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    block: gl.constexpr = triton.next_power_of_2(size)
    column = gl.arange(0, block, layout=line)
    zeros = gl.zeros((block,), out_at.dtype.element_ty, layout=line)
    for row in range(begin, num_rows, turns):
        place = (row * k_heads + head).to(gl.int64) * size
        gl.store(out_at + place + column, zeros, mask=column < size)


@gluon.jit
def _copy(
    k_of, v_of, ring, table_at, columns, begin, end, column, v_column, heads: gl.constexpr,
    cut: gl.constexpr,
):  # fmt: skip
    """Copies the tiles of a share, as long as there is room in the ring."""
    page: gl.constexpr = heads.page
    number = gl.load(table_at + gl.minimum(begin * TILE // page, columns - 1))
    for i in range(begin, end):
        following = gl.load(table_at + gl.minimum((i + 1) * TILE // page, columns - 1))
        turn = i - begin
        slot = turn % cut.stages
        mbarrier.wait(ring.is_free.index(slot), ((turn // cut.stages) & 1) ^ 1)
        line = number * page + i * TILE % page
        come = ring.keys_come.index(slot)
        mbarrier.expect(come, TILE * heads.D * 2)
        copy_tile(k_of, [line, column], come, ring.k_tiles.index(slot))
        come = ring.values_come.index(slot)
        mbarrier.expect(come, TILE * cut.width * 2)
        copy_tile(v_of, [line, column + v_column], come, ring.v_tiles.index(slot))
        number = following
