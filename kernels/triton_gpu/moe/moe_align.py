"""MoE align: groups the slots of a batch by expert and tiles them (Triton)."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.routing import RoutingSettings
from kernels.tiles import ExpertsTiles
from kernels.triton_gpu.gemm.linear import launching


class ExpertBlocks(NamedTuple):
    """Expert blocks: the slots of each expert, cut into tiles.

    Attributes:
      slots: Slots of each expert by ascending row, with space for `rows` slots per expert.
      experts, firsts, counts: For each tile its expert, its first index in the slots and their
        number, which is 0 after the last tile.
    """

    slots: Any
    experts: Any
    firsts: Any
    counts: Any


class AlignConfig(NamedTuple):
    """Stored experts, slots of a row, lanes of both, rows per step, and slots of a tile."""

    stored: int
    spread: int
    slots: int
    lanes: int
    rows: int
    tile: int


def group(
    ids: Int[Tensor, "R slots"],
    arrivals: Int[Tensor, " counters"],
    *,
    routing: RoutingSettings,
    tiles: ExpertsTiles,
) -> ExpertBlocks:
    """Lists the slots of each expert and cuts them into tiles.

    Args:
      ids: Expert ids of `route`.
      arrivals: Same as for `route`.
      routing: Router config.
      tiles: Tile config.
    """
    R = len(ids)
    most = max_tiles(R, routing, tiles.slots)
    empty = torch.Tensor.new_empty
    expert_blocks = ExpertBlocks(
        slots=empty(ids, (routing.stored, R)),
        experts=empty(ids, (most,)),
        firsts=empty(ids, (most,)),
        counts=empty(ids, (most,)),
    )
    _group_kernel[(routing.stored,)](
        ids,
        empty(ids, (routing.stored,)),
        arrivals,
        expert_blocks,
        R,
        most,
        grouping=AlignConfig(
            stored=routing.stored,
            spread=triton.next_power_of_2(routing.stored),
            slots=routing.slots,
            lanes=triton.next_power_of_2(routing.slots),
            rows=min(tiles.group_rows, triton.next_power_of_2(R)),
            tile=tiles.slots,
        ),
        num_warps=4,
        **launching(ids),
    )
    return expert_blocks


def blocks_or_pointers(expert_blocks: ExpertBlocks | None, ids: Tensor) -> ExpertBlocks:
    """Returns the expert blocks or, without any, another array: Triton requires a pointer."""
    if expert_blocks is None:
        return ExpertBlocks(slots=ids, experts=ids, firsts=ids, counts=ids)
    return expert_blocks


def max_tiles(rows: int, routing: RoutingSettings, slots: int) -> int:
    """Returns an upper bound of the tiles: each expert may have one tile that is not full."""
    chosen = rows * routing.top
    tiles = min(chosen, routing.experts + chosen // slots)
    return tiles + (triton.cdiv(rows, slots) if routing.is_shared else 0)


@triton.jit(do_not_specialize=["num_rows", "max_tiles"])
def _group_kernel(
    ids_at,
    counts_at,
    arrivals_at,
    expert_blocks,
    num_rows,
    max_tiles,
    grouping: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per expert, which lists its slots; the last to finish cuts all lists."""
    expert, lane = tl.program_id(0), tl.arange(0, grouping.lanes)
    if is_launched:
        gdc_wait()
        gdc_launch_dependents()
    count = 0
    for first in range(0, num_rows, grouping.rows):
        row = first + tl.arange(0, grouping.rows)
        slot = row[:, None] * grouping.slots + lane[None, :]
        keep = (row < num_rows)[:, None] & (lane < grouping.slots)[None, :]
        is_one = tl.load(ids_at + slot, mask=keep, other=-1) == expert
        has_one = tl.max(is_one.to(tl.int32), 1)
        place = expert * num_rows + count + tl.cumsum(has_one, 0) - has_one
        slot = tl.max(tl.where(is_one, slot, 0), 1)
        tl.store(expert_blocks.slots + place, slot, mask=has_one > 0)
        count += tl.sum(has_one, 0)
    tl.store(counts_at + expert, count)
    tl.debug_barrier()
    if tl.atomic_add(arrivals_at, 1, sem="acq_rel") == grouping.stored - 1:
        tl.store(arrivals_at, 0)
        _cut(counts_at, expert_blocks, num_rows, max_tiles, grouping)


@triton.jit
def _cut(counts_at, expert_blocks, num_rows, max_tiles, grouping: tl.constexpr):
    """Cuts the lists into tiles, from the last expert on: a shared expert has the most slots."""
    tile: tl.constexpr = grouping.tile
    place = tl.arange(0, grouping.spread)
    expert = tl.where(place == 0, grouping.stored - 1, place - 1)
    is_expert = place < grouping.stored
    count = tl.load(counts_at + expert, mask=is_expert, other=0, cache_modifier=".cg")
    tiles = (count + tile - 1) // tile
    end = tl.cumsum(tiles, 0)
    total = tl.sum(tiles, 0)
    for number in range(0, (num_rows + tile - 1) // tile):
        at, keep = end - tiles + number, number < tiles
        tl.store(expert_blocks.experts + at, expert, mask=keep)
        tl.store(expert_blocks.firsts + at, expert * num_rows + number * tile, mask=keep)
        tl.store(expert_blocks.counts + at, tl.minimum(count - number * tile, tile), mask=keep)
    spread: tl.constexpr = grouping.spread
    nothing = tl.zeros((spread,), tl.int32)
    for first in range(0, max_tiles, spread):
        at = first + place
        tl.store(expert_blocks.counts + at, nothing, mask=(at >= total) & (at < max_tiles))
