"""Epilogue of the GEMM of `linear`, and the records of its inputs and sizes (Triton)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.triton_gpu.collectives.all_gather import receive_words, send_words, words_of
from kernels.triton_gpu.collectives.flag_protocol import PeerLayout
from kernels.triton_gpu.gemm.activation import act_and_mul, relu_squared
from kernels.triton_gpu.gemm.block_loaders import TileLoads
from kernels.triton_gpu.gemm.lora import AdapterSizes
from kernels.triton_gpu.gemm.sum_of_squares import add_up, chunks_of, squares_of
from shared.models.activation import Activation

_FEW_ROWS = tl.constexpr(32)
"""Rows of a tile that loads epilogue inputs before the main loop, to hide their latency."""


class GemmOperands(NamedTuple):
    """Inputs of the prologue and the epilogue, and outputs.

    Attributes:
      squares: Sums of squares of the rows per chunk, for their norm.
      bias: Added to each row.
      added, norm: Added to the result, and the scale that multiplies it for the next norm.
      out, scaled, sums: The result, the result times `norm`, and its sums of squares per chunk.
      eps: Epsilon of the norm.
      asks, temperature, tokens, keys, ids, bad, peaks, masses: See
        `lm_head_epilogue.BlockPartials`.
      all_words, all_sums: All ranks' result, or their `scaled`; and all ranks' `sums`.
      mail, clock, call: See `all_gather.AllGatherArgs`.
      adapters: See `lora.AdapterOperands`; None without.
      parts, arrivals: Sums of the segments `[segments, rows, outputs]`, if they have programs of
        their own, and a counter of each block, zero before and after the GEMM.
    """

    squares: Any
    bias: Any
    added: Any
    norm: Any
    out: Any
    scaled: Any
    sums: Any
    eps: Any
    asks: Any
    temperature: Any
    tokens: Any
    keys: Any
    ids: Any
    bad: Any
    peaks: Any
    masses: Any
    all_words: Any
    all_sums: Any
    mail: Any
    clock: Any
    call: Any
    adapters: Any
    parts: Any
    arrivals: Any


class GemmSizes(NamedTuple):
    """Problem size: outputs, inputs, and the fused operations.

    Attributes:
      is_biased, is_gated, is_added, is_scaled: Fused operations.
      activation: Activation of gate and up, or of a result without a gate.
      factor: Factor of a result that is not gated.
      leaves: Output blocks with LM-head partials; 0: the result is stored.
      box: Layout of the symmetric buffers for a fused all-gather; None: no gather, or a later one.
      pack: Words of a block that a thread polls at once.
      adapters: Sizes of LoRA adapters; None without.
    """

    N: int
    K: int
    is_biased: bool
    is_gated: bool
    activation: Activation
    is_added: bool
    is_scaled: bool
    factor: float
    leaves: int
    box: PeerLayout | None
    pack: int
    adapters: AdapterSizes | None


class SquaresChunks(NamedTuple):
    """Reduction order of squares.

    Attributes:
      count, spread: Chunks of a row of inputs, 0 without a norm, and lanes that read them.
      length: Outputs of a chunk of the result.
      digits, digits_of_chunks: Bits of the integers in which squares and chunk sums are added.
    """

    count: int
    spread: int
    length: int
    digits: int
    digits_of_chunks: int


class GemmTileConfig(NamedTuple):
    """Tile config.

    Attributes:
      rows, columns: Rows and outputs of a tile.
      width, beside: Outputs of an accumulator, and outputs from there to those of a second one; 0:
        there is none.
      depth, stages: Inputs per step, and pipeline stages.
      segments, is_separate: Segments of the inputs, and whether they have programs of their own.
      is_sync: Whether `linear_swap_ab` multiplies by `mma.sync`, not WGMMA.
      loads: Loads of the operands.
    """

    rows: int
    columns: int
    width: int
    beside: int
    depth: int
    stages: int
    segments: int
    is_separate: bool
    is_swapped: bool
    is_persistent: bool
    is_sync: bool
    loads: TileLoads


class ResultTile(NamedTuple):
    """Tile of the result.

    Attributes:
      block: Index of the block of outputs.
      first_row, row, column: First row, and all rows and columns.
      is_row, is_column: Masks of the rows and columns in bounds.
      num_rows: Rows of the result.
    """

    block: Any
    first_row: Any
    row: Any
    column: Any
    is_row: Any
    is_column: Any
    num_rows: Any


class EarlyInputs(NamedTuple):
    """State of the epilogue from before the main loop.

    Attributes:
      is_inside, place: Mask of the elements in bounds, and their offsets in the result.
      squares, added, norm: Sums of squares, residual and next norm, if they are loaded already.
    """

    is_inside: Any
    place: Any
    squares: Any
    added: Any
    norm: Any


@triton.jit
def load_early(args, tile, sizes: tl.constexpr, squares: tl.constexpr):
    """Loads the inputs of the epilogue for few rows; others are loaded when they are used."""
    is_inside = tile.is_row[:, None] & tile.is_column[None, :]
    place = tile.row.to(tl.int64)[:, None] * sizes.N + tile.column[None, :]
    terms, added, norm = tile.row, tile.row, tile.column
    if tile.row.shape[0] <= _FEW_ROWS:
        if squares.count > 0:
            terms = squares_of(args.squares, tile.row, tile.is_row, squares)
        if sizes.is_added:
            added = tl.load(args.added + place, mask=is_inside, other=0.0)
        if sizes.is_scaled:
            norm = tl.load(args.norm + tile.column, mask=tile.is_column, other=0.0)
    return EarlyInputs(is_inside=is_inside, place=place, squares=terms, added=added, norm=norm)


@triton.jit
def finish(acc, up, early, args, tile, sizes: tl.constexpr, squares: tl.constexpr):
    """Applies the epilogue to the accumulators, of the result or of gate and up.

    Returns:
      The result in its type, and the scale of the next norm if there is one.
    """
    is_early: tl.constexpr = tile.row.shape[0] <= _FEW_ROWS
    if squares.count > 0:
        terms = early.squares
        if not is_early:
            terms = squares_of(args.squares, tile.row, tile.is_row, squares)
        mean = add_up(terms, squares.digits_of_chunks) * (1.0 / sizes.K)
        scale = tl.rsqrt(mean + args.eps)
        acc = acc * scale[:, None]
        up = up * scale[:, None]
    if sizes.is_biased:
        bias_at = args.bias + tile.column
        acc += tl.load(bias_at, mask=tile.is_column, other=0.0).to(tl.float32)[None, :]
        if sizes.is_gated:
            up_at = args.bias + sizes.N + tile.column
            up += tl.load(up_at, mask=tile.is_column, other=0.0).to(tl.float32)[None, :]
    activation: tl.constexpr = sizes.activation
    if sizes.is_gated:
        acc = act_and_mul(acc, up, activation)
    elif activation.kind == "relu2":
        acc = relu_squared(acc)
    if sizes.factor != 1.0:
        acc = acc * sizes.factor
    if sizes.is_added:
        added = early.added
        if not is_early:
            added = tl.load(args.added + early.place, mask=early.is_inside, other=0.0)
        acc += added.to(tl.float32)
    out = acc.to(args.out.dtype.element_ty)
    norm = early.norm
    if sizes.is_scaled and not is_early:
        norm = tl.load(args.norm + tile.column, mask=tile.is_column, other=0.0)
    return out, norm


@triton.jit
def store_result(
    out, norm, args, row, column, block, num_rows, sizes: tl.constexpr, squares: tl.constexpr
):
    """Stores a block of the result, the next norm's input, and its sums of squares per chunk."""
    N: tl.constexpr = sizes.N
    place = row.to(tl.int64)[:, None] * N + column[None, :]
    is_row, is_column = row < num_rows, column < N
    is_inside = is_row[:, None] & is_column[None, :]
    tl.store(args.out + place, out, mask=is_inside)
    if sizes.is_scaled:
        read = (out.to(tl.float32) * norm[None, :]).to(out.dtype)
        tl.store(args.scaled + place, read, mask=is_inside)
    if sizes.is_added:
        chunks: tl.constexpr = (N + squares.length - 1) // squares.length
        part = block * (out.shape[1] // squares.length) + tl.arange(
            0, out.shape[1] // squares.length
        )
        at = args.sums + row.to(tl.int64)[:, None] * chunks + part[None, :]
        is_part = is_row[:, None] & (part < chunks)[None, :]
        tl.store(at, chunks_of(out, is_column, squares), mask=is_part)


