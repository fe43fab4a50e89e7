"""Signal flags and sequence numbers of the block all-gather (Pallas, Triton backend).

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
"""Most programs that store the blocks of an array."""


class PeerView(NamedTuple):
    """What a kernel has read of the mailboxes: early, as nothing that is sent may wait for it.

    Attributes:
      rank, looks: See `Gather.place`; where something was missing, a step ends soon.
      number: Of the call among all calls of all steps: it begins with 1, and wraps.
      own, others: The address of this rank's mailbox, and of those of the others: at place i that
        of the rank whose number differs from this one's in the bits of i + 1.
      boxes: Their sizes.
      programs: Of the kernel.
    """

    rank: Any
    looks: Any
    number: Any
    own: Any
    others: Any
    boxes: BufferLayout
    programs: int

    @classmethod
    def read(cls, place: Any, boxes: BufferLayout, programs: int) -> "PeerView":
        """Of `Gather.place`, as a reference."""
        rank, looks = place[2 * boxes.ranks], place[2 * boxes.ranks + 1]
        every = [(place[2 * (rank ^ i)], place[2 * (rank ^ i) + 1]) for i in range(boxes.ranks)]
        error, number = (_only(taken(*every[0], at)) for at in (0, SEQUENCE_OFFSET))
        looks = jnp.where(error == 0, looks, jnp.minimum(looks, 1))
        return cls(rank, looks, number + 1, every[0], every[1:], boxes, programs)

    def counted(self) -> "PeerView":
        """The same, once this program is among those that have read the clock.

        Each program does it once, when it has sent: nothing else may wait for it. Who waits for
        words does so with what this gives, or a compiler would leave it out.
        """
        one = jnp.full((1,), self.number)
        counted = instruct(_COUNT, 1, one, *self.own, SEQUENCE_OFFSET, self.programs)
        return self._replace(number=_only(counted))

    def missing(self, rank: Any) -> Any:
        """The error word of a rank that does not come."""
        return (self.number & ((1 << 27) - 1)) * 16 + rank + 1

    def first_word(self, rank: Any) -> Any:
        """Returns the byte offset of the words of a rank in a mailbox."""
        parity = (self.number & 1) * self.boxes.ranks
        return self.boxes.words_at + (parity + rank) * (WORDS * 8)


def put_words(bits: Any, base: Any, place: Any, is_one: Any, link: PeerView) -> Any:
    """Stores words of a block in the mailboxes of all other ranks, and gives them back."""
    for box in link.others:
        on = jnp.where(is_one, 1, 0)
        bits = instruct(_PUT, 1, bits, *box, base + place * 4, link.number, on)
    return bits


def take_words(base: Any, place: Any, is_one: Any, link: PeerView) -> Any:
    """Words of a block that has come."""
    return instruct(_TAKE, 1, *link.own, base + place * 4, is_one)


def raise_flags(flag: Any, kept: Any, link: PeerView) -> Any:
    """Raises a program's flag at all other ranks, after all that it has stored.

    Args:
      kept: A number of what it has stored.

    Returns:
      What comes after it.
    """
    thread = lax.iota(jnp.int32, 32 * BLOCK_WARPS)
    # A number of all threads that what they have stored comes before.
    after = thread * 0 + jnp.max(kept & 1)
    for box in link.others:
        on = jnp.where(thread == 0, 1, 0)
        after = instruct(_RAISE, 1, after, *box, flag + link.rank * 4, link.number, on)
    return after


def has_come(peer: Any, flag: Any, after: Any, link: PeerView) -> Any:
    """1 where a rank has raised its flag in time, else 0."""
    code, at = link.missing(peer), flag + peer * 4
    return jnp.min(instruct(_LOOK, 1, *link.own, at, link.number, link.looks, code, after))


def instruct(text, pack, *operands):
    """Assembly for each word; an operand may be one number for all."""
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


def taken(low, high, place):
    """A word of the head of a mailbox, as an array of one."""
    return instruct(_TAKE, 1, low, high, place, jnp.ones((1,), jnp.int32))


def _only(one):
    """The number of an array of one."""
    return jnp.max(one)
