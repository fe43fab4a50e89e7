"""Epilogue of the GEMM of `linear`, and the records of its inputs and sizes (Triton)."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.triton_gpu.collectives.all_gather import receive_words, send_words, words_of
from kernels.triton_gpu.collectives.flag_protocol import PeerLayout
from kernels.triton_gpu.gemm.sum_of_squares import chunks_of
from shared.models.formats.fp8_w8a16 import ScaleLayout


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


class GemmSizes(NamedTuple):
    """Problem size: outputs, inputs, and the fused operations.

    Attributes:
      shares: Layout of packed FP8 weights; None: the weight is bfloat16, float32 or quantised FP8.
      is_quantised: Whether rows and weight are quantised (W8A8).
      is_interpreted: Whether the interpreter runs the kernel.
      is_biased, is_gated, is_added, is_scaled: Fused operations.
      factor: Factor of a result that is not gated.
      leaves: Output blocks with LM-head partials; 0: the result is stored.
      box: Layout of the symmetric buffers for a fused all-gather; None: no gather, or a later one.
      pack: Words of a block that a thread polls at once.
    """

    N: int
    K: int
    shares: ScaleLayout | None
    is_quantised: bool
    is_interpreted: bool
    is_biased: bool
    is_gated: bool
    is_added: bool
    is_scaled: bool
    factor: float
    leaves: int
    box: PeerLayout | None
    pack: int


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
    """Tile config, and whether every block of rows is full."""

    rows: int
    columns: int
    depth: int
    stages: int
    is_swapped: bool
    is_described: bool
    is_persistent: bool
    has_all_rows: bool


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
