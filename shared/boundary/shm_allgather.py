"""All-gather through shared memory for tensor-parallel ranks on one CPU host.

Each rank owns a shared-memory region, which only it writes and all others read. It has two buffers,
for even and odd exchanges, so that a rank can write the next exchange while others still read the
last one. No buffer is overwritten while it is read: before a rank writes exchange n + 2 it has seen
all others send exchange n + 1, which they do after they have read exchange n.

A rank writes its exchange counter after the bytes, and others read the counter before the bytes. A
fence keeps both orders on every processor.
"""

import mmap
import os
import time
from collections.abc import Iterator

import numpy as np
from jaxtyping import UInt8

from shared.boundary.memory_fence import fence

WAIT_S = 30.0
BOX_BYTES = 1 << 20
"""Bytes of one exchange; larger values are sent in several."""

_PAGE = 4096
_LOOKS = 50
"""Polls of a peer's counter before the rank starts to sleep between polls."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 20e-6, 1e-3
"""Sleep between polls: doubles from the first to the longest pause, so that a waiting rank takes
little time from others when there are more ranks than processors."""


def shm_buffer_bytes(count: int, box_bytes: int = BOX_BYTES) -> int:
    """Returns the bytes of the shared memory of `count` ranks."""
    return count * (_PAGE + 2 * box_bytes)


def path_in(descriptor: int) -> str:
    """Returns the path under which other processes of this user and host can open a descriptor of
    this process.
    """
    return f"/proc/{os.getpid()}/fd/{descriptor}"


class AllGatherTimeout(RuntimeError):
    """A rank did not reach an exchange in time, or with another number of bytes."""


class ShmAllGather:
    """Shared memory of all ranks of a host. An unpickled copy maps the same memory.

    Attributes:
      count: Number of ranks.
      wait_s: Timeout of an exchange in seconds; 0 after a peer has been missing.
    """

    def __init__(self, path: str, count: int, box_bytes: int, wait_s: float) -> None:
        """Maps the memory that `create` has allocated."""
        self._descriptor: int | None = None
        self.count, self.wait_s = count, wait_s
        self._path, self._box_bytes = path, box_bytes
        with open(path, "r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        whole = np.frombuffer(self._memory, np.uint8)
        words, boxes = whole[: count * _PAGE], whole[count * _PAGE :]
        # Per rank: the number of exchanges sent, and the bytes of the last even and odd one.
        self._words = words.view(np.int64).reshape(count, -1)
        self._boxes = boxes.reshape(count, 2, box_bytes)

    @classmethod
    def create(
        cls, count: int, box_bytes: int = BOX_BYTES, wait_s: float = WAIT_S
    ) -> "ShmAllGather":
        """Allocates the memory; the caller must call `remove`.

        Args:
          count: Number of ranks.
          box_bytes: Maximum bytes of one exchange; larger values take several.
          wait_s: Timeout of an exchange in seconds.
        """
        # A memfd has no name in a folder, so the kernel frees it however the processes end. Other
        # processes of the same user open it by this process's id and descriptor.
        descriptor = os.memfd_create("tandem_ranks")
        os.ftruncate(descriptor, shm_buffer_bytes(count, box_bytes))
        created = cls(path_in(descriptor), count, box_bytes, wait_s)
        created._descriptor = descriptor
        return created

    def __reduce__(self) -> tuple[type, tuple[str, int, int, float]]:
        return ShmAllGather, (self._path, self.count, self._box_bytes, self.wait_s)

    def remove(self) -> None:
        """Closes the descriptor, so that no other process can open the memory; existing maps stay
        valid.
        """
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def all_gather(
        self, rank: int, values: UInt8[np.ndarray, " bytes"]
    ) -> UInt8[np.ndarray, "N bytes"]:
        """Gathers the values of all ranks, in rank order; every rank receives the same array.

        Args:
          rank: The calling rank. All ranks make the same number of calls with the same number of
            bytes.
          values: The rank's own bytes.

        Raises:
          RankMissingError: A rank did not arrive within `wait_s`, or with another number of bytes.
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
                self.wait_s = 0.0  # do not wait again for a missing rank
                raise AllGatherTimeout(
                    f"rank {peer} of {self.count} did not reach exchange {call} within "
                    f"{wait_s:g} s (waited on by rank {rank})"
                )
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _check_size(self, rank: int, peer: int, call: int, num_bytes: int) -> None:
        sent = int(self._words[peer, 1 + call % 2])
        if sent != num_bytes:
            raise AllGatherTimeout(
                f"rank {peer} of {self.count} sent {sent} bytes in exchange {call}, rank {rank} "
                f"sent {num_bytes}: they do not run the same step"
            )
