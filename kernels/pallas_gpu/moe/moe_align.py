"""MoE align: groups the slots of a batch by expert and tiles them (Pallas, Triton backend)."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Int

from kernels.pallas_gpu.attention.qk_norm_rope_kv_write import early
from kernels.pallas_gpu.moe.router import barrier, lanes_of
from kernels.routing import RoutingSettings
from kernels.tiles import ExpertsTiles


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


def group(
    ids: Int[jax.Array, "R slots"],
    arrivals: Int[jax.Array, " counters"],
    *,
    routing: RoutingSettings,
    tiles: ExpertsTiles,
    interpret: bool = False,
) -> tuple[ExpertBlocks, Int[jax.Array, " counters"]]:
    """Lists the slots of each expert and cuts them into tiles.

    Args:
      ids: Expert ids of `route`.
      arrivals: Same as for `route`.
      routing: Router config.
      tiles: Tile config.
      interpret: Run on a CPU.

    Returns:
      The expert blocks, and the arrivals, reset to zero.
    """
    R = len(ids)
    most = max_tiles(R, routing, tiles.slots)
    of = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    arrivals, expert_blocks, _ = pl.pallas_call(
        partial(
            _group_kernel,
            rows=min(tiles.group_rows, pl.next_power_of_2(R)),
            tile=tiles.slots,
            interpret=interpret,
        ),
        grid=(routing.stored,),
        out_shape=(
            of(arrivals.shape),
            ExpertBlocks(
                slots=of((routing.stored, R)),
                experts=of((most,)),
                firsts=of((most,)),
                counts=of((most,)),
            ),
            of((routing.stored,)),
        ),
        input_output_aliases={0: 0},
        compiler_params=pltriton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="moe_align",
    )(arrivals, ids)
    return expert_blocks, arrivals


def max_tiles(rows: int, routing: RoutingSettings, slots: int) -> int:
    """Returns an upper bound of the tiles: each expert may have one tile that is not full."""
    chosen = rows * routing.top
    tiles = min(chosen, routing.experts + chosen // slots)
    return tiles + (pl.cdiv(rows, slots) if routing.is_shared else 0)


def _group_kernel(_, ids_ref, arrivals_ref, expert_blocks, counts_ref, *, rows, tile, interpret):
    """One program per expert, which lists its slots; the last to finish cuts all lists."""
    R, slots = ids_ref.shape
    expert, lane = pl.program_id(0), early(lanes_of(slots), interpret)

    def scan(number, count):
        row = number * rows + lax.iota(jnp.int32, rows)
        keep = (row < R)[:, None] & (lane < slots)[None, :]
        ids = pltriton.load(ids_ref.at[row[:, None], lane[None, :]], mask=keep, other=-1)
        is_one = ids == expert
        has_one = is_one.astype(jnp.int32).max(axis=1)
        place = count + jnp.cumsum(has_one) - has_one
        slot = jnp.where(is_one, row[:, None] * slots + lane[None, :], 0).max(axis=1)
        at = jnp.where(has_one > 0, place, R)  # outside the array, for the interpreter
        pltriton.store(expert_blocks.slots.at[expert, at], slot, mask=has_one > 0)
        return count + has_one.sum()

    counts_ref[expert] = lax.fori_loop(0, pl.cdiv(R, rows), scan, jnp.int32(0))
    barrier(interpret)
    arrived = pltriton.atomic_add(arrivals_ref, (jnp.int32(0),), jnp.int32(1))

    @pl.when(arrived == len(counts_ref) - 1)
    def _():
        arrivals_ref[0] = 0
        _cut(counts_ref, expert_blocks, tile, interpret)


def _cut(counts_ref, expert_blocks, tile, interpret):
    """Cuts the lists into tiles, from the last expert on: a shared expert has the most slots."""
    (stored, R), most = expert_blocks.slots.shape, len(expert_blocks.counts)
    place = lanes_of(stored)
    expert = jnp.where(place == 0, stored - 1, place - 1)
    load_volatile = partial(pltriton.load, volatile=not interpret)
    count = load_volatile(counts_ref.at[expert], mask=place < stored, other=0)
    tiles = lax.div(count + (tile - 1), tile)
    end = jnp.cumsum(tiles)

    def config(number, _):
        keep = number < tiles
        at = jnp.where(keep, end - tiles + number, most)
        pltriton.store(expert_blocks.experts.at[at], expert, mask=keep)
        pltriton.store(expert_blocks.firsts.at[at], expert * R + number * tile, mask=keep)
        own = jnp.minimum(count - number * tile, tile)
        pltriton.store(expert_blocks.counts.at[at], own, mask=keep)

    lax.fori_loop(0, pl.cdiv(R, tile), config, None)
    for first in range(0, most, len(place)):
        keep = (first + place >= tiles.sum()) & (first + place < most)
        at = jnp.where(keep, first + place, most)
        pltriton.store(expert_blocks.counts.at[at], jnp.zeros_like(place), mask=keep)
