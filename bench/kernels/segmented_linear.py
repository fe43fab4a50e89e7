"""GEMM with segments along K, for `bench.kernels.reduction_segments` alone (Triton).

The inputs are divided into equal segments. Each segment is one chain from zero, and the segments
are added in order in float32. The main loop has the block loaders of the project's GEMM.
"""

# Pointers in kernels have no types, and Triton's functions are untyped.
# pyright: reportMissingParameterType=false, reportGeneralTypeIssues=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime.jit import MockTensor

from kernels.triton_gpu.gemm.block_loaders import (
    OperandTile,
    TileLoads,
    add_block,
    format_of,
    load_block,
    load_rows,
    packed_tile,
)


class Weight(NamedTuple):
    """Stored weight.

    Attributes:
      values, scales: Values and scales as `linear.product` reads them; scales of packed formats.
      format: Name of the format in `block_loaders.FORMATS`.
    """

    values: Tensor
    scales: Tensor | None
    format: str


class Tile(NamedTuple):
    """Tile config, which changes no bit.

    Attributes:
      outputs: Outputs of a program.
      depth: Inputs per step of an unpacked weight; packed formats have their own.
      swapped: Whether outputs are the wide side of the tensor core (swap-AB).
      separate: Whether each segment has a program of its own.
      warps, stages: Warps and pipeline stages.
    """

    outputs: int
    depth: int
    swapped: bool
    separate: bool
    warps: int
    stages: int


class Buffers(NamedTuple):
    """Result and partial sums of a GEMM; `arrivals` are zero between two calls."""

    out: Tensor
    parts: Tensor
    arrivals: Tensor

    @classmethod
    def of(cls, x: Tensor, num_outputs: int, segments: int) -> "Buffers":
        """Allocates the buffers of a GEMM of these rows."""
        out = torch.empty((len(x), num_outputs), dtype=torch.bfloat16, device=x.device)
        shape = segments, padded(len(x)), num_outputs
        parts = torch.empty(shape, dtype=torch.float32, device=x.device)
        return cls(out, parts, torch.zeros(num_outputs, dtype=torch.int32, device=x.device))


def padded(num_rows: int) -> int:
    """Returns the rows of a tile, with those of a tensor core at least."""
    return max(16, triton.next_power_of_2(num_rows))


def linear_of(x: Tensor, weight: Weight, buffers: Buffers, *, segments: int, tile: Tile) -> Tensor:
    """Returns x weight^T in bfloat16, with the inputs in equal segments that are added in order.

    Args:
      x: `[rows, inputs]`.
      weight: Weight of `[outputs, inputs]`.
      buffers: Buffers of this shape and number of segments; the result is one of them.
      segments: Number of segments along the inputs.
      tile: Tile config.

    Raises:
      ValueError: The sizes are no multiples of the tile.
    """
    grid, arguments = _call(x, weight, buffers, segments, tile)
    kernel: Any = segmented_linear_kernel
    kernel[grid](**arguments)
    return buffers.out


def compiled_of(x: Tensor, weight: Weight, *, tile: Tile) -> Any:
    """Compiles the kernel for arrays without memory; the number of segments changes no code."""
    buffers = Buffers.of(x, len(weight.values), 1)
    grid, arguments = _call(x, weight, buffers, 1, tile)
    for name, array in arguments.items():
        if isinstance(array, Tensor):
            arguments[name] = MockTensor(array.dtype)
    kernel: Any = segmented_linear_kernel
    return kernel.warmup(grid=grid, **arguments)


