"""Low-latency (LL) all-gather of ranks over symmetric memory (Triton)."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from jaxtyping import Int32, Shaped
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.peer_buffers import (
    LARGEST_WORDS_BYTES,
    WORDS,
    BufferLayout,
    constraints,
    receive_text,
    send_text,
)
from kernels.triton_gpu.collectives.flag_protocol import (
    BLOCK_UNITS,
    BLOCK_WARPS,
    MOST_BLOCKS,
    PeerArgs,
    PeerLayout,
    max_polls_of,
    set_flags,
    wait_flag,
)

_ADDRESS = 1
"""Registers of an address."""
_SEND = tl.constexpr(send_text(_ADDRESS))
_SEND_KINDS = tl.constexpr(constraints(1, "r", "l", "r", "r", "r"))
_RECEIVE = {pack: receive_text(_ADDRESS, pack) for pack in (1, 2, 4)}
_RECEIVE_1 = tl.constexpr(_RECEIVE[1])
_RECEIVE_2 = tl.constexpr(_RECEIVE[2])
_RECEIVE_4 = tl.constexpr(_RECEIVE[4])


def _receive_kinds(pack: int) -> str:
    return constraints(pack, *(["l"] * pack), *(["r"] * (5 * pack)))


_RECEIVE_KINDS_1 = tl.constexpr(_receive_kinds(1))
_RECEIVE_KINDS_2 = tl.constexpr(_receive_kinds(2))
_RECEIVE_KINDS_4 = tl.constexpr(_receive_kinds(4))
_WORD_WARPS = 4


class AllGatherArgs(NamedTuple):
    """All-gather of a step.

    Attributes:
      mail: Symmetric buffers of the rank.
      call: Index of the all-gather in the step, from 0.
      boxes: Layout of the buffers.
    """

    mail: PeerArgs
    call: int
    boxes: BufferLayout


class GatherSizes(NamedTuple):
    """Compile-time sizes of the two arrays of a call.

    Attributes:
      box: Layout of the symmetric buffers.
      rows: Rows of both arrays.
      share, second_share: Units of a row's shard in each array; 0: there is no second array.
      programs, second_programs: Number of programs of each array.
      unit: Bytes of a unit: 4 or 8.
      at_once: Units that a program processes at once.
    """

    box: PeerLayout
    rows: int
    share: int
    second_share: int
    programs: int
    second_programs: int
    unit: int
    at_once: int


def all_gather(
    values: Shaped[Tensor, "R share"],
    sums: Shaped[Tensor, "R chunks"] | None,
    mail: PeerArgs,
    call: int,
    *,
    boxes: BufferLayout,
    largest_words_bytes: int = LARGEST_WORDS_BYTES,
) -> tuple[Shaped[Tensor, "R outputs"], Shaped[Tensor, "R chunks_of_all"] | None]:
    """Concatenates the columns of all ranks in rank order; every rank gets the same bits.

    Args:
      values: This rank's columns.
      sums: This rank's columns of a second array, such as the sums of squares per chunk.
      mail: Symmetric buffers of the rank.
      call: Index of the all-gather in the step, from 0.
      boxes: Layout of the buffers.
      largest_words_bytes: Maximum bytes of `values` for the LL protocol.

    Returns:
      The columns of all ranks, and those of the second array, if there is one.

    Raises:
      ValueError: A row of an array is not a whole number of 4-byte words, or the arrays exceed the
        capacity of a symmetric buffer.
    """
    arrays = [values] if sums is None else [values, sums]
    given = [in_words(x) for x in arrays]
    outs = [x.new_empty((x.shape[0], boxes.ranks * x.shape[1])) for x in arrays]
    num_words = sum(x.numel() for x in given)
    is_words = num_words <= WORDS and 4 * given[0].numel() <= largest_words_bytes
    unit = 4
    if not is_words:
        total = sum(4 * x.numel() + 8 for x in given)
        if total > boxes.block_bytes:
            raise ValueError(f"a rank may send {boxes.block_bytes} bytes in a call, got {total}")
        if all(x.shape[1] % 2 == 0 for x in given):
            given, unit = [x.view(torch.int64) for x in given], 8
    at_once = 32 * _WORD_WARPS if num_words <= 1 << 14 else 4 * 32 * _WORD_WARPS
    at_once = at_once if is_words else BLOCK_UNITS
    programs = [triton.cdiv(x.numel(), at_once) for x in given]
    if not is_words:
        programs = [min(n, MOST_BLOCKS) for n in programs]
    sizes = GatherSizes(
        box=PeerLayout.of(boxes),
        rows=values.shape[0],
        share=given[0].shape[1],
        second_share=given[1].shape[1] if len(given) > 1 else 0,
        programs=programs[0],
        second_programs=programs[1] if len(given) > 1 else 0,
        unit=unit,
        at_once=at_once,
    )
    kernel = _words_kernel if is_words else _blocks_kernel
    dtype = torch.int32 if unit == 4 else torch.int64
    kernel[(sum(programs),)](
        given[0],
        outs[0].view(dtype),
        given[-1],
        outs[-1].view(dtype),
        mail.place,
        mail.clock,
        call,
        sizes=sizes,
        num_warps=_WORD_WARPS if is_words else BLOCK_WARPS,
        launch_pdl=True,
    )
    return outs[0], None if sums is None else outs[1]


def in_words(x: Tensor) -> Int32[Tensor, "R words"]:
    """Returns a view of rows as 4-byte words.

    Raises:
      ValueError: A row is not a whole number of words, or the rows are not contiguous.
    """
    if x.shape[1] * x.element_size() % 4 or not x.is_contiguous():
        raise ValueError(
            "rows of an all-gather must be contiguous and whole 4-byte words, got "
            f"{x.shape[1]} values of {x.element_size()} bytes"
        )
    return x.view(torch.int32)


def advance_sequence(mail: PeerArgs, calls: int) -> None:
    """Adds the all-gathers of a finished step to the sequence number, and copies the error word.

    Args:
      mail: Symmetric buffers of the rank.
      calls: Number of all-gathers of the step.
    """
    ranks = len(mail.place) - 2
    _tick_kernel[(1,)](
        mail.place, mail.clock, mail.error, calls, ranks, num_warps=1, launch_pdl=True
    )


@triton.jit(do_not_specialize=["calls"])
def _tick_kernel(peers_at, clock_at, error_at, calls, ranks: tl.constexpr):
    gdc_wait()
    rank = tl.load(peers_at + ranks).to(tl.int32)
    own = tl.load(peers_at + rank).to(tl.pointer_type(tl.int32))
    tl.store(error_at, tl.load(own, volatile=True))
    tl.store(clock_at, tl.load(clock_at) + calls)


@triton.jit
def number_of(clock_at, call):
    """Returns the sequence number of a call of this step; the first one is 1, and int32 wraps."""
    return tl.load(clock_at) + call + 1


@triton.jit
def send_words(value, place, is_one, peers_at, rank, number, sizes: tl.constexpr):
    """Stores words in the buffers of all other ranks (LL protocol).

    Args:
      value: This rank's words.
      place: Index of each word among the words of a rank in this call.
      is_one: Mask of the valid words.
      peers_at: Pointer to `PeerArgs.place`.
      rank: This rank. Its early load brings all of `PeerArgs.place` into the cache.
      number: Sequence number of the call.
      sizes: Sizes of the kernel, with a `PeerLayout` as `box`.

    Returns:
      The words, as a dependency of what follows the stores.
    """
    ranks: tl.constexpr = sizes.box.ranks
    place = place * 8 + _first_word(rank, number, sizes)
    sent = value
    for distance in tl.static_range(1, ranks):
        sent = tl.inline_asm_elementwise(
            _SEND,
            _SEND_KINDS,
            [sent, tl.load(peers_at + (rank ^ distance)), place, number, is_one.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return sent


@triton.jit
def receive_words(
    out_at,
    step,
    sent,
    place,
    is_one,
    peers_at,
    rank,
    number,
    call,
    pack: tl.constexpr,
    sizes: tl.constexpr,
):
    """Polls the words of all other ranks and stores them.

    Args:
      out_at: Pointers to the words of rank 0.
      step: Words between the results of consecutive ranks.
      sent: Result of `send_words`.
      place, is_one, peers_at, rank, number, sizes: Same as for `send_words`.
      call: Index of the all-gather in the step, for the error word.
      pack: Words that a thread polls at once; its number of words is a multiple.
    """
    ranks: tl.constexpr = sizes.box.ranks
    own = tl.load(peers_at + rank)
    max_polls = tl.where(is_one, max_polls_of(peers_at, own, ranks), 0)
    for distance in tl.static_range(1, ranks):
        peer = rank ^ distance
        at = place * 8 + _first_word(peer, number, sizes)
        got = _received(own, at, number, max_polls, call * 16 + peer + 1, sent, pack)
        tl.store(out_at + peer * step, got, mask=is_one)


@triton.jit
def rank_of(peers_at, sizes: tl.constexpr):
    """Loads the rank of this process."""
    return tl.load(peers_at + sizes.box.ranks).to(tl.int32)


@triton.jit
def words_of(tile):
    """Converts a tile to 4-byte words: [rows, columns], or [rows, columns / 2] of 16-bit values."""
    if tile.dtype.primitive_bitwidth == 32:
        words = tile.to(tl.int32, bitcast=True)
    else:
        bits = tile.to(tl.int16, bitcast=True)
        pairs = tl.reshape(bits, (tile.shape[0], tile.shape[1] // 2, 2))
        low, high = tl.split(pairs)
        words = (low.to(tl.int32) & 65535) | (high.to(tl.int32) << 16)
    return words


@triton.jit
def _first_word(rank, number, sizes: tl.constexpr):
    """Returns the byte offset of the words of a rank in a symmetric buffer."""
    box_words: tl.constexpr = sizes.box.words * 8
    return sizes.box.words_at + ((number & 1) * sizes.box.ranks + rank) * box_words


@triton.jit
def _received(box, place, number, max_polls, code, sent, pack: tl.constexpr):
    if pack == 4:
        got = tl.inline_asm_elementwise(
            _RECEIVE_4,
            _RECEIVE_KINDS_4,
            [box, place, number, max_polls, code, sent],
            dtype=tl.int32,
            is_pure=False,
            pack=4,
        )
    elif pack == 2:
        got = tl.inline_asm_elementwise(
            _RECEIVE_2,
            _RECEIVE_KINDS_2,
            [box, place, number, max_polls, code, sent],
            dtype=tl.int32,
            is_pure=False,
            pack=2,
        )
    else:
        got = tl.inline_asm_elementwise(
            _RECEIVE_1,
            _RECEIVE_KINDS_1,
            [box, place, number, max_polls, code, sent],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return got


@triton.jit(do_not_specialize=["call"])
def _words_kernel(
    values_at, out_at, sums_at, sums_out_at, peers_at, clock_at, call, sizes: tl.constexpr
):
    rank = rank_of(peers_at, sizes)
    gdc_wait()
    number = number_of(clock_at, call)
    block = tl.program_id(0)
    first: tl.constexpr = sizes.rows * sizes.share
    if block < sizes.programs:
        _gather_words(values_at, out_at, block, 0, peers_at, rank, number, call, sizes.share, sizes)
    elif sizes.second_programs > 0:
        _gather_words(
            sums_at,
            sums_out_at,
            block - sizes.programs,
            first,
            peers_at,
            rank,
            number,
            call,
            sizes.second_share,
            sizes,
        )


@triton.jit
def _gather_words(
    own_at,
    out_at,
    block,
    first: tl.constexpr,
    peers_at,
    rank,
    number,
    call,
    share: tl.constexpr,
    sizes: tl.constexpr,
):
    place = block * sizes.at_once + tl.arange(0, sizes.at_once)
    is_one = place < sizes.rows * share
    value = tl.load(own_at + place, mask=is_one, other=0)
    sent = send_words(value, first + place, is_one, peers_at, rank, number, sizes)
    gdc_launch_dependents()
    at = out_at + (place // share) * (sizes.box.ranks * share) + place % share
    tl.store(at + rank * share, value, mask=is_one)
    pack: tl.constexpr = 4 if sizes.at_once >= 512 else 1
    receive_words(at, share, sent, first + place, is_one, peers_at, rank, number, call, pack, sizes)


@triton.jit(do_not_specialize=["call"])
def _blocks_kernel(
    values_at, out_at, sums_at, sums_out_at, peers_at, clock_at, call, sizes: tl.constexpr
):
    gdc_wait()
    gdc_launch_dependents()
    number = number_of(clock_at, call)
    block = tl.program_id(0)
    # Whole units of eight bytes, so that the second array is aligned like the first.
    first: tl.constexpr = (sizes.rows * sizes.share * sizes.unit + 7) // 8 * 8
    if block < sizes.programs:
        _gather_blocks(
            values_at,
            out_at,
            block,
            0,
            0,
            peers_at,
            number,
            call,
            sizes.share,
            sizes.programs,
            sizes,
        )
    elif sizes.second_programs > 0:
        _gather_blocks(
            sums_at,
            sums_out_at,
            block - sizes.programs,
            sizes.programs,
            first,
            peers_at,
            number,
            call,
            sizes.second_share,
            sizes.second_programs,
            sizes,
        )


@triton.jit
def _gather_blocks(
    own_at, out_at, block, first_flag: tl.constexpr, first: tl.constexpr, peers_at, number, call,
    share: tl.constexpr, programs: tl.constexpr, sizes: tl.constexpr,
):  # fmt: skip
    """All-gathers a program's blocks of an array with the flag protocol."""
    ranks: tl.constexpr = sizes.box.ranks
    block_bytes: tl.constexpr = sizes.box.block_bytes
    total: tl.constexpr = sizes.rows * share
    steps: tl.constexpr = (total + programs * sizes.at_once - 1) // (programs * sizes.at_once)
    rank = tl.load(peers_at + ranks).to(tl.int32)
    max_polls = max_polls_of(peers_at, tl.load(peers_at + rank), ranks)
    base = sizes.box.blocks_at + (number & 1).to(tl.int64) * (ranks * block_bytes) + first
    lanes = tl.arange(0, sizes.at_once)
    for step in range(steps):
        place = (step * programs + block) * sizes.at_once + lanes
        is_one = place < total
        value = tl.load(own_at + place, mask=is_one, other=0)
        for distance in tl.static_range(1, ranks):
            box = tl.load(peers_at + (rank ^ distance)) + base + rank * block_bytes
            tl.store(box.to(tl.pointer_type(own_at.dtype.element_ty)) + place, value, mask=is_one)
        at = out_at + (place // share) * (ranks * share) + rank * share + place % share
        tl.store(at, value, mask=is_one)
    flag = sizes.box.flags_at + (first_flag + block) * (ranks * 4)
    sent = set_flags(flag, peers_at, rank, number, ranks)
    box = tl.load(peers_at + rank)
    for distance in tl.static_range(1, ranks):
        peer = rank ^ distance
        has_arrived = wait_flag(peer, flag, box, number, max_polls, call, sent)
        received_at = (box + base + peer * block_bytes).to(tl.pointer_type(own_at.dtype.element_ty))
        for step in range(steps):
            place = (step * programs + block) * sizes.at_once + lanes
            is_one = place < total
            got = tl.load(received_at + place, mask=is_one & has_arrived, other=-1, volatile=True)
            at = out_at + (place // share) * (ranks * share) + peer * share + place % share
            tl.store(at, got, mask=is_one)
