"""Memory files of records: their receivers cannot change them, and see no change.

A memory file (`memfd_create`) has no name: the kernel frees it with its last descriptor, also after
a crash. Its seals forbid every change of its size, and every write by a receiver.

The first write to new memory takes several times as long as a later one, so files are written again
for later records. The kernel reports if a receiver still has a file open: a write lease
(`F_SETLEASE`) requires that no other process has. Without such a lease, a file is sealed against
all writes and serves one record.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from mmap import mmap

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
FUTURE_WRITE = 0x10
"""`F_SEAL_FUTURE_WRITE` of Linux 5.1: forbids writes, except through the mapping that exists."""

REUSED_BYTES = 1 << 20
"""Minimum bytes of a file that is written again."""

VIEW_S = 1.0
"""Maximum seconds for which threads keep views of a complete record."""


class RecordMemory:
    """Memory file of a record.

    Args:
      num_bytes: Size.
      free: Gives its capacity back to the limit.

    Attributes:
      num_bytes: Bytes of the record.
      capacity: Bytes of the file.
      is_reusable: True if the file can be written again for a later record.
      body: Bytes of the record, to be written until `seal`.
    """

    def __init__(self, num_bytes: int, free: Callable[[int], None]) -> None:
        self.num_bytes = self.capacity = num_bytes
        self._free, self._file = free, _new_file(num_bytes)
        self._mapping = mmap(self._file, num_bytes) if num_bytes else None
        self.is_reusable = num_bytes >= REUSED_BYTES and _is_leased(self._file)
        self.is_reusable = self.is_reusable and _is_sealed_by(self._file, SEALS | FUTURE_WRITE)
        self.body = memoryview(self._mapping or b"")

    def begin(self, num_bytes: int) -> None:
        """Begins another record in the file, which no receiver may have open."""
        self.num_bytes = num_bytes
        self.body = memoryview(self._mapping or b"")[:num_bytes]

    def seal(self) -> None:
        """Ends the writing of a record.

        If the file serves one record, views of `body` must be gone.
        """
        if not self.is_reusable:
            self._unmap()
            fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, SEALS | fcntl.F_SEAL_WRITE)

    @property
    def file(self) -> int:
        """Descriptor of the file, for reads in this process."""
        return self._file

    @contextlib.contextmanager
    def opened(self) -> Iterator[int]:
        """Yields a descriptor for another process, which cannot write through it.

        Raises:
          OSError: There is no free descriptor.
        """
        if not self.is_reusable:
            yield self._file
            return
        file = os.open(f"/proc/self/fd/{self._file}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield file
        finally:
            os.close(file)

    def is_exclusive(self) -> bool:
        """Returns True if no process has a descriptor of `opened`, or a mapping by it."""
        return _is_leased(self._file)

    def close(self) -> None:
        """Frees a record that is not published; does nothing after `close`."""
        if self._file >= 0:
            self.release()
            self._free(self.capacity)

    def release(self) -> None:
        """Frees the file; its memory lasts as long as views of the body and mappings of others."""
        os.close(self._file)
        self._file, self._mapping, self.body = -1, None, memoryview(b"")

    def _unmap(self) -> None:
        """Removes the mapping; a thread that has ended its work on it may still have a view."""
        until = time.monotonic() + VIEW_S
        while True:
            try:
                self.body.release()
                if self._mapping is not None:
                    self._mapping.close()
                return
            except BufferError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.001)


def is_sealed(file: int, num_bytes: int) -> bool:
    """Returns True for a memory file of at least this size that cannot shrink, and that only the
    mapping of its owner can change.
    """
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:  # not a memory file
        return False
    is_fixed = seals & fcntl.F_SEAL_SHRINK and seals & (fcntl.F_SEAL_WRITE | FUTURE_WRITE)
    return bool(is_fixed) and os.fstat(file).st_size >= num_bytes


def _new_file(num_bytes: int) -> int:
    file = os.memfd_create("kv_record", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with contextlib.suppress(OSError):
        # The kernel counts the writers of files that were opened, which a lease requires.
        opened = os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
        os.close(file)
        file = opened
    os.ftruncate(file, num_bytes)
    return file


def _is_leased(file: int) -> bool:
    """Returns True if a write lease was granted, which is returned at once."""
    try:
        fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)  # ignored; SIGIO would end the process
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True


def _is_sealed_by(file: int, seals: int) -> bool:
    """Adds seals; returns False if the kernel does not know one of them."""
    try:
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, seals)
    except OSError:
        return False
    return True
