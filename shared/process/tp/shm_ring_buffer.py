"""Shared-memory ring buffer that broadcasts step plans to the worker ranks of a host.

One process writes the slots in order and every reader reads all of them. A reader spins briefly on
the sequence number, because the next plan is usually imminent, and then blocks on its socket; a
flag shows the writer which readers block. The memory is anonymous (memfd), so nothing remains
however the processes end.
"""

from __future__ import annotations

import mmap
import os
import time

import numpy as np
from jaxtyping import Int32

from shared.boundary.memory_fence import fence

_LINE = 8  # words of 8 bytes in a cache line; each process writes to lines of its own
_HEAD = 2 * _LINE  # number of readers, of slots and of a slot's words; then what was written
_SLOT_HEAD = 2  # number of a message, and of its words
_PAUSE_S = 50e-6
_LOOKS = 64  # looks at the number between two at the clock


class RingFullError(RuntimeError):
    """A reader has not freed a slot within the time limit.

    Attributes:
      reader: Index of the reader.
      taken: Messages that it has read.
    """

    def __init__(self, reader: int, taken: int) -> None:
        super().__init__(f"reader {reader} has read {taken} messages and freed no slot in time")
        self.reader, self.taken = reader, taken


class Ring:
    """Writer side of the ring.

    Attributes:
      descriptor: File descriptor of the memory, for `Reader` in other processes.
      written: Messages so far.
    """

    def __init__(self, readers: int, max_words: int, slots: int) -> None:
        """Allocates the memory.

        Args:
          readers: Processes that read every message.
          max_words: Words of 4 bytes in the longest message.
          slots: Messages that may wait for the slowest reader.
        """
        self.descriptor = os.memfd_create("tandem_plans")
        stride = _stride(max_words)
        num_bytes = 8 * (_HEAD + readers * _LINE + slots * stride)
        os.ftruncate(self.descriptor, num_bytes)
        self._words = memoryview(mmap.mmap(self.descriptor, num_bytes)).cast("q")
        self._words[0], self._words[1], self._words[2] = readers, slots, max_words
        self._places = _Places(self._words)
        self.written = 0

    def write(self, message: Int32[np.ndarray, " words"], timeout_s: float) -> list[int]:
        """Writes a message; returns at once unless it must wait for a slot.

        Args:
          message: The message, at most as long as a slot.
          timeout_s: Time limit of this wait.

        Returns:
          Blocked readers, which the caller must wake.

        Raises:
          RingFullError: No slot became free in time; nothing was written.
          ValueError: The message is longer than a slot.
        """
        places = self._places
        if len(message) > places.max_words:
            raise ValueError(f"a message has at most {places.max_words} words, got {len(message)}")
        self._wait_for_slot(timeout_s)
        number = self.written + 1
        slot = places.slot(number)
        places.data(slot)[: len(message)] = message
        self._words[slot + 1] = len(message)
        fence()  # the message is written before its number
        self._words[slot] = number
        self._words[_LINE] = self.written = number
        fence()  # readers that set their flag after this read the number first
        return [each for each in range(places.readers) if self._words[places.reader(each) + 1]]

    def taken(self, reader: int) -> int:
        """Returns the messages that a reader has read."""
        return self._words[self._places.reader(reader)]

    def close(self) -> None:
        """Closes the descriptor; readers keep their mappings."""
        os.close(self.descriptor)

    def _wait_for_slot(self, timeout_s: float) -> None:
        until = None
        while self.written - min(map(self.taken, range(self._places.readers))) >= (
            self._places.slots
        ):
            now = time.monotonic()
            until = now + timeout_s if until is None else until
            if now >= until:
                slowest = min(range(self._places.readers), key=self.taken)
                raise RingFullError(slowest, self.taken(slowest))
            time.sleep(_PAUSE_S)


class Reader:
    """Reader side of the ring."""

    def __init__(self, descriptor: int, reader: int) -> None:
        """Maps the memory; the descriptor may be closed afterwards.

        Args:
          descriptor: File descriptor of the memory, in this process.
          reader: Index of this reader.

        Raises:
          ValueError: The ring has no such reader.
        """
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        self._words = memoryview(memory).cast("q")
        self._places = _Places(self._words)
        if not 0 <= reader < self._places.readers:
            raise ValueError(f"the ring has {self._places.readers} readers, none is {reader}")
        self._own = self._places.reader(reader)

    @property
    def taken(self) -> int:
        """Messages read so far."""
        return self._words[self._own]

    def take(self) -> Int32[np.ndarray, " words"] | None:
        """Returns a copy of the next message, or None if there is none yet."""
        number = self._words[self._own] + 1
        slot = self._places.slot(number)
        if self._words[slot] != number:
            return None
        fence()  # the number is read before the message
        message = self._places.data(slot)[: self._words[slot + 1]].copy()
        fence()  # and the slot is free after that
        self._words[self._own] = number
        return message

    def look(self, seconds: float) -> Int32[np.ndarray, " words"] | None:
        """Returns the next message; spins for up to these seconds."""
        until = time.monotonic() + seconds
        while True:
            for _ in range(_LOOKS):
                if (message := self.take()) is not None:
                    return message
                if seconds <= 0:
                    return None
            if time.monotonic() >= until:
                return None

    def fall_asleep(self) -> Int32[np.ndarray, " words"] | None:
        """Sets the flag that requests a wake-up; returns the next message if it has arrived.

        A later message wakes the reader: either this call reads it, or the writer reads the flag.
        """
        self._words[self._own + 1] = 1
        fence()
        if (message := self.take()) is not None:
            self.wake_up()
        return message

    def wake_up(self) -> None:
        """Clears the flag that requests a wake-up."""
        self._words[self._own + 1] = 0


class _Places:
    """Memory layout of the ring, in words of 8 bytes."""

    def __init__(self, words: memoryview) -> None:
        self.readers, self.slots, self.max_words = words[0], words[1], words[2]
        self._first = _HEAD + self.readers * _LINE
        self._stride = _stride(self.max_words)
        self._all = np.frombuffer(words, np.int32)

    def reader(self, reader: int) -> int:
        """Returns the index of a reader's count of messages read; its wake-up flag follows."""
        return _HEAD + reader * _LINE

    def slot(self, number: int) -> int:
        """Returns the index of a message's slot; messages are counted from 1."""
        return self._first + (number - 1) % self.slots * self._stride

    def data(self, slot: int) -> Int32[np.ndarray, " words"]:
        """Returns the payload area of a slot."""
        first = 2 * (slot + _SLOT_HEAD)
        return self._all[first : first + self.max_words]


def _stride(max_words: int) -> int:
    """Returns the words of 8 bytes of a slot, in whole cache lines."""
    return -(-(_SLOT_HEAD + -(-max_words // 2)) // _LINE) * _LINE
