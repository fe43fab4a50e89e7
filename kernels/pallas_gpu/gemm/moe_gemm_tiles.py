"""Grouped GEMM of experts: tiles of slots, and steps along the inputs (Pallas, Triton backend)."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from kernels.pallas_gpu.gemm.block_loaders import LOADERS, OperandTiles
from kernels.pallas_gpu.gemm.linear_mainloop import accumulate
from kernels.tiles import ExpertsTiles
from shared.models.formats.weight_format import PLAIN


class ExpertWeights(NamedTuple):
    """Expert weights, their scales if they are packed FP8, and biases if they have any."""

    weights: Any
    scales: Any
    bias: Any


class ExpertGemmConfig(NamedTuple):
    """Tile config of a GEMM.

    Attributes:
      format: Name of the weight format.
      lanes, columns, depth: Slots and outputs of a tile, and inputs per step.
      is_swapped: Swap-AB: outputs are the wide side of the tensor core.
      slots: Slots of a row.
    """

    format: str
    lanes: int
    is_swapped: bool
    columns: int
    depth: int
    slots: int
    interpret: bool

    @classmethod
    def of(
        cls, format: str, tiles: ExpertsTiles, slots: int, interpret: bool, *, is_down: bool = False
    ) -> "ExpertGemmConfig":
        """Returns the config of the gate-up GEMM, or of the down GEMM."""
        gate_up, down = (tiles.columns, tiles.depth), (tiles.down_columns, tiles.down_depth)
        columns, depth = down if is_down else gate_up
        return cls(format, tiles.slots, tiles.swapped, columns, depth, slots, interpret)


class ExpertTile(NamedTuple):
    """Expert of a tile, number of its slots, and the slots."""

    expert: Any
    count: Any
    slots: Any


def tile_of(number, ids_ref, expert_blocks, config):
    """Returns a tile of expert-aligned slots; without expert blocks, each slot is a tile."""
    lane = lax.iota(jnp.int32, config.lanes)
    if expert_blocks is None:
        expert = ids_ref[lax.div(number, config.slots), lax.rem(number, config.slots)]
        # A select between constants would have the type of its condition.
        count = jnp.minimum(jnp.maximum(expert + 1, 0), 1)
        return ExpertTile(expert=expert, count=count, slots=number + lane * 0)
    expert, count, first = (
        ref[number] for ref in (expert_blocks.experts, expert_blocks.counts, expert_blocks.firsts)
    )
    rows = expert_blocks.slots.shape[1]
    at = expert_blocks.slots.at[expert, first - expert * rows + lane]
    slots = pltriton.load(at, mask=lane < count, other=0)
    return ExpertTile(expert=expert, count=count, slots=slots)


def bias_of(stored, of_expert, output, is_output):
    """Loads the biases of some outputs of an expert; for the arguments see `product`."""
    at = stored.bias.at[(*of_expert, output)]
    return pltriton.load(at, mask=is_output, other=0.0).astype(jnp.float32)


def product(x_ref, row, is_row, stored, of_expert, output, is_output, has_all, config):
    """Multiplies some rows with outputs of an expert, [outputs, lanes].

    Args:
      x_ref: Rows, `[R, inputs]`.
      row, is_row: Row of each lane, and a mask of the lanes that have one.
      stored: Expert weights.
      of_expert: Indices of the layer and of the expert.
      output, is_output: Outputs to compute, and a mask of those in bounds.
      has_all: Whether all outputs are in bounds.
      config: Tile config.
    """
    tile = OperandTiles(
        x=x_ref,
        row_scales=None,
        weights=stored.weights,
        scales=stored.scales,
        stack=of_expert,
        row=row,
        scale_row=row,
        outputs=[lambda: output[:, None]],
        columns=len(output),
        is_row=is_row,
        is_output=is_output,
        has_all_rows=False,
        has_all_outputs=has_all,
        loads_weight_first=config.format == PLAIN,
    )
    loader = LOADERS[config.format](tile, config.depth, not config.interpret)
    steps = pl.cdiv(x_ref.shape[1], loader.depth)
    shape = (len(output), config.lanes) if config.is_swapped else (config.lanes, len(output))
    (total,), _ = accumulate(loader, shape, 1, steps, config.is_swapped)
    return total if config.is_swapped else total.T
