"""Peer buffers, signal flags and sequence numbers of the all-gather (Triton)."""

from typing import NamedTuple

import triton
import triton.language as tl
from jaxtyping import Int32, Int64
from torch import Tensor

from kernels.peer_buffers import WORDS, BufferLayout, constraints, set_flag_ptx, wait_flag_ptx

_ADDRESS = 1
"""Registers of an address."""
_RAISE = tl.constexpr(set_flag_ptx(_ADDRESS))
_RAISE_KINDS = tl.constexpr(constraints(1, "r", "l", "r", "r", "r"))
_LOOK = tl.constexpr(wait_flag_ptx(_ADDRESS))
_LOOK_KINDS = tl.constexpr(constraints(1, "l", "r", "r", "r", "r", "r"))
BLOCK_WARPS = 8
BLOCK_UNITS = 2048
"""Units of 8 or 4 bytes that a program stores at once."""
MOST_BLOCKS = 64
"""Maximum number of programs that store the blocks of an array."""


class PeerArgs(NamedTuple):
    """Symmetric buffers for a rank's kernels.

    Attributes:
      place: Addresses of the buffers by rank, then this rank, and the maximum number of polls for
        missing data. With 0 polls nothing waits, for launches before all ranks have started.
      clock: Sequence number of the last call of the previous steps, see `advance_sequence`.
      error: Error word, as read by `advance_sequence`; see `kernels.peer_buffers.PeerTimeout`.
    """

    place: Int64[Tensor, " ranks_and_2"]
    clock: Int32[Tensor, "1"]
    error: Int32[Tensor, "1"]


class PeerLayout(NamedTuple):
    """Compile-time layout of the symmetric buffers.

    Attributes:
      ranks: Number of ranks.
      words: Maximum number of words of a rank in a call.
      words_at, flags_at, blocks_at: Byte offsets in a buffer.
      block_bytes: Maximum bytes of a rank in a call.
    """

    ranks: int
    words: int
    words_at: int
    flags_at: int
    blocks_at: int
    block_bytes: int

    @classmethod
    def of(cls, boxes: BufferLayout) -> "PeerLayout":
        """Returns the layout as compile-time constants."""
        return cls(
            ranks=boxes.ranks,
            words=WORDS,
            words_at=boxes.words_at,
            flags_at=boxes.flags_at,
            blocks_at=boxes.blocks_at,
            block_bytes=boxes.block_bytes,
        )


@triton.jit
def max_polls_of(peers_at, own, ranks: tl.constexpr):
    """Loads the maximum polls for missing data; 1 after an error, so that the step ends soon."""
    missing = tl.load(own.to(tl.pointer_type(tl.int32)), volatile=True)
    return tl.where(missing == 0, tl.load(peers_at + (ranks + 1)).to(tl.int32), 1)


@triton.jit
def set_flags(flag, peers_at, rank, number, ranks: tl.constexpr):
    """Sets a program's flag on all other ranks, after all stores of the program.

    Args:
      flag: Byte offset of the program's flags.
      peers_at: Pointer to `PeerArgs.place`.
      rank: This rank.
      number: Sequence number of the call.
      ranks: Number of ranks.

    Returns:
      A dependency on the flags.
    """
    is_first = (tl.arange(0, 256) == 0).to(tl.int32)
    tl.debug_barrier()
    for distance in tl.static_range(1, ranks):
        box = tl.load(peers_at + (rank ^ distance))
        tl.inline_asm_elementwise(
            _RAISE,
            _RAISE_KINDS,
            [is_first, box, flag + rank * 4, number, is_first],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    return is_first


@triton.jit
def wait_flag(peer, flag, box, number, max_polls, call, sent):
    """Returns whether a rank has set its flag in time."""
    # Every thread polls the flag, so that its later loads return the stored data.
    come = tl.inline_asm_elementwise(
        _LOOK,
        _LOOK_KINDS,
        [box, flag + peer * 4, number, max_polls + sent * 0, call * 16 + peer + 1, sent],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return tl.min(come, 0) > 0
