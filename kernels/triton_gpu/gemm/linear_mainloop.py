"""Main loop of the GEMM kernels: one chain along the inputs, for every weight format (Triton)."""

import triton
import triton.language as tl

from kernels.triton_gpu.gemm.block_loaders import add_block, load_block, load_rows


@triton.jit
def accumulate(
    acc,
    rows,
    outputs,
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
      depth, stages: Inputs per step, and pipeline stages.
      beside: Outputs from the tile's to those of the second accumulator; 0: there is none.
      is_swapped: Whether the operands are swapped (swap-AB).
      loads: Constants of the loads.
    """
    blocks: tl.constexpr = depth // loads.format.inputs
    more, x_at, weight_at = acc, rows.place, outputs.place
    for at in tl.range(0, loads.K, depth, num_stages=stages):
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
