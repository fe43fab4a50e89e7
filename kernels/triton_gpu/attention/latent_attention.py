"""Paged multi-query attention over latent rows (absorbed MLA) with split-KV (Triton).

All heads of a request read the same cached rows, `[latent | rope key]`; values are the latents. A
lane is a (row, head) pair. Products are transposed (swap-AB): positions and latent columns are the
wide sides of the tensor core, lanes the narrow one. A tile of positions is loaded once, for scores
and values. The splits of positions are fixed, so results are batch-invariant and independent of the
rows, lanes and programs of the request. A row of a tree has the bits of plain decoding.
`kernels/__init__.py` lists what must equal the Pallas twin.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Bool, Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.latent_tiles import SM90_LANES, LatentAttentionTiles, block_widths, splits_of
from kernels.triton_gpu.attention.attention import (
    QueryRows,
)
from kernels.triton_gpu.attention.latent_attention_mainloop import (
    LatentConfig,
    LatentOrder,
    LatentRange,
    LatentSizes,
    store_block,
    sum_positions,
)
from kernels.triton_gpu.attention.latent_attention_sm90 import attend_latent_sm90, takes
from kernels.triton_gpu.attention.latent_combine import (
    LatentBounds,
    LatentSplits,
    combine,
    request_splits,
    tile_range,
)
from kernels.triton_gpu.attention.online_softmax import (
    LOG2_E,
)
from kernels.triton_gpu.attention.split_kv import SplitPartials
from kernels.triton_gpu.gemm.linear import launching


def attend_latent(
    q: Float[Tensor, "R Hq r_dr"],
    pool: Float[Tensor, "L 1 P page 1 r_dr"],
    layer: int,
    page_table: Int[Tensor, "B table"],
    row_starts: Int[Tensor, " B1"],
    first: Int[Tensor, " R"],
    until: Int[Tensor, " R"],
    window: Bool[Tensor, "R N"],
    *,
    rank: int,
    max_rows: int,
    near: int,
    split: int,
    far_split: int,
    tile: int,
    scale: float,
    tiles: LatentAttentionTiles,
) -> Float[Tensor, "R Hq r"]:
    """Same as `shared.spec.latent_attention.attend_latent`, for flat rows grouped by request.

    If lanes are few, several programs share the positions of a request, and a second kernel
    combines their partial results.

    Args:
      q: Queries in absorbed form.
      pool, layer: Latent pools of all layers, and the index of the layer to read.
      page_table, first, until, window: See the specification.
      row_starts: First flat row of each request, and the end; later rows are padding.
      rank: Columns of the latent.
      max_rows: Maximum rows of a request.
      near, split, far_split, tile: See `LatentAttentionOrder`; they fix the reduction order.
      scale: Multiplier of the scores.
      tiles: Tile config.

    Raises:
      ValueError: The pools are not contiguous.
    """
    if not pool.is_contiguous():
        raise ValueError("the pools must be contiguous")
    q, table, first, until, window = (x.contiguous() for x in (q, page_table, first, until, window))
    (R, Hq, size), (B, columns), nodes = q.shape, table.shape, window.shape[1]
    if tiles.lanes == SM90_LANES and takes(pool, window, rank, tile):
        return attend_latent_sm90(
            q,
            pool,
            layer,
            table,
            row_starts,
            first,
            until,
            max_rows=max_rows,
            near=near,
            split=split,
            far_split=far_split,
            scale=scale,
            tiles=tiles,
        )
    lanes, blocks, sharing = tiles.programs_of(max_rows * Hq, B)
    out = q.new_empty((R, Hq, rank))
    splits = splits_of(columns * pool.shape[3], near, split, far_split) if sharing > 1 else 0
    sums = q.new_empty((splits, rank, R, Hq), dtype=torch.float32)
    peaks, totals = q.new_empty((2, splits, R, Hq), dtype=torch.float32)
    width, rope_width = block_widths(rank, size - rank)
    arguments = {
        "parts": SplitPartials(sums=sums, peaks=peaks, totals=totals),
        "rows": QueryRows(
            starts=row_starts, first=first, until=until, window=window if nodes else until
        ),
        "out_at": out,
        "num_rows": R,
        "num_requests": B,
        "columns": columns,
        "sizes": LatentSizes(
            heads=Hq,
            rank=rank,
            rope=size - rank,
            width=width,
            rope_width=rope_width,
            page=pool.shape[3],
        ),
        "order": LatentOrder(near=near, split=split, far_split=far_split, tile=tile, nodes=nodes),
        "config": LatentConfig(
            lanes=lanes,
            sharing=sharing,
            rows=triton.next_power_of_2(max_rows),
        ),
    }
    _attend_latent_kernel[(blocks, sharing, B)](
        q,
        pool[layer, 0],
        table,
        scale=scale * LOG2_E.value,
        **arguments,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **launching(q),
    )
    if sharing > 1:
        combine(arguments, q)
    return out


@triton.jit(do_not_specialize=["num_rows", "num_requests", "columns"])
def _attend_latent_kernel(
    q_at,
    pool_at,
    table_at,
    parts,
    rows,
    out_at,
    num_rows,
    num_requests,
    columns,
    scale,
    sizes: tl.constexpr,
    order: tl.constexpr,
    config: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of lanes, share of the positions, and request."""
    heads: tl.constexpr = sizes.heads
    rank: tl.constexpr = sizes.rank
    width: tl.constexpr = sizes.width
    page: tl.constexpr = sizes.page
    tile: tl.constexpr = order.tile
    nodes: tl.constexpr = order.nodes
    lanes: tl.constexpr = config.lanes
    sharing: tl.constexpr = config.sharing
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    is_shared: tl.constexpr = sharing > 1
    # The last rows attend to most positions: their programs, the longest, start first.
    blocks = tl.num_programs(0)
    block, share, request = blocks - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(rows.starts + request), tl.load(rows.starts + request + 1)
    if not is_shared:
        begin = tl.load(rows.starts + num_requests) + request * blocks + block
        _clear_padding(out_at, begin, num_rows, num_requests * blocks, sizes)
    if start + block * lanes // heads >= stop:
        return
    row = start + (block * lanes + tl.arange(0, lanes)) // heads
    row = tl.minimum(row, stop - 1)  # spare lanes repeat the last row and are not written
    first, until = tl.load(rows.first + row), tl.load(rows.until + row)
    if is_shared:
        bounds = request_splits(rows, start, stop, columns, sizes, order, config)
        begin, end = tile_range(bounds, share, order, config)
        if begin >= end:
            return
    else:
        low = tl.min(tl.minimum(first, until))
        high = tl.minimum(tl.max(until) + nodes, columns * page)
        bounds = LatentBounds(low=low, high=high, base=0, end=0)
        begin = low // tile
        end = tl.where(low < high, tl.cdiv(high, tile), begin)
    seen = LatentRange(
        pool=pool_at,
        table=table_at + request * columns,
        columns=columns,
        row=row,
        first=rows.first,
        until=rows.until,
        window=rows.window,
        whole_from=tl.max(first),
        whole_until=tl.min(until),
        high=bounds.high,
        scale=scale,
    )
    splits = LatentSplits(
        parts=parts,
        place=start.to(tl.int64) * heads + block * lanes,
        count=(stop - start) * heads - block * lanes,
        base=bounds.base,
        stride=num_rows * heads,
    )
    sums = sum_positions(q_at, seen, begin, end, splits, sizes, order, config)
    if not is_shared:
        total = tl.maximum(sums.total, 1e-30)
        for i in tl.static_range(triton.cdiv(rank, width)):
            value = sums.blocks[i] / total[None, :]
            value = value.to(out_at.dtype.element_ty)
            store_block(out_at, splits.place, value, splits.count, i, sizes)


@triton.jit
def _clear_padding(out_at, begin, num_rows, stride, sizes: tl.constexpr):
    """Writes zeros to every `stride`-th row from `begin` on."""
    heads: tl.constexpr = sizes.heads
    rank: tl.constexpr = sizes.rank
    column = tl.arange(0, triton.next_power_of_2(rank))
    zeros = tl.zeros(column.shape, out_at.dtype.element_ty)
    for row in range(begin, num_rows, stride):
        for head in range(heads):
            at = (row * heads + head) * tl.full((), rank, tl.int64)
            tl.store(out_at + at + column, zeros, mask=column < rank)
