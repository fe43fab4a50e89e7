"""Grouped GEMM of experts: tiles of slots, and steps along the inputs (Triton)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.routing import RoutingSettings
from kernels.tiles import ExpertsTiles
from kernels.triton_gpu.gemm.block_loaders import OperandTile, TileLoads, format_of, packed_tile
from kernels.triton_gpu.gemm.linear import launching
from kernels.triton_gpu.gemm.linear_mainloop import accumulate
from kernels.triton_gpu.gemm.lora import AdapterSizes, RowAdapters


class ExpertWeights(NamedTuple):
    """Expert weights, their scales if they are packed FP8, and biases if they have any."""

    weights: Any
    scales: Any
    bias: Any

    @property
    def pointers(self) -> "ExpertWeights":
        """The weight with other arrays in place of those that are None: Triton requires them."""
        return ExpertWeights(*(self.weights if each is None else each for each in self))


class ExpertGemmSizes(NamedTuple):
    """Outputs and inputs of an expert's GEMM, and slots of a row.

    Attributes:
      factor: Multiplier of the sum of a row's slots.
      is_scaled: Whether the next norm has a scale.
      is_biased: Whether experts have biases.
      loads: Loads of the main loop.
      adapters: Sizes of LoRA adapters; None without.
    """

    N: int
    K: int
    slots: int
    factor: float
    is_scaled: bool
    is_biased: bool
    loads: TileLoads
    adapters: AdapterSizes | None


class ExpertGemmConfig(NamedTuple):
    """Tile config of a GEMM; lanes of a tile, whether outputs are the wide side of the tensor core
    (swap-AB), and whether tiles are expert blocks.
    """

    lanes: int
    is_swapped: bool
    columns: int
    depth: int
    stages: int
    is_grouped: bool

    @classmethod
    def of(cls, tiles: ExpertsTiles, *, is_down: bool = False) -> "ExpertGemmConfig":
        """Returns the config of the gate-up GEMM, or of the down GEMM."""
        gate_up = tiles.columns, tiles.depth, tiles.stages
        down = tiles.down_columns, tiles.down_depth, tiles.down_stages
        columns, depth, stages = down if is_down else gate_up
        return cls(tiles.slots, tiles.swapped, columns, depth, stages, tiles.grouped)


def gemm_sizes(
    stored: ExpertWeights,
    name: str,
    outputs: int,
    inputs: int,
    routing: RoutingSettings,
    config: ExpertGemmConfig,
    lora: RowAdapters | None,
    *,
    is_scaled: bool,
) -> ExpertGemmSizes:
    """Returns the sizes of a GEMM."""
    format = format_of(name, config.depth, stored.weights, stored.scales)
    loads = TileLoads.of(
        format,
        "row",
        inputs,
        has_all_rows=False,
        has_all_outputs=outputs % config.columns == 0,
        is_interpreted=not launching(stored.weights)["is_launched"],
    )
    is_biased, factor = stored.bias is not None, routing.output_factor
    adapters = None if lora is None else lora.sizes
    return ExpertGemmSizes(
        outputs, inputs, routing.slots, factor, is_scaled, is_biased, loads, adapters
    )


class ExpertTile(NamedTuple):
    """Expert of a tile, number of its slots, and the slots."""

    expert: Any
    count: Any
    slots: Any


@triton.jit
def tile_of(number, ids_at, expert_blocks, config: tl.constexpr):
    """Returns a tile of expert-aligned slots; without expert blocks, each slot is a tile."""
    lane = tl.arange(0, config.lanes)
    if config.is_grouped:
        expert, count = (
            tl.load(expert_blocks.experts + number),
            tl.load(expert_blocks.counts + number),
        )
        at = expert_blocks.slots + tl.load(expert_blocks.firsts + number) + lane
        slots = tl.load(at, mask=lane < count, other=0)
        expert = tl.where(count > 0, expert, 0)
    else:
        expert = tl.load(ids_at + number)
        count = tl.where(expert >= 0, 1, 0)
        slots = number + lane * 0
    return ExpertTile(expert=expert, count=count, slots=slots)


@triton.jit
def product_of(
    x_at,
    is_slot,
    stored,
    expert,
    outputs: tl.constexpr,
    output,
    is_output,
    sizes: tl.constexpr,
    config: tl.constexpr,
):
    """Multiplies some slots, [lanes, 1] pointers, with outputs of an expert, [outputs, lanes]."""
    # Triton 3.6 takes attributes of a constant for constants only where they have a name.
    lanes: tl.constexpr = config.lanes
    depth: tl.constexpr = sizes.loads.format.inputs
    stages: tl.constexpr = config.stages
    loads: tl.constexpr = sizes.loads
    rows = OperandTile(place=x_at, scales=x_at, first=0, is_inside=is_slot, count=0)
    weight = _outputs_of(stored, expert.to(tl.int64), outputs, output, is_output, sizes)
    if config.is_swapped:
        acc = tl.zeros((output.shape[0], lanes), tl.float32)
        acc, _ = accumulate(acc, rows, weight, 0, loads.K, depth, stages, 0, True, loads)
    else:
        acc = tl.zeros((lanes, output.shape[0]), tl.float32)
        acc, _ = accumulate(acc, rows, weight, 0, loads.K, depth, stages, 0, False, loads)
        acc = tl.trans(acc)
    return acc


@triton.jit
def bias_of(stored, expert, output, is_output, outputs: tl.constexpr):
    """Loads the biases of some outputs of an expert."""
    at = stored.bias + expert.to(tl.int64) * outputs + output
    return tl.load(at, mask=is_output, other=0.0).to(tl.float32)


@triton.jit
def _outputs_of(stored, expert, outputs: tl.constexpr, output, is_output, sizes: tl.constexpr):
    """Returns some outputs of an expert as the main loop loads them."""
    loads: tl.constexpr = sizes.loads
    if loads.format.packed > 1:
        share: tl.constexpr = loads.format.scales.outputs
        scale = expert * (outputs // share) + output // share
        place = expert * outputs + output
        has_all: tl.constexpr = loads.weight.has_all
        tile = packed_tile(stored.weights, stored.scales, place, scale, is_output, has_all, loads)
    else:
        weights = stored.weights + ((expert * outputs + output) * sizes.K)[:, None]
        tile = OperandTile(
            place=weights, scales=stored.scales, first=0, is_inside=is_output, count=0
        )
    return tile
