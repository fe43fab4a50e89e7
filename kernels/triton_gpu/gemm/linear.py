"""GEMM of rows with a stored weight, with fused prologue and epilogue (Triton).

Each program computes one tile of rows and outputs, and accumulates along the inputs in one chain.
The bits of a row depend neither on the tiles nor on the number of rows (batch-invariant).
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int32
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.peer_buffers import is_joined
from kernels.tiles import LinearTiles
from kernels.triton_gpu.collectives.all_gather import AllGatherArgs, all_gather, number_of, rank_of
from kernels.triton_gpu.collectives.flag_protocol import PeerLayout
from kernels.triton_gpu.gemm import linear_sm90
from kernels.triton_gpu.gemm.fp8_w8a8 import add_blocks, width_of
from kernels.triton_gpu.gemm.fp8_w8a16 import widened
from kernels.triton_gpu.gemm.linear_epilogue import (
    GemmOperands,
    GemmSizes,
    GemmTileConfig,
    SquaresChunks,
    share_result,
    store_result,
)
from kernels.triton_gpu.gemm.moe_gemm_tiles import ExpertWeights, add_four, place_in_words
from kernels.triton_gpu.gemm.sum_of_squares import add_up, squares_of
from kernels.triton_gpu.sampling.lm_head_epilogue import BlockPartials, RowOutputs, store_partials
from shared.models.formats.fp8 import BLOCK
from shared.models.formats.fp8_w8a16 import shares_of
from shared.spec.reduction_order import SquaresOrder

_BLOCK, _LOG2_E = tl.constexpr(BLOCK), tl.constexpr(1.4426950408889634)
_DESCRIBED_BYTES = 16
"""Alignment in bytes that TMA descriptors require of row strides."""


def product(
    x: Float[Tensor, "R inputs"],
    weight: Float[Tensor, "stored inputs"] | Int32[Tensor, "stored words"],
    scales: Float[Tensor, "scales scales_in"] | None,
    row_scales: Float32[Tensor, "blocks_in R"] | None = None,
    *,
    out_type: torch.dtype,
    squares: Float[Tensor, "R chunks"] | None = None,
    eps: float = 0.0,
    is_gated: bool = False,
    bias: Float[Tensor, " stored"] | None = None,
    factor: float = 1.0,
    added: Float[Tensor, "R outputs"] | None = None,
    norm: Float[Tensor, " outputs"] | None = None,
    order: SquaresOrder,
    tiles: LinearTiles,
    gather: AllGatherArgs | None = None,
    asks: RowOutputs | None = None,
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
        packed FP8 (W8A16) with the bits of the dequantised weight, or FP8 for W8A8 rows.
      scales: Scales of packed FP8, see `shared.models.formats.fp8_w8a16`; or of FP8, as stored.
      row_scales: Scales of quantised rows.
      out_type: Type of the result.
      squares: Sums of squares of the rows per chunk, for a GEMM of their RMS norm. `x` then
        contains the rows times the norm's scale, and the squares are of the rows without it.
      eps: Epsilon of the norm.
      is_gated: Whether the result is silu(gate) * up.
      bias: Added to each row of the product before gating.
      factor: Factor of the result, if it is not gated.
      added: Residual added to the result; the sums of squares per chunk are returned as well.
      norm: Scale of the norm that the sum is read through next.
      order: Reduction order of squares.
      tiles: Tile config.
      gather: All-gather of the outputs; the weight is this rank's shard.
      asks: Outputs needed from an LM head, of `lm_head_epilogue.row_outputs`. The result is
        float32, and undefined in blocks of rows that need no logits.

    Returns:
      The result. With `added`, also the result times `norm`, if there is one, and its sums of
      squares per chunk. For an LM head, also the block partials. With `gather`, all of them are of
      all ranks, except the result with `added`: it is this rank's shard, and the second output is
      the next GEMM's input, with or without a norm.
    """
    (R, K), N = x.shape, weight.shape[0] // (2 if is_gated else 1)
    is_quantised = row_scales is not None
    if scales is not None and tiles.widens and not is_quantised:
        weight, scales = widened(weight, scales, **launching(x)), None
    is_wide = asks is None and linear_sm90.takes(
        x, weight, is_gated=is_gated, is_added=added is not None, tiles=tiles
    )
    tiles = tiles if is_wide else tiles.narrowed
    rows = tiles.rows if is_wide else min(tiles.rows, max(16, triton.next_power_of_2(R)))
    if is_quantised:
        rows = tiles.rows_of_codes(rows)
        depth = tiles.depth_of_codes(K)
    else:
        depth = tiles.depth_of(K) if scales is None else tiles.depth
    row_blocks, column_blocks = triton.cdiv(R, rows), triton.cdiv(N, tiles.columns)
    chunks = 0 if squares is None else squares.shape[1]
    out = torch.empty((R, N), dtype=out_type, device=x.device)
    scaled = sums = every = all_sums = None
    leaves = None if asks is None else BlockPartials.of(asks, N, tiles.columns)
    out_chunks = 0 if added is None else triton.cdiv(N, order.chunk)
    joins = (
        gather is not None
        and not (tiles.persistent or is_wide)
        and is_joined(R, N, out.element_size(), out_chunks)
    )
    if gather is not None and joins:
        every = out.new_empty((R, gather.boxes.ranks * N))
        shape = (R, gather.boxes.ranks * out_chunks)
        all_sums = torch.empty(shape, dtype=torch.float32, device=x.device)
    if added is not None:
        scaled = None if norm is None else torch.empty_like(out)
        sums = torch.empty((R, out_chunks), dtype=torch.float32, device=x.device)
    is_described = tiles.described and K * x.element_size() % _DESCRIBED_BYTES == 0
    x_at, weight_at = x, weight
    if is_described and not is_wide:
        lanes = BLOCK if is_quantised else depth
        x_at = TensorDescriptor.from_tensor(x, [rows, lanes])
        block = [width_of(rows, tiles.columns, is_quantised, is_gated), lanes]
        if is_gated and not is_quantised:  # blocks of gate and up form one tile
            weight_at, block = weight.view(2, N, K), [2, *block]
        weight_at = TensorDescriptor.from_tensor(weight_at, block)
    blocks = row_blocks * column_blocks
    # Triton 3.6 cannot flatten a loop that ends with a conditional store of logits.
    is_persistent = tiles.persistent and asks is None or is_wide
    programs = min(blocks, _multiprocessors(x.device)) if is_persistent else blocks
    args = GemmOperands(
        # Triton requires a pointer, even if nothing reads it.
        squares=x if squares is None else squares,
        bias=x if bias is None else bias,
        added=out if added is None else added,
        norm=out if norm is None else norm,
        out=out,
        scaled=out if scaled is None else scaled,
        sums=out if sums is None else sums,
        eps=eps,
        **(dict.fromkeys(BlockPartials._fields, out) if leaves is None else leaves._asdict()),
        all_words=out if every is None else every.view(torch.int32),
        all_sums=out if all_sums is None else all_sums.view(torch.int32),
        mail=out if gather is None else gather.mail.place,
        clock=out if gather is None else gather.mail.clock,
        call=0 if gather is None else gather.call,
    )
    how: dict[str, Any] = {
        "sizes": GemmSizes(
            N=N,
            K=K,
            shares=None
            if scales is None or is_quantised
            else shares_of(weight.shape, scales.shape),
            is_quantised=is_quantised,
            is_interpreted=not launching(x)["is_launched"],
            is_biased=bias is not None,
            is_gated=is_gated,
            is_added=added is not None,
            is_scaled=scaled is not None,
            factor=factor,
            leaves=0 if leaves is None else column_blocks,
            box=PeerLayout.of(gather.boxes) if gather is not None and joins else None,
            pack=_pack(rows * tiles.columns * out.element_size() // 4, tiles.warps),
        ),
        "squares": SquaresChunks(
            count=chunks,
            spread=triton.next_power_of_2(max(chunks, 1)),
            length=order.chunk,
            digits=order.digits,
            digits_of_chunks=order.digits_of_chunks,
        ),
        "config": GemmTileConfig(
            rows=rows,
            columns=tiles.columns,
            depth=depth,
            stages=tiles.stages,
            is_swapped=tiles.swapped,
            is_described=is_described,
            is_persistent=is_persistent,
            has_all_rows=rows * row_blocks == R,
        ),
        **launching(x),
    }
    if is_wide:
        given = (x, weight, args, row_blocks, blocks)
        linear_sm90.launch(*given, programs=programs, warps=tiles.warps, **how)
    else:
        _product_kernel[(programs,)](
            x_at,
            weight_at,
            x if scales is None else scales,
            x if row_scales is None else row_scales,
            args,
            R,
            row_blocks,
            blocks,
            num_warps=tiles.warps,
            **how,
        )
    if gather is None:
        return out, scaled, sums, leaves
    if every is None:
        every, all_sums = all_gather(
            out if scaled is None else scaled, sums, gather.mail, gather.call, boxes=gather.boxes
        )
    return (every, None, None, None) if added is None else (out, every, all_sums, None)


def _pack(words: int, warps: int) -> int:
    return max(1, min(4, words // (32 * warps)))


@cache
def _multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors; a fixed number for the interpreter."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count


def launching(x: Tensor) -> dict[str, bool]:
    """Returns compile and launch options of a kernel; the interpreter has no launch options.

    Multiply-add fusion is off: same bits as Pallas. A kernel may launch before the previous one
    ends (programmatic dependent launch), so each waits before it accesses memory that another
    kernel uses.
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
    number, x_at, weight_at, scales_at, row_scales_at, args, num_rows, row_blocks,
    sizes: tl.constexpr, squares: tl.constexpr, config: tl.constexpr, is_launched: tl.constexpr,
):  # fmt: skip
    """Computes one block of outputs and rows; rows vary first to share the weight."""
    N: tl.constexpr = sizes.N
    K: tl.constexpr = sizes.K
    is_gated: tl.constexpr = sizes.is_gated
    rows: tl.constexpr = config.rows
    columns: tl.constexpr = config.columns
    depth: tl.constexpr = config.depth
    is_swapped: tl.constexpr = config.is_swapped
    is_described: tl.constexpr = config.is_described
    # Concurrent programs share a block of the weight; the rows are in the L2 cache anyway.
    first_row = (number % row_blocks) * rows
    block = number // row_blocks
    row, column = first_row + tl.arange(0, rows), block * columns + tl.arange(0, columns)
    step = tl.arange(0, _BLOCK if sizes.is_quantised else depth)
    is_row, is_column = row < num_rows, column < N
    # Blocks of gate and up in one tile are multiplied together, so the rows are read once.
    is_in_words: tl.constexpr = sizes.shares is not None
    is_joined: tl.constexpr = is_gated and not sizes.is_quantised and (is_described or is_in_words)
    single: tl.constexpr = width_of(rows, columns, sizes.is_quantised, is_gated)
    width: tl.constexpr = 2 * columns if is_joined else single
    has_all: tl.constexpr = N % columns == 0
    if is_in_words:
        x_at += row.to(tl.int64)[:, None] * K
        lane = tl.arange(0, width)
        output = block * columns + lane % columns
        is_output = output < N
        output += lane // columns * N
        stored, scale = (
            ExpertWeights(weights=weight_at, scales=scales_at),
            output // sizes.shares.outputs,
        )
        of_weight = place_in_words(stored, output, scale, is_output, has_all, sizes)
    elif not is_described:
        x_at += row.to(tl.int64)[:, None] * K + step[None, :]
        stored = block * columns + tl.arange(0, single)
        weight_at += stored.to(tl.int64)[:, None] * K + step[None, :]
    if is_launched:
        gdc_wait()
    if sizes.box is not None:
        rank, number_of_call = (
            rank_of(args.mail, sizes),
            number_of(args.clock, args.call),
        )
    is_inside = is_row[:, None] & is_column[None, :]
    place = row.to(tl.int64)[:, None] * N + column[None, :]
    # With few rows, epilogue inputs are loaded before the loop, to hide their latency.
    is_early: tl.constexpr = rows <= 32
    if is_early and squares.count > 0:
        terms = squares_of(args.squares, row, is_row, squares)
    if is_early and sizes.is_added:
        added = tl.load(args.added + place, mask=is_inside, other=0.0)
    norm = column
    if is_early and sizes.is_scaled:
        norm = tl.load(args.norm + column, mask=is_column, other=0.0)

    acc = tl.zeros((width, rows) if is_swapped else (rows, width), tl.float32)
    up = acc
    for at in tl.range(0, K, depth, num_stages=config.stages):
        if is_in_words:
            acc = add_four(acc, of_weight, x_at, at, is_row, is_output, has_all, sizes, is_launched)
        elif sizes.is_quantised:
            acc, up = add_blocks(
                acc, up, x_at, weight_at, scales_at, row_scales_at, at, first_row, block * columns,
                num_rows, sizes, config,
            )  # fmt: skip
        elif is_described:
            x = x_at.load([first_row, at])
            if is_joined:
                weight = tl.reshape(weight_at.load([0, block * columns, at]), (width, depth))
            else:
                weight = weight_at.load([block * columns, at])
            acc = _add_product(acc, x, weight, is_swapped)
        else:
            inside = step[None, :] < K - at
            x = _tile(x_at, is_row, inside, config.has_all_rows, K % depth == 0)
            weight = _tile(weight_at, is_column, inside, N % columns == 0, K % depth == 0)
            acc = _add_product(acc, x, weight, is_swapped)
            if is_gated:
                weight = _tile(
                    weight_at + N * K, is_column, inside, N % columns == 0, K % depth == 0
                )
                up = _add_product(up, x, weight, is_swapped)
        if not (is_in_words or is_described):
            x_at += depth
            weight_at += depth
    if is_launched and not is_described:  # slower with TMA descriptors, as measured
        gdc_launch_dependents()
    if is_swapped:
        acc = tl.trans(acc)
        up = tl.trans(up)
    if is_joined:
        halves = tl.permute(tl.reshape(acc, (rows, 2, columns)), (0, 2, 1))
        acc, up = tl.split(halves)
    elif single < columns:
        acc = tl.reshape(tl.permute(tl.join(acc, up), (0, 2, 1)), (rows, columns))

    if squares.count > 0:
        if not is_early:
            terms = squares_of(args.squares, row, is_row, squares)
        scale = tl.rsqrt(add_up(terms, squares.digits_of_chunks) * (1.0 / K) + args.eps)
        acc = acc * scale[:, None]
        up = up * scale[:, None]
    if sizes.is_biased:
        acc += tl.load(args.bias + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        if is_gated:
            up += tl.load(args.bias + N + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if is_gated:
        acc = acc / (1.0 + tl.exp2(-acc * _LOG2_E)) * up
    if sizes.factor != 1.0:
        acc = acc * sizes.factor
    if sizes.is_added:
        if not is_early:
            added = tl.load(args.added + place, mask=is_inside, other=0.0)
        acc += added.to(tl.float32)
    out = acc.to(args.out.dtype.element_ty)
    if sizes.is_scaled and not is_early:
        norm = tl.load(args.norm + column, mask=is_column, other=0.0)
    if sizes.leaves > 0:
        store_partials(out, args, row, column, block, num_rows, sizes)
    elif sizes.box is None:
        store_result(out, norm, args, row, column, block, num_rows, sizes, squares)
    else:
        share_result(
            out, norm, args, row, column, block, num_rows, rank, number_of_call, sizes, squares
        )


@triton.jit
def _tile(at, is_one, inside, has_all: tl.constexpr, has_all_steps: tl.constexpr):
    """Loads a tile of rows or of a weight, zero outside the array."""
    if has_all and has_all_steps:
        tile = tl.load(at)
    elif has_all_steps:
        tile = tl.load(at, mask=is_one[:, None], other=0.0)
    else:
        tile = tl.load(at, mask=is_one[:, None] & inside, other=0.0)
    return tile


@triton.jit
def _add_product(acc, x, weight, is_swapped: tl.constexpr):
    if is_swapped:  # swap-AB: outputs are the wide side of the tensor core, rows the narrow one
        acc = tl.dot(weight, tl.trans(x), acc, input_precision="ieee")
    else:
        acc = tl.dot(x, tl.trans(weight), acc, input_precision="ieee")
    return acc
