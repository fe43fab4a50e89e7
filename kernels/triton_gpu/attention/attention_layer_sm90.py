"""Split-KV attention of `attention_layer`: WGMMA, TMA, warp-specialised (Gluon).

A program processes up to 64 (row, query head) pairs, the rows of a warpgroup's WGMMA. One producer
warp loads tiles of keys and values ahead. Tiles, splits, spans and their order equal those of
`attention_layer`, so results are bitwise equal. `place` computes the queries and writes the new
keys and values first.

The accumulator of a span (2,048 positions) stays in registers. Partial results are stored per span,
so a long request is divided by whole spans.
"""

import torch
import triton
from jaxtyping import Float, Int
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from kernels.tiles import DecodeAttentionTiles
from kernels.triton_gpu.attention.qk_norm_rope_kv_write import HeadSizes
from kernels.triton_gpu.attention.verify_sm90_loads import (
    RowVisibility,
    clear_padding,
    copy_tiles,
    pairs_of,
    queries_of,
    shared_memory,
)
from kernels.triton_gpu.attention.verify_sm90_mainloop import (
    LANES,
    LOG2_E,
    ONES,
    TILE,
    WARPS,
    SpanPartials,
    SplitRange,
    StoredArrays,
    StoredLayout,
    VerifyTileConfig,
    WarpgroupPairs,
    attend_pairs,
    lines_of,
)
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.linear_sm90 import is_on_hopper
from shared.spec.attention_layer import BOUNDS

COLUMNS = gl.constexpr(128)
"""Maximum value columns of a program; a larger head is split over several programs."""
_BOUNDS = gl.constexpr(BOUNDS)
COPYING_REGISTERS = gl.constexpr(24)
_REGISTERS = 168
"""Registers per thread, so that a multiprocessor holds exactly one program.

With 128 it holds two, which use all registers. Warps that then request registers of other warps
(`setmaxnreg`) wait forever.
"""


def takes(kv: Float[Tensor, "L 2 P page Hk D"], tile: int) -> bool:
    """Returns whether `attention_layer_sm90` supports the arrays: bfloat16, pages of whole tiles,
    Hopper.

    Args:
      kv: KV pools.
      tile: Positions of a tile.
    """
    page, _, D = kv.shape[3:]
    is_whole = page % TILE.value == 0 and tile == TILE.value
    return is_whole and D in (64, 128, 256) and kv.dtype == torch.bfloat16 and is_on_hopper()


def attention_layer_sm90(
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
    sinks: Float[Tensor, " Hq"] | None,
    *,
    max_rows: int,
    span: int,
    split: int,
    scale: float,
    tiles: DecodeAttentionTiles,
) -> Float[Tensor, "R outputs_of_heads"]:
    """Same as `attention_layer.attention_layer` after `place`, for arrays that `takes` accepts.

    Args:
      q: Queries from `place`, which has also written the new keys and values.
      gate: QKV projection, in which each query head is followed by its gate; None without gates.
      kv, layer, bounds, arrivals, page_table, row_starts, first, until, sinks: See
        `attention_layer`.
      max_rows, span, split, scale, tiles: See `attend`.
    """
    read = (q, page_table, row_starts, first, until)
    q, table, starts, first, until = (x.contiguous() for x in read)
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
    _attention_layer_sm90_kernel[(Hk * blocks * parts, B, min(tiles.programs, spans))](
        q,
        TensorDescriptor.from_tensor(keys, [TILE.value, D], layout),
        TensorDescriptor.from_tensor(values, [TILE.value, width], layout),
        table,
        RowVisibility(starts=starts, first=first, until=until),
        bounds,
        StoredArrays(out=out, gate=gate, sinks=q if sinks is None else sinks),
        SpanPartials(arrivals=arrivals, sums=sums, peaks=peaks, totals=totals),
        num_rows=R,
        num_requests=B,
        columns=columns,
        counters=arrivals.shape[1],
        scale=scale * LOG2_E.value,
        heads=HeadSizes(q_heads=Hq, k_heads=Hk, D=D, page=page, gated=gated, line=gate.shape[1]),
        config=VerifyTileConfig(
            groups=1,
            blocks=blocks,
            parts=parts,
            width=width,
            copied=1,
            stages=tiles.stages,
            span=span,
            split=split,
            has_sinks=sinks is not None,
        ),
        num_warps=WARPS.value,
        maxnreg=_REGISTERS,
        **launching(q),
    )
    return out


