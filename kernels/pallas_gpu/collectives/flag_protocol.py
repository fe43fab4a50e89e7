"""Peer buffers, signal flags and sequence numbers of the all-gather (Pallas, Triton backend).

Inline assembly counts as free of side effects, so an operand carries each ordering dependency.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as pltriton

from kernels.peer_buffers import (
    SEQUENCE_OFFSET,
    WORDS,
    BufferLayout,
    constraints,
    count_text,
    load_block_ptx,
    set_flag_ptx,
    store_block_ptx,
    wait_flag_ptx,
)

_ADDRESS = 2
"""Registers of an address."""
_PUT, _RAISE = store_block_ptx(_ADDRESS), set_flag_ptx(_ADDRESS)
_LOOK, _TAKE, _COUNT = wait_flag_ptx(_ADDRESS), load_block_ptx(_ADDRESS), count_text(_ADDRESS)
BLOCK_WARPS = 8
BLOCK_UNITS = 2048
"""Words that a program stores at once."""
MOST_BLOCKS = 64
"""Maximum number of programs that store the blocks of an array."""


class PeerView(NamedTuple):
    """Symmetric buffers, as loaded at the start of a program so that no store waits for it.

    Attributes:
      rank: This rank.
      max_polls: Polls for missing data; at most 1 after an error, so that the step ends soon.
      number: Sequence number of the call, over all steps; the first one is 1, and int32 wraps.
      own: Address of this rank's buffer.
      others: Addresses of the other ranks' buffers; entry i is of the rank `rank ^ (i + 1)`.
      boxes: Layout of the buffers.
      programs: Number of programs of the kernel.
    """

    rank: Any
    max_polls: Any
    number: Any
    own: Any
    others: Any
    boxes: BufferLayout
    programs: int

    @classmethod
    def read(cls, place: Any, boxes: BufferLayout, programs: int) -> "PeerView":
        """Loads the fields from a reference to `AllGatherArgs.place`."""
        rank, max_polls = place[2 * boxes.ranks], place[2 * boxes.ranks + 1]
        every = [(place[2 * (rank ^ i)], place[2 * (rank ^ i) + 1]) for i in range(boxes.ranks)]
        error, number = (_only(load_head_word(*every[0], at)) for at in (0, SEQUENCE_OFFSET))
        max_polls = jnp.where(error == 0, max_polls, jnp.minimum(max_polls, 1))
        return cls(rank, max_polls, number + 1, every[0], every[1:], boxes, programs)

    def counted(self) -> "PeerView":
        """Counts this program among those that have loaded the sequence number.

        Each program does so once, after it has sent, so that the count delays no store. Code that
        waits for data must use the result, otherwise a compiler removes the count.

        Returns:
          The same view, as a dependency.
        """
        one = jnp.full((1,), self.number)
        counted = apply_asm(_COUNT, 1, one, *self.own, SEQUENCE_OFFSET, self.programs)
        return self._replace(number=_only(counted))

    def missing(self, rank: Any) -> Any:
        """Returns the error word for missing data of a rank."""
        return (self.number & ((1 << 27) - 1)) * 16 + rank + 1

    def first_word(self, rank: Any) -> Any:
        """Returns the byte offset of the words of a rank in a symmetric buffer."""
        parity = (self.number & 1) * self.boxes.ranks
        return self.boxes.words_at + (parity + rank) * (WORDS * 8)


def store_block_words(bits: Any, base: Any, place: Any, is_one: Any, peers: PeerView) -> Any:
    """Stores words of a block in the buffers of all other ranks; returns them as a dependency."""
    for box in peers.others:
        on = jnp.where(is_one, 1, 0)
        bits = apply_asm(_PUT, 1, bits, *box, base + place * 4, peers.number, on)
    return bits


def load_block_words(base: Any, place: Any, is_one: Any, peers: PeerView) -> Any:
    """Loads words of a block whose flag is set."""
    return apply_asm(_TAKE, 1, *peers.own, base + place * 4, is_one)


def set_flags(flag: Any, kept: Any, peers: PeerView) -> Any:
    """Sets a program's flag on all other ranks, after all stores of the program.

    Args:
      flag: Byte offset of the program's flags.
      kept: A value that depends on the program's stores.
      peers: Symmetric buffers, as loaded by this program.

    Returns:
      A dependency on the flags.
    """
    thread = lax.iota(jnp.int32, 32 * BLOCK_WARPS)
    # A value that depends on the stores of all threads.
    after = thread * 0 + jnp.max(kept & 1)
    for box in peers.others:
        on = jnp.where(thread == 0, 1, 0)
        after = apply_asm(_RAISE, 1, after, *box, flag + peers.rank * 4, peers.number, on)
    return after


def wait_flag(peer: Any, flag: Any, after: Any, peers: PeerView) -> Any:
    """Returns 1 if a rank has set its flag in time, else 0."""
    code, at = peers.missing(peer), flag + peer * 4
    return jnp.min(apply_asm(_LOOK, 1, *peers.own, at, peers.number, peers.max_polls, code, after))


def apply_asm(text, pack, *operands):
    """Applies inline assembly to each word; scalar operands are broadcast."""
    shape = jnp.broadcast_shapes(*(jnp.shape(x) for x in operands))
    given = [jnp.broadcast_to(x, shape).astype(jnp.int32) for x in operands]
    (found,) = pltriton.elementwise_inline_asm(
        text,
        args=given,
        constraints=constraints(pack, *(["r"] * (pack * len(given)))),
        pack=pack,
        result_shape_dtypes=[jax.ShapeDtypeStruct(shape, jnp.int32)],
    )
    return found


def load_head_word(low, high, place):
    """Loads a word from the head of a symmetric buffer, as an array of one element."""
    return apply_asm(_TAKE, 1, low, high, place, jnp.ones((1,), jnp.int32))


def _only(one):
    """Returns the element of an array of one element as a scalar."""
    return jnp.max(one)
