"""LoRA adapters of experts: the shrink by tiles of slots, and the expand (Pallas, Triton backend).

Each slot of a row has the adapter of its row and of its expert. The GEMMs continue their
accumulators as in `gemm.lora`. Implements `shared.spec.lora`.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Float, Float32, Int

from kernels.pallas_gpu.gemm.lora import AdapterOperands, AdapterTile, expand
from kernels.pallas_gpu.gemm.lora_shrink import EXACT, SlotsInUse, any_of
from kernels.pallas_gpu.gemm.moe_gemm_tiles import ExpertGemmConfig, tile_of
from kernels.pallas_gpu.moe.moe_align import ExpertBlocks, max_tiles
from kernels.routing import RoutingSettings
from kernels.shrink_tiles import ShrinkTiles
from kernels.tiles import ExpertsTiles
from shared.spec.reduction_order import ShrinkOrder


class ExpertAdapters(NamedTuple):
    """Stacked adapters of the matrices of experts, by adapter slot.

    Attributes:
      a, b, scales, factors: See `shared.spec.lora.AdapterWeights`.
      slots: Adapter slot of each row, 0 for none.
      parts: Outputs of each part of a matrix.
    """

    a: Float[jax.Array, "slots L stored ranks inputs"]
    b: Float[jax.Array, "slots L stored outputs rank"]
    scales: Float32[jax.Array, "slots L stored ranks"]
    factors: Float32[jax.Array, "slots L stored outputs"]
    slots: Int[jax.Array, " R"]
    parts: Sequence[int]


class AdaptedExperts(NamedTuple):
    """Experts of a layer, and outputs of each part of their matrices."""

    stored: int
    parts: tuple[int, ...]


class SlotAdapters(NamedTuple):
    """Adapters of the slots of a GEMM after the shrink.

    Attributes:
      operands: Arrays of the expand; the stacks have the experts of all layers.
      experts: Sizes of the experts.
    """

    operands: AdapterOperands
    experts: AdaptedExperts


def shrink_experts(
    x: Float[jax.Array, "rows inputs"],
    adapters: ExpertAdapters | None,
    ids: Int[jax.Array, "R slots"],
    expert_blocks: ExpertBlocks | None,
    layer: Int[jax.Array, ""],
    *,
    routing: RoutingSettings,
    tiles: ExpertsTiles,
    order: ShrinkOrder,
    interpret: bool = False,
) -> SlotAdapters | None:
    """Computes `A x` of each slot for its expert and the adapter of its row; None without adapters.

    Args:
      x: Rows of the batch, or of all slots.
      adapters: The adapters.
      ids, expert_blocks: Experts of each row, and their blocks; see `experts`.
      layer: Index into the stacks.
      routing: Router config.
      tiles: Tile config of the GEMMs.
      order: Reduction order.
      interpret: Run on a CPU.
    """
    if adapters is None:
        return None
    (R, slots), (num_slots, _, stored, ranks, K) = ids.shape, adapters.a.shape
    cut, layer = ShrinkTiles.of_experts(tiles.slots, ranks, K, order), layer.reshape(1)
    blocks = pl.cdiv(ranks, cut.ranks)
    count = max_tiles(R, routing, tiles.slots) if tiles.grouped else R * slots
    sums = pl.pallas_call(
        functools.partial(
            _shrink_experts_kernel,
            cut=cut,
            blocks=blocks,
            chunk=order.chunk,
            config=ExpertGemmConfig.of("", tiles, routing.slots, interpret),
        ),
        grid=(blocks * cut.splits, count, num_slots if tiles.grouped else 1),
        out_shape=jax.ShapeDtypeStruct((R * slots, cut.splits, ranks), jnp.float32),
        compiler_params=pltriton.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name="shrink_experts",
    )(x, adapters.a, adapters.slots, ids, expert_blocks, layer)
    b, scales, factors = (
        stack.reshape(num_slots, -1, *stack.shape[3:])
        for stack in (adapters.b, adapters.scales, adapters.factors)
    )
    own = AdapterOperands(sums, adapters.slots, None, layer, b, scales, factors)
    return SlotAdapters(own, AdaptedExperts(stored, tuple(adapters.parts)))


def _shrink_experts_kernel(
    x_ref,
    a_ref,
    slots_ref,
    ids_ref,
    expert_blocks,
    layer_ref,
    sums_ref,
    *,
    cut,
    blocks,
    chunk,
    config,
):
    """One program per tile, block of rows of A and split of the inputs; in groups also per adapter
    slot.
    """
    (rows, K), (S, _, ranks), depth = x_ref.shape, sums_ref.shape, cut.depth
    tile = tile_of(pl.program_id(1), ids_ref, expert_blocks, config)
    is_slot = lax.iota(jnp.int32, config.lanes) < tile.count
    entry = lax.div(tile.slots, config.slots)
    adapter = pltriton.load(slots_ref.at[entry], mask=is_slot, other=0)
    split = lax.div(pl.program_id(0), blocks)
    rank = lax.rem(pl.program_id(0), blocks) * cut.ranks + lax.iota(jnp.int32, cut.ranks)
    slot = pl.program_id(2) if expert_blocks is not None else jnp.max(adapter) - 1
    is_own = is_slot & (adapter == slot + 1)

    @pl.when((slot >= 0) & any_of(is_own))
    def _add():
        row, lane = lax.div(tile.slots, S // rows), lax.iota(jnp.int32, depth)
        zeros = jnp.zeros((config.lanes, len(rank)), jnp.float32)

        def add_chunk(number, total):
            first = (split * cut.chunks + number) * chunk

            def add(step, acc):
                at = first + step * depth + lane
                is_input = at < K
                of_rows = is_own[:, None] & is_input[None, :]
                x = pltriton.load(x_ref.at[row[:, None], at[None, :]], mask=of_rows, other=0.0)
                of_ranks = is_input[None, :] & (rank < ranks)[:, None]
                a_at = a_ref.at[slot, layer_ref[0], tile.expert, rank[:, None], at[None, :]]
                a = pltriton.load(a_at, mask=of_ranks, other=0.0)
                return acc + pltriton.dot(x, a.T, **EXACT)

            return total + lax.fori_loop(0, chunk // depth, add, zeros)

        total = lax.fori_loop(0, cut.chunks, add_chunk, zeros)
        # Rows that are not stored get an index outside the array, which the interpreter requires.
        at = sums_ref.at[jnp.where(is_own, tile.slots, S)[:, None], split, rank[None, :]]
        pltriton.store(at, total, mask=jnp.broadcast_to(is_own[:, None], total.shape))


def expand_expert(acc, tile, is_slot, output, is_output, first, last, adapters, adapted, of_row):
    """Continues an accumulator of some slots of an expert; see `gemm.lora.expand`.

    Args:
      acc: Accumulator, `[slots, outputs]`.
      tile, is_slot: Tile of slots, and mask of its slots.
      output, is_output, first, last: See `gemm.lora.AdapterTile`.
      adapters: References, see `gemm.lora.AdapterOperands`.
      adapted: See `AdaptedExperts`.
      of_row: Slots of a row.
    """
    of_slots = adapters.slots.at[lax.div(tile.slots, of_row)]
    slots = pltriton.load(of_slots, mask=is_slot, other=0)
    rows = AdapterTile(
        output=output,
        is_output=is_output,
        first=first,
        last=last,
        row=tile.slots,
        slots=slots,
        used=SlotsInUse.of(slots),
        layer=adapters.layer[0] * adapted.stored + tile.expert,
    )
    return expand(acc, rows, adapters, adapted.parts)