@gluon.jit(do_not_specialize=["num_rows", "num_requests", "columns", "counters"])
def _attention_layer_sm90_kernel(
    q_at,
    k_of,
    v_of,
    table_at,
    seen,
    bounds_at,
    arrays,
    partials,
    num_rows,
    num_requests,
    columns,
    counters,
    scale,
    heads: gl.constexpr,
    config: gl.constexpr,
    is_launched: gl.constexpr,
):
    """One program per block of pairs and value columns of a KV head, request, and share."""
    group: gl.constexpr = heads.q_heads // heads.k_heads
    request, share = gl.program_id(1), gl.program_id(2)
    number = gl.program_id(0) // config.parts
    block = WarpgroupPairs(
        request=request,
        head=number // config.blocks,
        number=number % config.blocks,
        part=gl.program_id(0) % config.parts,
    )
    bounds_at += request * _BOUNDS
    low, seen_from = gl.load(bounds_at), gl.load(bounds_at + 1)
    seen_until, new_from = gl.load(bounds_at + 2), gl.load(bounds_at + 3)
    start, stop = gl.load(seen.starts + request), gl.load(seen.starts + request + 1)
    num_real = gl.load(seen.starts + num_requests)
    has_rows = start + block.number * LANES // group < stop
    high = gl.minimum(seen_until, columns * heads.page)
    base = low // config.span
    spans = gl.maximum(gl.cdiv(high, config.span) - base, 1)
    each = gl.cdiv(spans, gl.minimum(gl.num_programs(2), spans))
    sharing = gl.where(has_rows, gl.cdiv(spans, each), 0)
    begin = gl.maximum(low, (base + share * each) * config.span) // TILE
    end = gl.cdiv(gl.minimum(high, (base + (share + 1) * each) * config.span), TILE)
    end = gl.where((low < high) & (share < sharing), gl.maximum(end, begin), begin)

    pairs = pairs_of(block, seen, TILE, heads)
    queries, ones, pipeline = shared_memory(k_of, v_of, 1, heads, config)
    if is_launched:
        gdc_wait()
    if (share == 0) & (block.number == 0) & (block.part == 0):
        clear_padding(arrays.out, num_real + request, num_rows, num_requests, block.head, heads)
    queries.index(0).store(queries_of(q_at, block, seen, heads))
    ones.store(gl.full((ONES, TILE), 1.0, gl.bfloat16, layout=lines_of(TILE)))
    fence_async_shared()
    own = SplitRange(
        begin=begin,
        end=end,
        whole_from=gl.max(pairs.first, 0),
        whole_until=gl.minimum(gl.min(pairs.until, 0), new_from),
        old_from=seen_from,
        old_until=gl.minimum(seen_until, new_from),
        base=base,
        units=gl.where(low < high, spans, 0),
        is_alone=spans == 1,
        sharing=gl.where(share < sharing, sharing, 0),
    )
    stored = StoredLayout(out=arrays.out, gate=arrays.gate, sinks=arrays.sinks, starts=seen.starts)
    gl.warp_specialize(
        [
            (
                attend_pairs,
                (
                    queries.index(0),
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
                    heads,
                    config,
                    is_launched,
                ),
            ),
            (
                copy_tiles,
                (
                    k_of,
                    v_of,
                    pipeline,
                    table_at + request * columns,
                    columns,
                    begin,
                    end,
                    block.head * heads.D,
                    block.part * config.width,
                    heads,
                    config,
                ),
            ),
        ],
        [1],
        [COPYING_REGISTERS],
    )
