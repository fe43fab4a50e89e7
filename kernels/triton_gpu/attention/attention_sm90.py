"""Paged attention of `attend` with WGMMA and TMA, warp-specialised (Gluon).

A program has two consumer warpgroups: each processes 64 (row, query head) pairs of one KV head, or
one half of the values of a 256-wide head. A producer warp loads tiles for both. Tiles, splits,
spans and their order equal those of `attention`, so results are bitwise equal.
"""

import triton
from jaxtyping import Float, Int
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_wait

from kernels.tiles import AttentionTiles
from kernels.triton_gpu.attention.attention_layer_sm90 import COLUMNS, COPYING_REGISTERS
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
    SplitRange,
    StoredArrays,
    StoredLayout,
    VerifyTileConfig,
    WarpgroupPairs,
    finish,
    fold,
    lines_of,
    no_sums,
    sum_span,
    with_sinks,
)
from kernels.triton_gpu.gemm.linear import launching

GROUPS = gl.constexpr(2)
"""Consumer warpgroups of a program."""
_REGISTERS = 168
"""Registers per thread of three warpgroups; the producer releases some to the consumers."""
_MULTIPLYING_REGISTERS = gl.constexpr(240)


def attention_sm90(
    q: Float[Tensor, "R Hq D"],
    gate: Float[Tensor, "R outputs"] | None,
    kv: Float[Tensor, "L 2 P page Hk D"],
    layer: int,
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
    tiles: AttentionTiles,
) -> Float[Tensor, "R outputs_of_heads"]:
    """Same as `attention.attend`, for arrays that `takes` accepts and rows without tree windows.

    Args:
      q, gate, kv, layer, page_table, row_starts, first, until, sinks: See `attend`.
      max_rows, span, split, scale, tiles: See `attend`.
    """
    read = (q, page_table, row_starts, first, until)
    q, table, starts, first, until = (x.contiguous() for x in read)
    gate, gated = q if gate is None else gate.contiguous(), gate is not None
    (R, Hq, D), (page, Hk), (B, columns) = q.shape, kv.shape[3:5], table.shape
    width = min(D, COLUMNS.value)
    parts = D // width
    out, own = q.new_empty((R, Hq * D)), LANES.value * GROUPS.value // parts
    programs = triton.cdiv(max_rows * (Hq // Hk), own)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    keys, values = (x.view(-1, Hk * D) for x in kv[layer])
    _attention_sm90_kernel[(Hk, programs, B)](
        q,
        TensorDescriptor.from_tensor(keys, [TILE.value, D], layout),
        TensorDescriptor.from_tensor(values, [TILE.value, width], layout),
        table,
        RowVisibility(starts=starts, first=first, until=until),
        StoredArrays(out=out, gate=gate, sinks=q if sinks is None else sinks),
        num_rows=R,
        num_requests=B,
        columns=columns,
        scale=scale * LOG2_E.value,
        heads=HeadSizes(q_heads=Hq, k_heads=Hk, D=D, page=page, gated=gated, line=gate.shape[1]),
        config=VerifyTileConfig(
            groups=GROUPS.value,
            blocks=programs * GROUPS.value // parts,
            parts=parts,
            width=width,
            copied=parts,
            stages=tiles.described,
            span=span,
            split=split,
            has_sinks=sinks is not None,
        ),
        num_warps=WARPS.value,
        maxnreg=_REGISTERS,
        **launching(q),
    )
    return out


@gluon.jit(do_not_specialize=["num_rows", "num_requests", "columns"])
def _attention_sm90_kernel(
    q_at,
    k_of,
    v_of,
    table_at,
    seen,
    arrays,
    num_rows,
    num_requests,
    columns,
    scale,
    heads: gl.constexpr,
    config: gl.constexpr,
    is_launched: gl.constexpr,
):
    """One program per KV head, two blocks of pairs (one for a 256-wide head), and request."""
    group: gl.constexpr = heads.q_heads // heads.k_heads
    blocks: gl.constexpr = config.groups // config.parts
    pairs: gl.constexpr = blocks * LANES
    # The last rows attend to most positions: their programs, the longest, start first for all
    # heads.
    programs = gl.num_programs(1)
    head, number, request = gl.program_id(0), programs - 1 - gl.program_id(1), gl.program_id(2)
    if is_launched:  # no early launch of the next kernel, which would wait on a busy multiprocessor
        gdc_wait()
    padding = gl.load(seen.starts + num_requests) + request * programs + number
    clear_padding(arrays.out, padding, num_rows, num_requests * programs, head, heads)
    start, stop = gl.load(seen.starts + request), gl.load(seen.starts + request + 1)
    if start + number * pairs // group >= stop:
        return
    queries, ones, pipeline = shared_memory(k_of, v_of, blocks, heads, config)
    lane = number * pairs + gl.arange(0, pairs, layout=gl.BlockedLayout([1], [32], [WARPS], [0]))
    row = gl.maximum(gl.minimum(start + lane // group, stop - 1), 0)
    first, until = gl.load(seen.first + row), gl.load(seen.until + row)
    low = gl.min(gl.minimum(first, until), 0)
    high = gl.minimum(gl.max(until, 0), columns * heads.page)
    begin = low // TILE
    end = gl.where(low < high, gl.cdiv(high, TILE), begin)
    for i in gl.static_range(blocks):
        block = WarpgroupPairs(request=request, head=head, number=number * blocks + i, part=0)
        queries.index(i).store(queries_of(q_at, block, seen, heads))
    ones.store(gl.full((ONES, TILE), 1.0, gl.bfloat16, layout=lines_of(TILE)))
    fence_async_shared()
    stored = StoredLayout(out=arrays.out, gate=arrays.gate, sinks=arrays.sinks, starts=seen.starts)
    gl.warp_specialize(
        [
            (
                _attend_block,
                (
                    queries,
                    ones,
                    pipeline,
                    seen,
                    stored,
                    request,
                    head,
                    number,
                    begin,
                    end,
                    scale,
                    0,
                    heads,
                    config,
                ),
            ),
            (
                _attend_block,
                (
                    queries,
                    ones,
                    pipeline,
                    seen,
                    stored,
                    request,
                    head,
                    number,
                    begin,
                    end,
                    scale,
                    1,
                    heads,
                    config,
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
                    head * heads.D,
                    0,
                    heads,
                    config,
                ),
            ),
        ],
        [WARPS, 1],
        [_MULTIPLYING_REGISTERS, COPYING_REGISTERS],
    )


@gluon.jit
def _attend_block(
    queries,
    ones,
    pipeline,
    seen,
    stored,
    request,
    head,
    number,
    begin,
    end,
    scale,
    which: gl.constexpr,
    heads: gl.constexpr,
    config: gl.constexpr,
):
    """Accumulates the visible positions of a block in one warpgroup, and writes the result."""
    blocks: gl.constexpr = config.groups // config.parts
    block = WarpgroupPairs(
        request=request,
        head=head,
        number=number * blocks + which % blocks,
        part=which % config.parts,
    )
    pairs = pairs_of(block, seen, TILE, heads)
    own = SplitRange(
        begin=begin,
        end=end,
        whole_from=gl.max(pairs.first, 0),
        whole_until=gl.min(pairs.until, 0),
        old_from=0,
        old_until=0,
        base=0,
        units=0,
        is_alone=True,
        sharing=1,
    )
    peak, total, sums = no_sums(config.width)
    each: gl.constexpr = config.span // TILE
    # Separate loop: within a span the total over spans is not used and may leave the registers.
    for span in range(begin // each, gl.cdiv(end, each)):
        first, until = gl.maximum(begin, span * each), gl.minimum(end, (span + 1) * each)
        more = sum_span(
            queries.index(which % blocks),
            ones,
            pipeline,
            pairs,
            own,
            first,
            until,
            scale,
            which,
            config,
        )
        peak, total, sums = fold(peak, total, sums, more[0], more[1], more[2])
    if config.has_sinks:
        total = with_sinks(total, peak, pairs, stored, heads)
    finish(stored, block, total, sums, heads, config)
