"""Memory that ranks on one host share, through which each gives the others what it has computed.

A mailbox is a rank's: it alone writes there, all others read. It holds two exchanges, the even and
the odd ones, so that a rank may already write the next exchange while others still read the last.
Nothing is overwritten while it is read: a rank that writes exchange n + 2 has seen all others send
n + 1, which they do after they have read n.

The words that count exchanges are written after the bytes they stand for, and read before them; a
fence holds every processor to that order.
"""

import mmap
import os
import time
from collections.abc import Iterator

import numpy as np
from jaxtyping import UInt8

from shared.boundary.fence import fence

WAIT_S = 30.0
BOX_BYTES = 1 << 20
"""Of an exchange; what is larger goes in several."""

_PAGE = 4096
_LOOKS = 50
"""Looks at a peer's word before the processor is given away between them."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
"""Between looks from then on: each twice as long as the one before, so that who waits costs others
little where ranks are more than processors."""


def mailbox_bytes(count: int, box_bytes: int = BOX_BYTES) -> int:
    """Bytes of the mailboxes of so many ranks together."""
    return count * (_PAGE + 2 * box_bytes)


def path_in(descriptor: int) -> str:
    """Where other processes of this user and host find what a descriptor of this process is of."""
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class RankMissingError(RuntimeError):
    """A rank did not come to an exchange, or came with something else."""


class Mailboxes:
    """The mailboxes of all ranks of a host; what is unpickled elsewhere maps the same memory.

    Attributes:
      count: Of ranks.
      wait_s: How long an exchange waits for a peer, in seconds; 0 once one did not come.
    """

    def __init__(self, path: str, count: int, box_bytes: int, wait_s: float) -> None:
        """Maps what `create` has made."""
        self._descriptor: int | None = None
        self.count, self.wait_s = count, wait_s
        self._path, self._box_bytes = path, box_bytes
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        whole = np.frombuffer(self._memory, np.uint8)
        words, boxes = whole[: count * _PAGE], whole[count * _PAGE :]
        # Of each rank how many exchanges it has sent, and the bytes of the last of either parity.
        self._words = words.view(np.int64).reshape(count, -1)
        self._boxes = boxes.reshape(count, 2, box_bytes)

    @classmethod
    def create(cls, count: int, box_bytes: int = BOX_BYTES, wait_s: float = WAIT_S) -> "Mailboxes":
        """Mailboxes in new memory; who makes them calls `remove` in the end.

        Args:
          count: Of ranks.
          box_bytes: Most bytes of one exchange; larger values take several.
          wait_s: How long an exchange waits for a peer, in seconds.
        """
        # It has no name in a folder, so nothing is left of it however its processes end; others of
        # the same user find it by this process and its descriptor.
        descriptor = os.memfd_create("tandem_ranks")
        os.ftruncate(descriptor, mailbox_bytes(count, box_bytes))
        made = cls(path_in(descriptor), count, box_bytes, wait_s)
        made._descriptor = descriptor
        return made

    def __reduce__(self) -> tuple[type, tuple[str, int, int, float]]:
        return Mailboxes, (self._path, self.count, self._box_bytes, self.wait_s)

    def remove(self) -> None:
        """Lets no other process find the memory; who has mapped it keeps it."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def exchange(
        self, rank: int, values: UInt8[np.ndarray, " bytes"]
    ) -> UInt8[np.ndarray, "N bytes"]:
        """What all ranks give, in order, to each of which this returns the same.

        Args:
          rank: Who calls; all ranks call equally often, with equally many bytes.
          values: What this rank gives.

        Raises:
          RankMissingError: A rank did not come within `wait_s`, or with another number of bytes.
        """
        given = np.empty((self.count, len(values)), np.uint8)
        for part in self._parts(len(values)):
            self._exchange(rank, values[part], given[:, part])
        return given

    def _parts(self, num_bytes: int) -> Iterator[slice]:
        for first in range(0, num_bytes, self._box_bytes):
            yield slice(first, min(first + self._box_bytes, num_bytes))

    def _exchange(
        self, rank: int, values: UInt8[np.ndarray, " bytes"], given: UInt8[np.ndarray, "N bytes"]
    ) -> None:
        call = int(self._words[rank, 0]) + 1
        parity = call % 2
        self._boxes[rank, parity, : len(values)] = values
        self._words[rank, 1 + parity] = len(values)
        fence()
        self._words[rank, 0] = call
        for peer in range(self.count):
            if peer != rank:
                self._await(rank, peer, call)
                fence()
                self._check_size(rank, peer, call, len(values))
            given[peer] = self._boxes[peer, parity, : len(values)]

    def _await(self, rank: int, peer: int, call: int) -> None:
        for _ in range(_LOOKS):
            if self._words[peer, 0] >= call:
                return
        wait_s = self.wait_s
        pause_s, until = _FIRST_PAUSE_S, time.monotonic() + wait_s
        while self._words[peer, 0] < call:
            if time.monotonic() > until:
                self.wait_s = 0.0  # who was missing does not come later
                raise RankMissingError(
                    f"rank {peer} of {self.count} did not come to exchange {call} within "
                    f"{wait_s:g} s; rank {rank} waited for it"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _check_size(self, rank: int, peer: int, call: int, num_bytes: int) -> None:
        sent = int(self._words[peer, 1 + call % 2])
        if sent != num_bytes:
            raise RankMissingError(
                f"rank {peer} of {self.count} came to exchange {call} with {sent} bytes, rank "
                f"{rank} with {num_bytes}: they do not run the same step"
            )
