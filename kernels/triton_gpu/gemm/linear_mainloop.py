"""Main loop of the GEMM kernels, for every weight format (Triton).

It adds the inputs in one chain, or in segments: chains from zero that are added in order, see
`shared.spec.reduction_order.LinearOrder`.
"""

import triton
import triton.language as tl

from kernels.triton_gpu.gemm.block_loaders import add_block, load_block, load_rows


@triton.jit
def accumulate(
    acc,
    rows,
    outputs,
    first,
    last,
    depth: tl.constexpr,
    stages: tl.constexpr,
    beside: tl.constexpr,
    is_swapped: tl.constexpr,
    loads: tl.constexpr,
):
    """Adds the products of a tile to an accumulator, and those of the outputs `beside` to another.

    Args:
      acc: Zeros, `[rows, outputs]`; swapped: `[outputs, rows]`.
      rows, outputs: Operands, see `block_loaders.OperandTile`.
      first, last: The first input, and the first after the last; whole steps from input 0 on.
      depth, stages: Inputs per step, and pipeline stages.
      beside: Outputs from the tile's to those of the second accumulator; 0: there is none.
      is_swapped: Whether the operands are swapped (swap-AB).
      loads: Constants of the loads.
    """
    blocks: tl.constexpr = depth // loads.format.inputs
    more, x_at, weight_at = acc, rows.place, outputs.place
    if loads.rows.kind == "step":
        x_at += first
        weight_at += first
    for at in tl.range(first, last, depth, num_stages=stages):
        for number in tl.static_range(blocks):
            offset = number * loads.format.inputs
            x = load_rows(rows, x_at, at, offset, loads)
            block = load_block(outputs, weight_at, at, offset, 0, loads)
            acc = add_block(acc, x, block, is_swapped, loads)
            if beside > 0:
                block = load_block(outputs, weight_at, at, offset, beside, loads)
                more = add_block(more, x, block, is_swapped, loads)
        if loads.rows.kind == "step":
            x_at += depth
            weight_at += depth
    return acc, more


@triton.jit
def accumulate_segments(rows, outputs, shape: tl.constexpr, config: tl.constexpr):
    """Returns the accumulators of a tile, see `accumulate`, with all segments added in order."""
    loads: tl.constexpr = config.loads
    segments: tl.constexpr = config.segments
    length: tl.constexpr = loads.K // segments
    zeros = tl.zeros(shape, tl.float32)
    if segments == 1:
        total, more = accumulate(
            zeros,
            rows,
            outputs,
            0,
            loads.K,
            config.depth,
            config.stages,
            config.beside,
            config.is_swapped,
            loads,
        )
    else:
        total, more = zeros, zeros
        for segment in tl.range(segments):
            acc, of_more = accumulate(
                zeros,
                rows,
                outputs,
                segment * length,
                (segment + 1) * length,
                config.depth,
                config.stages,
                config.beside,
                config.is_swapped,
                loads,
            )
            total += acc
            more += of_more
    return total, more


@triton.jit
def arrives_last(part, args, tile, number, segment, sizes: tl.constexpr, config: tl.constexpr):
    """Stores a segment of a block, and returns whether all others have been stored before.

    Args:
      part: Sums of the segment, `[rows, outputs]`.
      args: Pointers, see `linear_epilogue.GemmOperands`.
      tile: The block, see `linear_epilogue.ResultTile`.
      number: Number of the block, with a counter that is zero before and after the GEMM.
      segment: Number of the segment.
      sizes, config: Sizes and tile config of the GEMM.
    """
    place, is_inside = _place_of(tile, sizes)
    at = args.parts + tl.cast(segment, tl.int64) * tile.num_rows * sizes.N + place
    tl.store(at, part, mask=is_inside)
    tl.debug_barrier()  # the stores of all threads, before one of them counts
    return tl.atomic_add(args.arrivals + number, 1) == config.segments - 1


@triton.jit
def sum_of_parts(args, tile, number, sizes: tl.constexpr, config: tl.constexpr):
    """Returns the sum of the segments of a block in order, and resets its counter."""
    place, is_inside = _place_of(tile, sizes)
    segments: tl.constexpr = config.segments
    tl.debug_barrier()  # the count, before the loads of all threads
    total = tl.zeros(place.shape, tl.float32)
    for segment in tl.static_range(segments):
        at = args.parts + tl.cast(segment, tl.int64) * tile.num_rows * sizes.N + place
        total += tl.load(at, mask=is_inside, other=0.0, volatile=True)
    tl.store(args.arrivals + number, 0)
    return total


@triton.jit
def _place_of(tile, sizes: tl.constexpr):
    place = tile.row.to(tl.int64)[:, None] * sizes.N + tile.column[None, :]
    return place, tile.is_row[:, None] & tile.is_column[None, :]