@triton.jit
def share_result(
    out,
    norm,
    args,
    row,
    column,
    block,
    num_rows,
    rank,
    number,
    sizes: tl.constexpr,
    squares: tl.constexpr,
):
    """Same as `store_result`, with all-gather: the next input and the squares are of all ranks.

    Programs of the same number have the same block on every rank and run at the same time. Data
    that other ranks wait for is sent first.
    """
    N: tl.constexpr = sizes.N
    ranks: tl.constexpr = sizes.box.ranks
    is_row, is_column = row < num_rows, column < N
    read = out
    if sizes.is_scaled:
        read = (out.to(tl.float32) * norm[None, :]).to(out.dtype)
    words = words_of(read)
    width: tl.constexpr = words.shape[1]
    in_row: tl.constexpr = N * width // out.shape[1]
    word = block * width + tl.arange(0, width)
    is_word = is_row[:, None] & (word < in_row)[None, :]
    at_word = row[:, None] * in_row + word[None, :]
    sent = send_words(words, at_word, is_word, args.mail, rank, number, sizes)
    if sizes.is_added:
        chunks: tl.constexpr = (N + squares.length - 1) // squares.length
        part = block * (out.shape[1] // squares.length) + tl.arange(
            0, out.shape[1] // squares.length
        )
        is_part = is_row[:, None] & (part < chunks)[None, :]
        sums = chunks_of(out, is_column, squares).to(tl.int32, bitcast=True)
        at_sum = num_rows * in_row + row[:, None] * chunks + part[None, :]
        sent_sums = send_words(sums, at_sum, is_part, args.mail, rank, number, sizes)
        place = row.to(tl.int64)[:, None] * N + column[None, :]
        tl.store(args.out + place, out, mask=is_row[:, None] & is_column[None, :])
        sums_at = args.all_sums + row[:, None] * (ranks * chunks) + part[None, :]
        tl.store(sums_at + rank * chunks, sums, mask=is_part)
    out_at = args.all_words + row[:, None] * (ranks * in_row) + word[None, :]
    tl.store(out_at + rank * in_row, words, mask=is_word)
    receive_words(
        out_at,
        in_row,
        sent,
        at_word,
        is_word,
        args.mail,
        rank,
        number,
        args.call,
        sizes.pack,
        sizes=sizes,
    )
    if sizes.is_added:
        receive_words(
            sums_at,
            chunks,
            sent_sums,
            at_sum,
            is_part,
            args.mail,
            rank,
            number,
            args.call,
            1,
            sizes=sizes,
        )
