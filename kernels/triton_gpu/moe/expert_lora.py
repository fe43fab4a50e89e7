"""LoRA adapters of experts: the shrink by tiles of slots, and the expand (Triton).

Each slot of a row has the adapter of its row and of its expert. The GEMMs continue their
accumulators as in `gemm.lora`. Implements `shared.spec.lora`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.routing import RoutingSettings
from kernels.shrink_tiles import ShrinkTiles
from kernels.tiles import ExpertsTiles
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.lora import (
    AdapterOperands,
    RowAdapters,
    adapter_tile,
    expand,
)
from kernels.triton_gpu.gemm.moe_gemm_tiles import ExpertGemmConfig, tile_of
from kernels.triton_gpu.moe.moe_align import ExpertBlocks, blocks_or_pointers, max_tiles
from shared.spec.reduction_order import ShrinkOrder


class ExpertAdapters(NamedTuple):
    """Adapters of the matrices of experts, by adapter slot; adapter slots may be strided.

    Attributes:
      a, b, scales, factors: See `shared.spec.lora.AdapterWeights`.
      slots: Adapter slot of each row, 0 for none.
      parts: Outputs of each part of a matrix.
    """

    a: Float[Tensor, "slots stored ranks inputs"]
    b: Float[Tensor, "slots stored outputs rank"]
    scales: Float32[Tensor, "slots stored ranks"]
    factors: Float32[Tensor, "slots stored outputs"]
    slots: Int[Tensor, " R"]
    parts: Sequence[int]


def shrink_experts(
    x: Float[Tensor, "rows inputs"],
    adapters: ExpertAdapters | None,
    ids: Int[Tensor, "R slots"],
    expert_blocks: ExpertBlocks | None,
    *,
    routing: RoutingSettings,
    tiles: ExpertsTiles,
    order: ShrinkOrder,
) -> RowAdapters | None:
    """Computes `A x` of each slot for its expert and the adapter of its row; None without adapters.

    Args:
      x: Rows of the batch, or of all slots.
      adapters: The adapters.
      ids, expert_blocks: Experts of each row, and their blocks; see `experts`.
      routing: Router config.
      tiles: Tile config of the GEMMs.
      order: Reduction order.
    """
    if adapters is None:
        return None
    (R, slots), (num_slots, _, ranks, K) = ids.shape, adapters.a.shape
    cut = ShrinkTiles.of_experts(tiles.slots, ranks, K, order)
    sums = torch.empty((R * slots, cut.splits, ranks), dtype=torch.float32, device=x.device)
    blocks = triton.cdiv(ranks, cut.ranks)
    count = max_tiles(R, routing, tiles.slots) if tiles.grouped else R * slots
    _shrink_experts_kernel[(blocks * cut.splits, count, num_slots if tiles.grouped else 1)](
        x,
        adapters.a,
        adapters.slots,
        ids,
        blocks_or_pointers(expert_blocks, ids),
        sums,
        K=K,
        ranks=ranks,
        stride=adapters.a.stride(0),
        of_row=slots,
        per_row=R * slots // len(x),
        chunk=order.chunk,
        chunks=cut.chunks,
        splits=cut.splits,
        blocks=blocks,
        width=cut.ranks,
        depth=cut.depth,
        stages=cut.stages,
        config=ExpertGemmConfig.of(tiles),
        num_warps=cut.warps,
        **launching(x),
    )
    own = AdapterOperands(sums, adapters.slots, adapters.b, adapters.scales, adapters.factors)
    return RowAdapters(own, tuple(adapters.parts))


@triton.jit
def _shrink_experts_kernel(
    x_at,
    a_at,
    slots_at,
    ids_at,
    expert_blocks,
    sums_at,
    K: tl.constexpr,
    ranks: tl.constexpr,
    stride: tl.constexpr,
    of_row: tl.constexpr,
    per_row: tl.constexpr,
    chunk: tl.constexpr,
    chunks: tl.constexpr,
    splits: tl.constexpr,
    blocks: tl.constexpr,
    width: tl.constexpr,
    depth: tl.constexpr,
    stages: tl.constexpr,
    config: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per tile, block of rows of A and split of the inputs; in groups also per adapter
    slot.
    """
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    tile = tile_of(tl.program_id(1), ids_at, expert_blocks, config)
    if tile.count == 0:
        return
    is_slot = tl.arange(0, config.lanes) < tile.count
    adapter = tl.load(slots_at + tile.slots // of_row, mask=is_slot, other=0)
    slot = tl.program_id(2)
    if not config.is_grouped:
        slot = tl.max(adapter, 0) - 1
    is_own = is_slot & (adapter == slot + 1)
    if (slot >= 0) & (tl.max(is_own.to(tl.int32), 0) > 0):
        split = tl.program_id(0) // blocks
        rank = tl.program_id(0) % blocks * width + tl.arange(0, width)
        lane = tl.arange(0, depth)
        of_rows = x_at + (tile.slots // per_row).to(tl.int64)[:, None] * K + lane[None, :]
        stored = slot.to(tl.int64) * stride + tile.expert.to(tl.int64) * (ranks * K)
        of_ranks = a_at + stored + rank[:, None] * K + lane[None, :]
        lanes: tl.constexpr = config.lanes
        total = tl.zeros((lanes, width), tl.float32)
        for number in tl.range(0, chunks):
            first = (split * chunks + number) * chunk
            acc = tl.zeros((lanes, width), tl.float32)
            for at in tl.range(first, first + chunk, depth, num_stages=stages):
                is_input = (lane < K - at)[None, :]
                x = tl.load(of_rows + at, mask=is_own[:, None] & is_input, other=0.0)
                a = tl.load(of_ranks + at, mask=is_input & (rank < ranks)[:, None], other=0.0)
                acc = tl.dot(x, tl.trans(a), acc, input_precision="ieee")
            total += acc
        place = (tile.slots.to(tl.int64) * splits + split)[:, None] * ranks + rank[None, :]
        tl.store(sums_at + place, total, mask=is_own[:, None])


@triton.jit
def expand_expert(
    acc,
    tile,
    is_slot,
    output,
    is_output,
    first: tl.constexpr,
    last: tl.constexpr,
    adapters,
    of_row: tl.constexpr,
    sizes: tl.constexpr,
):
    """Continues an accumulator of some slots of an expert; see `gemm.lora.expand`.

    Args:
      acc: Accumulator, `[slots, outputs]`.
      tile, is_slot: Tile of slots, and mask of its slots.
      output, is_output, first, last, adapters, sizes: See `expand`.
      of_row: Slots of a row.
    """
    ends: tl.constexpr = sizes.ends
    outputs: tl.constexpr = ends[len(ends) - 1]
    expert = tile.expert.to(tl.int64)
    own = AdapterOperands(
        sums=adapters.sums,
        slots=adapters.slots,
        b=adapters.b + expert * (outputs * sizes.rank),
        scales=adapters.scales + expert * sizes.ranks,
        factors=adapters.factors + expert * outputs,
    )
    slots = tl.load(adapters.slots + tile.slots // of_row, mask=is_slot, other=0)
    rows = adapter_tile(tile.slots, slots)
    return expand(acc, output, is_output, first, last, own, rows, sizes)
