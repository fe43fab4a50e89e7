"""Low-latency (LL) all-gather of ranks over symmetric memory (Pallas, Triton backend).

Inline assembly counts as free of side effects, so an operand carries each ordering dependency.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton
from jaxtyping import Int32, Shaped

from kernels.pallas_gpu.collectives.flag_protocol import (
    BLOCK_UNITS,
    BLOCK_WARPS,
    MOST_BLOCKS,
    PeerView,
    apply_asm,
    load_block_words,
    load_head_word,
    set_flags,
    store_block_words,
    wait_flag,
)
from kernels.peer_buffers import (
    LARGEST_WORDS_BYTES,
    WORDS,
    BufferLayout,
    receive_text,
    send_text,
)

_ADDRESS = 2
"""Registers of an address."""
_SEND = send_text(_ADDRESS)
_WORD_WARPS = 4


class AllGatherArgs(NamedTuple):
    """Symmetric buffers for the all-gathers of a step.

    Attributes:
      place: Addresses of the buffers by rank, each a low and a high word, then this rank, and the
        maximum number of polls for missing data. With 0 polls nothing waits, for launches before
        all ranks have started.
      boxes: Layout of the buffers.
    """

    place: Int32[jax.Array, " two_of_ranks_and_2"]
    boxes: BufferLayout


class GatherTile(NamedTuple):
    """Block of a rank's shard of an array, for a fused all-gather.

    Attributes:
      values: `[rows, columns]` of the block.
      column, columns: First column of the block in the shard, and columns of the shard.
      first: First word of the shard among the words of a rank.
      every: Reference to the array of all ranks.
    """

    values: Any
    column: Any
    columns: int
    first: int
    every: Any


class Array(NamedTuple):
    """Array of a call.

    Attributes:
      rows, share: Number of rows, and 4-byte words of a row's shard.
      programs: Number of programs that share the array.
      first: First word of the array among the words of a rank.
      first_flag: Flag index of the array's first program.
    """

    rows: int
    share: int
    programs: int
    first: int
    first_flag: int


def all_gather(
    values: Shaped[jax.Array, "R share"],
    sums: Shaped[jax.Array, "R chunks"] | None,
    gather: AllGatherArgs,
    *,
    largest_words_bytes: int = LARGEST_WORDS_BYTES,
    after: jax.Array | None = None,
) -> tuple[Shaped[jax.Array, "R outputs"], Shaped[jax.Array, "R chunks_of_all"] | None]:
    """Concatenates the columns of all ranks in rank order; every rank gets the same bits.

    Args:
      values: This rank's columns.
      sums: This rank's columns of a second array, such as the sums of squares per chunk.
      gather: Symmetric buffers of the step.
      largest_words_bytes: Maximum bytes of `values` for the LL protocol.
      after: Ordering dependency of calls with equal arguments, which XLA would merge.

    Returns:
      The columns of all ranks, and those of the second array, if there is one.

    Raises:
      ValueError: A row of an array is not a whole number of 4-byte words, or the arrays exceed the
        capacity of a symmetric buffer.
    """
    arrays = [values] if sums is None else [values, sums]
    counts = [x.shape[0] * words_in_row(x) for x in arrays]
    is_words = sum(counts) <= WORDS and 4 * counts[0] <= largest_words_bytes
    boxes = gather.boxes
    if not is_words and 4 * sum(counts) > boxes.block_bytes:
        raise ValueError(
            f"a rank may send {boxes.block_bytes} bytes in a call, got {4 * sum(counts)}"
        )
    at_once = 32 * _WORD_WARPS if sum(counts) <= 1 << 14 else 4 * 32 * _WORD_WARPS
    at_once = at_once if is_words else BLOCK_UNITS
    parts, first, first_flag = [], 0, 0
    for x, count in zip(arrays, counts, strict=True):
        programs = pl.cdiv(count, at_once)
        programs = programs if is_words else min(programs, MOST_BLOCKS)
        parts.append(Array(x.shape[0], words_in_row(x), programs, first, first_flag))
        first, first_flag = first + count, first_flag + programs
    outs = pl.pallas_call(
        functools.partial(
            _gather_kernel, parts=parts, boxes=boxes, is_words=is_words, at_once=at_once
        ),
        grid=(first_flag,),
        out_shape=tuple(
            jax.ShapeDtypeStruct((x.shape[0], boxes.ranks * x.shape[1]), x.dtype) for x in arrays
        ),
        compiler_params=pltriton.CompilerParams(
            num_warps=_WORD_WARPS if is_words else BLOCK_WARPS, num_stages=1
        ),
        name="all_gather",
    )(*arrays, gather.place, after)
    return outs[0], None if sums is None else outs[1]


def words_in_row(x: jax.Array) -> int:
    """Returns the number of 4-byte words in a row.

    Raises:
      ValueError: A row is not a whole number of words.
    """
    size = x.dtype.itemsize
    if x.shape[1] * size % 4 or size not in (2, 4):
        raise ValueError(
            "rows of an all-gather must be contiguous and whole 4-byte words, got "
            f"{x.shape[1]} values of {size} bytes"
        )
    return x.shape[1] * size // 4


def missed(gather: AllGatherArgs, after: Shaped[jax.Array, "..."]) -> Int32[jax.Array, "1"]:
    """Returns the error word of the first rank that has one; see `peer_buffers.PeerTimeout`.

    Args:
      gather: Symmetric buffers of the step.
      after: Ordering dependency on the all-gathers that are checked.
    """
    return pl.pallas_call(
        functools.partial(_missed_kernel, ranks=gather.boxes.ranks),
        out_shape=jax.ShapeDtypeStruct((1,), jnp.int32),
        compiler_params=pltriton.CompilerParams(num_warps=1),
        name="all_gather_timeout",
    )(gather.place, after)


def _missed_kernel(place_ref, _, out_ref, *, ranks):
    found = jnp.zeros((1,), jnp.int32)
    for rank in range(ranks):
        word = load_head_word(place_ref[2 * rank], place_ref[2 * rank + 1], 0)
        found = jnp.where(found == 0, word, found)
    out_ref[...] = found


def send_words(value: Any, place: Any, is_one: Any, peers: PeerView) -> Any:
    """Stores words in the buffers of all other ranks (LL protocol).

    Args:
      value: This rank's words.
      place: Index of each word among the words of a rank in this call.
      is_one: Mask of the valid words.
      peers: Symmetric buffers, as loaded by this program.

    Returns:
      The words, as a dependency of what follows the stores.
    """
    sent, at = value, place * 8 + peers.first_word(peers.rank)
    for box in peers.others:
        sent = apply_asm(_SEND, 1, sent, *box, at, peers.number, jnp.where(is_one, 1, 0))
    return sent


def receive_words(
    store: Any, sent: Any, place: Any, is_one: Any, peers: PeerView, pack: int
) -> None:
    """Polls the words of all other ranks and stores them.

    Args:
      store: Called with a rank and its words.
      sent: Result of `send_words`.
      place, is_one, peers: Same as for `send_words`.
      pack: Words that a thread polls at once; its number of words is a multiple.
    """
    wait = jnp.where(is_one, peers.max_polls, 0)
    for distance in range(1, peers.boxes.ranks):
        peer = peers.rank ^ distance
        code, at = peers.missing(peer), place * 8 + peers.first_word(peer)
        given = (*peers.own, at, peers.number, wait, code, sent)
        store(peer, apply_asm(receive_text(_ADDRESS, pack), pack, *given))


def all_gather_tiles(
    tiles: Sequence[GatherTile], row: Any, is_row: Any, peers: PeerView, threads: int
) -> None:
    """All-gathers tiles of some rows: sends all of them, then stores them and the received ones.

    Args:
      tiles: Tiles of this rank.
      row, is_row: Rows of the tiles, and a mask of the valid ones.
      peers: Symmetric buffers, as loaded by this program.
      threads: Number of threads of the program.
    """
    sent_tiles = []
    for tile in tiles:
        words = _words_of(tile.values)
        per_word = tile.values.shape[1] // words.shape[1]
        word = lax.div(tile.column, per_word) + lax.iota(jnp.int32, words.shape[1])
        in_row = tile.columns // per_word
        is_word = is_row[:, None] & (word < in_row)[None, :]
        place = tile.first + row[:, None] * in_row + word[None, :]
        sent = send_words(words, place, is_word, peers)

        def store(of, bits, every=tile.every, word=word, is_word=is_word, in_row=in_row):
            at_row = jnp.broadcast_to(row[:, None], bits.shape)
            at = jnp.broadcast_to(of * in_row + word[None, :], bits.shape)
            store_words(every, at_row, at, bits, is_word)

        sent_tiles.append((store, sent, place, is_word))
    peers = peers.counted()
    for store, sent, *at in sent_tiles:
        store(peers.rank, sent)
        receive_words(store, sent, *at, peers, max(1, min(4, sent.size // threads)))


def _words_of(tile):
    """Converts a tile to 4-byte words: [rows, columns], or [rows, columns / 2] of 16-bit values."""
    bits = _bits(tile)
    if tile.dtype.itemsize == 4:
        return bits
    rows, columns = tile.shape
    low, high = lax.split(bits.reshape(rows, columns // 2, 2), (1, 1), axis=2)
    return word_of(low.reshape(rows, columns // 2), high.reshape(rows, columns // 2))


def load_words(ref: Any, row: Any, word: Any, is_one: Any) -> Any:
    """Loads 4-byte words of some rows, from values of 32 or 16 bits."""
    if ref.dtype.itemsize == 4:
        other = 0 if ref.dtype == jnp.int32 else 0.0
        return _bits(pltriton.load(ref.at[row, word], mask=is_one, other=other))
    low, high = (
        _bits(pltriton.load(ref.at[row, 2 * word + i], mask=is_one, other=0.0)) for i in range(2)
    )
    return word_of(low, high)


def word_of(low: Any, high: Any) -> Any:
    """Packs the bits of two 16-bit values, given as integers, into a 4-byte word."""
    return (low & 65535) | lax.shift_left(high, 16)


def store_words(ref: Any, row: Any, word: Any, bits: Any, is_one: Any) -> None:
    """Stores words of `load_words`."""
    if ref.dtype.itemsize == 4:
        value = bits if ref.dtype == jnp.int32 else lax.bitcast_convert_type(bits, ref.dtype)
        pltriton.store(ref.at[row, word], value, mask=is_one)
        return
    for i, half in enumerate((bits, lax.shift_right_logical(bits, 16))):
        value = lax.bitcast_convert_type(half.astype(jnp.int16), ref.dtype)
        pltriton.store(ref.at[row, 2 * word + i], value, mask=is_one)


def _bits(x):
    """Returns the bits as int32. Values are never widened as floats, which would change NaNs."""
    if x.dtype == jnp.int32:
        return x
    return lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}").astype(jnp.int32)


def _gather_kernel(*refs, parts, boxes, is_words, at_once):
    count = len(parts)
    own_refs, (place_ref, _), outs = refs[:count], refs[count : count + 2], refs[count + 2 :]
    peers = PeerView.read(place_ref, boxes, sum(part.programs for part in parts))
    share = _gather_words if is_words else _gather_blocks
    for part, own_ref, out_ref in zip(parts, own_refs, outs, strict=True):
        block = pl.program_id(0) - part.first_flag

        def run(own_ref=own_ref, out_ref=out_ref, block=block, part=part):
            share(own_ref, out_ref, block, peers, part, at_once)

        if count == 1:
            run()
        else:
            pl.when((block >= 0) & (block < part.programs))(run)


def _gather_words(own_ref, out_ref, block, peers, part, at_once):
    place = block * at_once + lax.iota(jnp.int32, at_once)
    is_one = place < part.rows * part.share
    row, word = lax.div(place, part.share), lax.rem(place, part.share)
    sent = send_words(load_words(own_ref, row, word, is_one), part.first + place, is_one, peers)

    def store(rank, bits):
        store_words(out_ref, row, rank * part.share + word, bits, is_one)

    store(peers.rank, sent)
    peers = peers.counted()
    pack = 4 if at_once >= 4 * 32 * _WORD_WARPS else 1
    receive_words(store, sent, part.first + place, is_one, peers, pack)


def _gather_blocks(own_ref, out_ref, block, peers, part, at_once):
    """All-gathers a program's blocks of an array with the flag protocol."""
    boxes, rank, number = peers.boxes, peers.rank, peers.number
    ranks = boxes.ranks
    base = boxes.blocks_at + (number & 1) * (ranks * boxes.block_bytes) + part.first * 4
    steps = pl.cdiv(part.rows * part.share, part.programs * at_once)

    def indices(step):
        place = (step * part.programs + block) * at_once + lax.iota(jnp.int32, at_once)
        row, word = lax.div(place, part.share), lax.rem(place, part.share)
        return place, row, word, place < part.rows * part.share

    def send_step(step, stored):
        place, row, word, is_one = indices(step)
        bits = load_words(own_ref, row, word, is_one)
        bits = store_block_words(bits, base + rank * boxes.block_bytes, place, is_one, peers)
        store_words(out_ref, row, rank * part.share + word, bits, is_one)
        return stored | bits

    stored = lax.fori_loop(0, steps, send_step, jnp.zeros((at_once,), jnp.int32))
    flag = boxes.flags_at + (part.first_flag + block) * (ranks * 4)
    after = set_flags(flag, stored, peers)
    peers = peers.counted()
    for distance in range(1, ranks):
        peer = rank ^ distance
        has_arrived = wait_flag(peer, flag, after, peers)

        def receive_step(step, _, peer=peer, has_arrived=has_arrived):
            place, row, word, is_one = indices(step)
            at = base + peer * boxes.block_bytes
            bits = load_block_words(at, place, jnp.where(is_one, has_arrived, 0), peers)
            store_words(out_ref, row, peer * part.share + word, bits, is_one)
            return 0

        lax.fori_loop(0, steps, receive_step, 0)
