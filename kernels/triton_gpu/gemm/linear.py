"""GEMM of rows with a stored weight, with fused prologue and epilogue (Triton).

Each program computes one tile of rows and outputs, and accumulates along the inputs in one chain,
or in segments, which can also have programs of their own. The bits of a row depend neither on the
tiles nor on the number of rows (batch-invariant).
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int32, Shaped
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.tiles import LinearTiles
from kernels.triton_gpu.collectives.all_gather import AllGatherArgs, number_of, rank_of
from kernels.triton_gpu.gemm import linear_sm90, linear_swap_ab
from kernels.triton_gpu.gemm.block_loaders import is_packed, tile_outputs, tile_rows
from kernels.triton_gpu.gemm.dequantize import dequantize
from kernels.triton_gpu.gemm.linear_epilogue import (
    GemmOperands,
    ResultTile,
    finish,
    load_early,
    share_result,
    store_result,
)
from kernels.triton_gpu.gemm.linear_launch import (
    FusedInputs,
    GemmResults,
    GemmTiling,
    squares_chunks,
)
from kernels.triton_gpu.gemm.linear_mainloop import (
    accumulate,
    accumulate_segments,
    arrives_last,
    sum_of_parts,
)
from kernels.triton_gpu.gemm.lora import RowAdapters, adapter_tile, expand
from kernels.triton_gpu.sampling.lm_head_epilogue import BlockPartials, RowOutputs, store_partials
from shared.models.activation import SILU_AND_MUL, Activation
from shared.models.formats.weight_format import PLAIN
from shared.spec.reduction_order import SquaresOrder


def product(
    x: Float[Tensor, "R inputs"],
    weight: Float[Tensor, "stored inputs"] | Int32[Tensor, "stored words"],
    scales: Shaped[Tensor, "scales scales_in"] | None,
    row_scales: Float32[Tensor, "blocks_in R"] | None = None,
    *,
    format: str,
    out_type: torch.dtype,
    squares: Float[Tensor, "R chunks"] | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    activation: Activation = SILU_AND_MUL,
    bias: Float[Tensor, " stored"] | None = None,
    factor: float = 1.0,
    added: Float[Tensor, "R outputs"] | None = None,
    norm: Float[Tensor, " outputs"] | None = None,
    order: SquaresOrder,
    segments: int = 1,
    arrivals: Int32[Tensor, " counters"] | None = None,
    tiles: LinearTiles,
    gather: AllGatherArgs | None = None,
    asks: RowOutputs | None = None,
    lora: RowAdapters | None = None,
) -> tuple[
    Float[Tensor, "R outputs"],
    Float[Tensor, "R outputs"] | None,
    Float[Tensor, "R chunks_out"] | None,
    BlockPartials | None,
]:
    """Multiplies rows with a weight, with the layer's prologue and epilogue fused.

    Args:
      x: The rows; or quantised rows of `fp8_activations.quantised`.
      weight: `[outputs, inputs]`; gated weights have the gate's rows, then the up projection's. Or
        packed (W8A16, W4A16), with the bits of the dequantised weight, or FP8 for W8A8 rows.
      scales: Scales of packed weights, see `shared.models.formats`; or of FP8, as stored.
      row_scales: Scales of quantised rows.
      format: Name of the weight format, which selects the block loader.
      out_type: Type of the result.
      squares: Sums of squares of the rows per chunk, for a GEMM of their RMS norm. `x` then
        contains the rows times the norm's scale, and the squares are of the rows without it.
      eps: Epsilon of the norm.
      is_gated, activation: Whether the result is an activation of gate and up, and which one. An
        activation without a gate applies to the result, the usual one does not.
      bias: Added to each row of the product before gating.
      factor: Factor of the result, if it is not gated.
      added: Residual added to the result; the sums of squares per chunk are returned as well.
      norm: Scale of the norm that the sum is read through next.
      order: Reduction order of squares.
      segments: Segments of the inputs, see `LinearOrder`.
      arrivals: Counters, zero before and after the GEMM; None or too few for some of this call.
      tiles: Tile config.
      gather: All-gather of the outputs; the weight is this rank's shard.
      asks: Outputs needed from an LM head, of `lm_head_epilogue.row_outputs`. The result is
        float32, and undefined in blocks of rows that need no logits.
      lora: Adapters of the rows, of `lora.shrink`.

    Returns:
      The result. With `added`, also the result times `norm`, if there is one, and its sums of
      squares per chunk. For an LM head, also the block partials. With `gather`, all of them are of
      all ranks, except the result with `added`: it is this rank's shard, and the second output is
      the next GEMM's input, with or without a norm.
    """
    if tiles.widens and scales is not None and is_packed(format):
        weight = dequantize(weight, scales, format, x.shape[1], **launching(x))
        scales, format = None, PLAIN
        lora = None if lora is None else lora._replace(is_next=False)
    is_alone = asks is None and lora is None
    is_wide = is_alone and linear_sm90.takes(
        x, weight, is_gated=is_gated, is_added=added is not None, segments=segments, tiles=tiles
    )
    # A GEMM in bfloat16 can have a fused all-gather instead.
    may_copy = is_alone and (gather is None or scales is not None)
    tiles = tiles.dividing(x.shape[1] // segments)
    is_copied = may_copy and linear_swap_ab.takes(
        x, weight, scales, format=format, is_gated=is_gated, segments=segments, tiles=tiles
    )
    how = {"is_gated": is_gated, "is_wide": is_wide, "is_copied": is_copied}
    how |= {"is_adapted": lora is not None}
    tiling = GemmTiling.of(x, weight, scales, tiles, format=format, segments=segments, **how)
    fused = FusedInputs(squares, eps, activation, bias, factor, added, norm, lora)
    joins = None if tiling.tiles.persistent or is_wide or is_copied else gather
    results = GemmResults.of(x, tiling, out_type, fused, joins, asks, order)
    # Triton 3.6 cannot flatten a loop with a conditional store of logits or conditional adapters. A
    # flattened loop has its operands and the result in shared memory at once, which is too much for
    # 128 x 256 float32 results of bfloat16 rows.
    is_flattened = is_alone and out_type.itemsize <= max(x.element_size(), 2)
    is_persistent = tiling.tiles.persistent and is_flattened or is_wide
    # With a fused all-gather a program waits for those of other ranks, so all must be resident.
    resident = None if results.every is None else _multiprocessors(x.device)
    is_separate = tiling.is_separate(resident)
    results = results.in_parts(tiling, arrivals) if is_separate else results
    programs = tiling.blocks * (segments if is_separate else 1)
    is_sync = is_copied and tiling.is_sync(programs, _multiprocessors(x.device))
    is_interpreted = not launching(x)["is_launched"]
    _launch(
        *((x, weight) if is_wide or is_copied else tiling.described(x, weight)),
        x if scales is None else scales,
        x if row_scales is None else row_scales,
        results.operands(x, fused, gather),
        tiling,
        is_wide=is_wide,
        is_copied=is_copied,
        programs=min(programs, _multiprocessors(x.device)) if is_persistent else programs,
        sizes=results.sizes(tiling, fused, gather),
        squares=squares_chunks(squares, order),
        config=tiling.config(
            is_persistent=is_persistent,
            is_separate=is_separate,
            is_sync=is_sync,
            is_interpreted=is_interpreted,
        ),
        **launching(x),
    )
    return results.gathered(gather)


def _launch(
    x_at: Any,
    weight_at: Any,
    scales: Tensor,
    row_scales: Tensor,
    args: GemmOperands,
    tiling: GemmTiling,
    *,
    is_wide: bool,
    is_copied: bool,
    programs: int,
    **how: Any,
) -> None:
    """Launches the kernel of a GEMM; see `GemmTiling.of` and `_product_kernel`."""
    row_blocks, blocks = tiling.row_blocks, tiling.blocks
    if is_wide:
        how |= {"programs": programs, "warps": tiling.tiles.warps}
        linear_sm90.launch(x_at, weight_at, args, row_blocks, blocks, **how)
        return
    if is_copied:
        linear_swap_ab.launch(x_at, weight_at, scales, args, blocks, **how)
        return
    _product_kernel[(programs,)](
        x_at,
        weight_at,
        scales,
        row_scales,
        args,
        tiling.R,
        row_blocks,
        blocks,
        num_warps=tiling.tiles.warps,
        **how,
    )


@cache
def _multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors; a fixed number for the interpreter."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def launching(x: Tensor) -> dict[str, bool]:
    """Returns compile and launch options of a kernel; the interpreter has no launch options.

    Multiply-add fusion is off: same bits as Pallas. A kernel may launch before the previous one
    ends (programmatic dependent launch), so each waits before it accesses memory that the previous
    kernel uses. Kernels before that have ended.
    """
    if not x.is_cuda:
        return {"is_launched": False}
    return {"is_launched": True, "enable_fp_fusion": False, "launch_pdl": True}


@triton.jit(do_not_specialize=["num_rows", "row_blocks", "blocks"])
def _product_kernel(
    x_at,
    weight_at,
    scales_at,
    row_scales_at,
    args,
    num_rows,
    row_blocks,
    blocks,
    sizes: tl.constexpr,
    squares: tl.constexpr,
    config: tl.constexpr,
    is_launched: tl.constexpr,
):
    """One program per block of outputs and rows, or a persistent program per multiprocessor.

    A persistent program copies the next block while it finishes and stores the current one.
    """
    if config.is_persistent:
        if is_launched:
            gdc_wait()
        for number in tl.range(tl.program_id(0), blocks, tl.num_programs(0), flatten=True):
            _product_block(
                number,
                x_at,
                weight_at,
                scales_at,
                row_scales_at,
                args,
                num_rows,
                row_blocks,
                sizes,
                squares,
                config,
                False,
            )
    else:
        _product_block(
            tl.program_id(0),
            x_at,
            weight_at,
            scales_at,
            row_scales_at,
            args,
            num_rows,
            row_blocks,
            sizes,
            squares,
            config,
            is_launched,
        )


@triton.jit
def _product_block(
    number,
    x_at,
    weight_at,
    scales_at,
    row_scales_at,
    args,
    num_rows,
    row_blocks,
    sizes: tl.constexpr,
    squares: tl.constexpr,
    config: tl.constexpr,
    is_launched: tl.constexpr,
):
    """Computes one block of outputs and rows, or one segment of it; the last segment to end adds
    all.
    """
    loads: tl.constexpr = config.loads
    segment = 0
    if config.is_separate:
        blocks = tl.num_programs(0) // config.segments
        segment, number = number // blocks, number % blocks
    tile = _tile_of(number, num_rows, row_blocks, sizes, config)
    rows = tile_rows(tile, x_at, row_scales_at, config)
    outputs = tile_outputs(tile, weight_at, scales_at, sizes, config)
    waits_late: tl.constexpr = sizes.adapters is not None and sizes.adapters.is_next
    if is_launched and not waits_late:
        gdc_wait()
    if not config.is_separate:
        early = _load_early(args, tile, sizes, squares)
    shape: tl.constexpr = (
        (config.width, config.rows) if config.is_swapped else (config.rows, config.width)
    )
    if config.is_separate:
        length: tl.constexpr = loads.K // config.segments
        acc, more = accumulate(
            tl.zeros(shape, tl.float32),
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
    else:
        acc, more = accumulate_segments(rows, outputs, shape, config)
    if is_launched and loads.rows.kind != "descriptor":  # slower with TMA, as measured
        gdc_launch_dependents()
    if config.is_swapped:
        acc = tl.trans(acc)
        more = tl.trans(more)
    if not config.is_separate:
        _end_block(acc, more, early, args, tile, sizes, squares, config, is_launched)
    elif arrives_last(acc, args, tile, number, segment, sizes, config):
        acc = sum_of_parts(args, tile, number, sizes, config)
        early = _load_early(args, tile, sizes, squares)
        _end_block(acc, acc, early, args, tile, sizes, squares, config, is_launched)


@triton.jit
def _load_early(args, tile, sizes: tl.constexpr, squares: tl.constexpr):
    """Returns rank and call of a fused all-gather, inputs of the epilogue, and adapter slots."""
    rank, call, slots = 0, 0, 0
    if sizes.box is not None:
        rank, call = rank_of(args.mail, sizes), number_of(args.clock, args.call)
    early = load_early(args, tile, sizes, squares)
    if sizes.adapters is not None:
        slots = tl.load(args.adapters.slots + tile.row, mask=tile.is_row, other=0)
    return rank, call, early, slots


@triton.jit
def _end_block(
    acc,
    more,
    early,
    args,
    tile,
    sizes: tl.constexpr,
    squares: tl.constexpr,
    config: tl.constexpr,
    is_launched: tl.constexpr,
):
    """Adds the adapters to the sums of a block, applies the epilogue and stores the result."""
    rank, call, early, slots = early
    num_rows = tile.num_rows
    if sizes.adapters is not None:
        rows = adapter_tile(tile.row, slots)
        if is_launched and sizes.adapters.is_next:
            gdc_wait()
        acc, more = _adapted(acc, more, rows, args, tile, sizes, config)
    acc, more = _halves(acc, more, config)
    out, norm = finish(acc, more, early, args, tile, sizes, squares)
    row, column, block = tile.row, tile.column, tile.block
    if sizes.leaves > 0:
        store_partials(out, args, row, column, block, num_rows, sizes)
    elif sizes.box is None:
        store_result(out, norm, args, row, column, block, num_rows, sizes, squares)
    else:
        share_result(out, norm, args, row, column, block, num_rows, rank, call, sizes, squares)


@triton.jit
def _tile_of(number, num_rows, row_blocks, sizes: tl.constexpr, config: tl.constexpr):
    """Returns a tile; rows vary first, so that concurrent programs share a block of the weight.

    The rows are in the L2 cache anyway.
    """
    first_row = (number % row_blocks) * config.rows
    block = number // row_blocks
    row = first_row + tl.arange(0, config.rows)
    column = block * config.columns + tl.arange(0, config.columns)
    return ResultTile(
        block=block,
        first_row=first_row,
        row=row,
        column=column,
        is_row=row < num_rows,
        is_column=column < sizes.N,
        num_rows=num_rows,
    )


@triton.jit
def _adapted(acc, more, rows, args, tile, sizes: tl.constexpr, config: tl.constexpr):
    """Continues the accumulators over the inputs of the adapters of the rows."""
    N: tl.constexpr = sizes.N
    adapters: tl.constexpr = sizes.adapters
    last: tl.constexpr = N * (config.width // config.columns)
    lane = tl.arange(0, config.width)
    output = tile.block * config.columns + lane % config.columns
    is_output = output < N
    output += lane // config.columns * N
    own = args.adapters
    acc = expand(acc, output, is_output, 0, last, own, rows, adapters)
    if sizes.is_gated and config.beside > 0:
        more = expand(more, output + N, is_output, N, 2 * N, own, rows, adapters)
    return acc, more


@triton.jit
def _halves(acc, more, config: tl.constexpr):
    """Returns the accumulators of a tile: of the result, or of gate and up."""
    if config.width > config.columns:
        halves = tl.permute(tl.reshape(acc, (config.rows, 2, config.columns)), (0, 2, 1))
        acc, more = tl.split(halves)
    elif config.width < config.columns:
        both = tl.permute(tl.join(acc, more), (0, 2, 1))
        acc = tl.reshape(both, (config.rows, config.columns))
    return acc, more
