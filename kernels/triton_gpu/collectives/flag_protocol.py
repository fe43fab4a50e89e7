"""Signal flags and sequence numbers of the block all-gather (Triton)."""

import triton
import triton.language as tl

from kernels.peer_buffers import constraints, set_flag_ptx, wait_flag_ptx

_ADDRESS = 1
"""Registers of an address."""
_RAISE = tl.constexpr(set_flag_ptx(_ADDRESS))
_RAISE_KINDS = tl.constexpr(constraints(1, "r", "l", "r", "r", "r"))
_LOOK = tl.constexpr(wait_flag_ptx(_ADDRESS))
_LOOK_KINDS = tl.constexpr(constraints(1, "l", "r", "r", "r", "r", "r"))
BLOCK_WARPS = 8
BLOCK_UNITS = 2048
"""Units that a program stores at once, eight bytes or four."""
MOST_BLOCKS = 64
"""Most programs that store the blocks of an array."""


@triton.jit
def looks_of(mail_at, own, ranks: tl.constexpr):
    """How often to look for what does not come; where something did not, a step ends soon."""
    missing = tl.load(own.to(tl.pointer_type(tl.int32)), volatile=True)
    return tl.where(missing == 0, tl.load(mail_at + (ranks + 1)).to(tl.int32), 1)


@triton.jit
def raise_flags(flag, mail_at, rank, number, ranks: tl.constexpr):
    """Raises a program's flag at all other ranks, after all that it has stored."""
    is_first = (tl.arange(0, 256) == 0).to(tl.int32)
    tl.debug_barrier()
    for distance in tl.static_range(1, ranks):
        box = tl.load(mail_at + (rank ^ distance))
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
def has_come(peer, flag, box, number, looks, call, sent):
    """Returns whether a rank has raised its flag in time."""
    # Each thread looks, so that what it reads then is what had been stored.
    come = tl.inline_asm_elementwise(
        _LOOK,
        _LOOK_KINDS,
        [box, flag + peer * 4, number, looks + sent * 0, call * 16 + peer + 1, sent],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    return tl.min(come, 0) > 0