def _call(
    x: Tensor, weight: Weight, buffers: Buffers, segments: int, tile: Tile
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Returns the grid and the arguments of a launch."""
    (num_rows, inputs), num_outputs = x.shape, len(weight.values)
    format = format_of(weight.format, tile.depth, weight.values, weight.scales)
    if inputs % (segments * format.inputs) or num_outputs % tile.outputs:
        raise ValueError(
            f"{inputs} inputs in {segments} segments and {num_outputs} outputs are no multiple of "
            f"the tile, {format.inputs} inputs and {tile.outputs} outputs"
        )
    is_launched = x.device.type != "cpu"
    loads = TileLoads.of(
        format,
        "row",
        inputs,
        has_all_rows=False,
        has_all_outputs=True,
        is_interpreted=not is_launched,
    )
    arguments: dict[str, Any] = {
        "x_at": x,
        "weight_at": weight.values,
        "scales_at": x if weight.scales is None else weight.scales,
        "out_at": buffers.out,
        "parts_at": buffers.parts,
        "arrivals_at": buffers.arrivals,
        "num_rows": num_rows,
        "steps": inputs // segments // format.inputs,
        "segments": segments,
        "num_outputs": num_outputs,
        "rows": padded(num_rows),
        "outputs": tile.outputs,
        "stages": tile.stages,
        "is_swapped": tile.swapped,
        "loads": loads,
        "is_launched": is_launched,
        "num_warps": tile.warps,
    }
    if is_launched:  # as the project's GEMM is launched
        arguments |= {"enable_fp_fusion": False, "launch_pdl": True}
    grid = num_outputs // tile.outputs, segments if tile.separate else 1
    return grid, arguments


@triton.jit(do_not_specialize=["num_rows", "steps", "segments"])
def segmented_linear_kernel(
    x_at,
    weight_at,
    scales_at,
    out_at,
    parts_at,
    arrivals_at,
    num_rows,
    steps,
    segments,
    num_outputs: tl.constexpr,
    rows: tl.constexpr,
    outputs: tl.constexpr,
    stages: tl.constexpr,
    is_swapped: tl.constexpr,
    loads: tl.constexpr,
    is_launched: tl.constexpr,
):
    """Multiplies all rows with a block of outputs: one segment of `steps` steps, or all in order.

    The last program of a block to end adds the segments.
    """
    format: tl.constexpr = loads.format
    depth: tl.constexpr = format.inputs
    block, programs = tl.program_id(0), tl.num_programs(1)
    row, column = tl.arange(0, rows), block * outputs + tl.arange(0, outputs)
    is_row, is_column = row < num_rows, column < num_outputs
    if is_launched:
        gdc_wait()
    x_at += row.to(tl.int64)[:, None] * loads.K
    x = OperandTile(place=x_at, scales=0, first=0, is_inside=is_row, count=num_rows)
    if format.packed > 1:
        scale = column // format.scales.outputs
        weight = packed_tile(weight_at, scales_at, column, scale, is_column, True, loads)
    else:
        weight_at += column.to(tl.int64)[:, None] * loads.K
        weight = OperandTile(place=weight_at, scales=0, first=0, is_inside=is_column, count=0)
    shape: tl.constexpr = (outputs, rows) if is_swapped else (rows, outputs)
    total = tl.zeros(shape, tl.float32)
    for segment in range(tl.program_id(1), segments, programs):
        acc = tl.zeros(shape, tl.float32)
        for step in tl.range(segment * steps, (segment + 1) * steps, num_stages=stages):
            at = step * depth
            of_rows = load_rows(x, x.place, at, 0, loads)
            of_weight = load_block(weight, weight.place, at, 0, 0, loads)
            acc = add_block(acc, of_rows, of_weight, is_swapped, loads)
        total += acc
    if is_launched:
        gdc_launch_dependents()
    if is_swapped:
        total = tl.trans(total)
    place = row[:, None] * num_outputs + column[None, :]
    if programs == 1:
        tl.store(out_at + place, total.to(tl.bfloat16), mask=is_row[:, None])
    else:
        part_at = parts_at + place
        of_segment = rows * num_outputs
        tl.store(part_at + tl.program_id(1) * of_segment, total, mask=is_row[:, None])
        tl.debug_barrier()
        if tl.atomic_add(arrivals_at + block, 1) == segments - 1:
            tl.debug_barrier()
            total = tl.zeros((rows, outputs), tl.float32)
            for segment in range(segments):
                part = part_at + segment * of_segment
                total += tl.load(part, mask=is_row[:, None], other=0.0, volatile=True)
            tl.store(out_at + place, total.to(tl.bfloat16), mask=is_row[:, None])
            tl.store(arrivals_at + block, 0)
