"""Records that a server holds for others, in sealed memory files.

A memory file (`memfd_create`) has no name: the kernel frees it with its last descriptor, also after
a crash. Its seals forbid every change of content and size, so a receiver can map it
without the risk of bytes that change or vanish.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from mmap import mmap
from typing import Any

from shared.cluster.transfer.errors import EXPIRED, TOO_LARGE, TransferError
from shared.cluster.transfer.ticket import ID_BYTES

SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL

VIEW_S = 1.0
"""Maximum seconds for which threads keep views of a complete record."""


class RecordMemory:
    """Memory file of a record that is being written.

    Args:
      num_bytes: Size.
      free: Gives its bytes back to the limit.

    Attributes:
      body: Its bytes, to be written; views of it must be gone before `seal`.
    """

    def __init__(self, num_bytes: int, free: Callable[[int], None]) -> None:
        self.num_bytes, self._free = num_bytes, free
        self._file = os.memfd_create("kv_record", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, num_bytes)
        self._mapping = mmap(self._file, num_bytes) if num_bytes else None
        self.body = memoryview(self._mapping or b"")

    def seal(self) -> int:
        """Forbids changes, and returns the descriptor, which the caller owns."""
        self._unmap()
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, SEALS)
        file, self._file = self._file, -1
        return file

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

    def close(self) -> None:
        """Frees a record that is not sealed; does nothing after `seal` or `close`."""
        if self._file >= 0:
            os.close(self._file)  # the memory lasts as long as views of the body
            self._file, self._mapping, self.body = -1, None, memoryview(b"")
            self._free(self.num_bytes)


@dataclass(eq=False)
class HeldRecord:
    """A record in a sealed memory file.

    Attributes:
      key: Identity of the cached prefix, shared by the tickets for it.
      header: Fields of its header.
      file: Descriptor of the memory file.
      num_bytes: Bytes of the body.
      checksum: See `Ticket.checksum`.
      tickets: Time at which each open ticket expires, by its id.
      num_readers: Transfers in progress.
    """

    key: bytes
    header: dict[str, Any]
    file: int
    num_bytes: int
    checksum: int
    tickets: dict[str, float] = field(default_factory=dict)
    num_readers: int = 0


class RecordStore:
    """Held records, within a limit of bytes; all methods may be called from any thread.

    Each ticket is valid once. A record is freed when no ticket is open and no transfer reads it.

    Args:
      max_bytes: Maximum bytes of all records.
      ticket_s: Seconds after which a ticket expires.
    """

    def __init__(self, max_bytes: int, ticket_s: float) -> None:
        self._max_bytes, self._ticket_s = max_bytes, ticket_s
        self._lock = threading.Lock()
        self._records: dict[bytes, HeldRecord] = {}
        self._by_ticket: dict[str, HeldRecord] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Bytes of all records."""
        return self._num_bytes

    @property
    def num_records(self) -> int:
        """Number of records."""
        return len(self._records)

    def share(self, key: bytes) -> tuple[str, HeldRecord] | None:
        """Returns a further ticket for a held record; None if no record has the key."""
        with self._lock:
            self._expire()
            record = self._records.get(key)
            return None if record is None else (self._new_ticket(record), record)

    def allocate(self, count: int) -> RecordMemory:
        """Returns memory for a record, to be published or closed.

        Args:
          count: Bytes of the body.

        Raises:
          TransferError: The records would exceed the limit.
        """
        with self._lock:
            self._expire()
            if self._num_bytes + count > self._max_bytes:
                raise TransferError(
                    TOO_LARGE,
                    f"a record of {count} bytes exceeds --disaggregation-buffer-mib: "
                    f"{self._num_bytes} of {self._max_bytes} bytes are in use",
                )
            self._num_bytes += count
        try:
            return RecordMemory(count, self._give_back)
        except BaseException:
            self._give_back(count)
            raise

    def publish(
        self, key: bytes, header: dict[str, Any], memory: RecordMemory, checksum: int
    ) -> tuple[str, HeldRecord]:
        """Seals a record, and returns it with a ticket.

        Args:
          key: Identity of the cached prefix.
          header: Fields of the header.
          memory: Memory with the body.
          checksum: See `Ticket.checksum`.
        """
        file = memory.seal()
        with self._lock:
            # Another thread may have published the same prefix meanwhile; the newer record stays.
            record = HeldRecord(key, header, file, memory.num_bytes, checksum)
            self._records[key] = record
            return self._new_ticket(record), record

    def open(self, ticket: str) -> HeldRecord:
        """Uses up a ticket, and returns its record, which stays until `close_reader`.

        Raises:
          TransferError: The ticket is unknown, was used, or has expired.
        """
        with self._lock:
            self._expire()
            record = self._by_ticket.pop(ticket, None)
            if record is None:
                raise TransferError(EXPIRED, "the ticket has expired or was used before")
            del record.tickets[ticket]
            record.num_readers += 1
            return record

    def close_reader(self, record: HeldRecord) -> None:
        """Ends a transfer."""
        with self._lock:
            record.num_readers -= 1
            self._free_unused(record)

    def drop(self, ticket: str) -> None:
        """Removes a ticket that will not be used; does nothing if it is gone."""
        with self._lock:
            self._remove(ticket)

    def expire(self) -> None:
        """Removes expired tickets, and the records without another ticket."""
        with self._lock:
            self._expire()

    def close(self) -> None:
        """Removes all tickets; records in transfer stay until its end."""
        with self._lock:
            for ticket in tuple(self._by_ticket):
                self._remove(ticket)

    def _give_back(self, count: int) -> None:
        with self._lock:
            self._num_bytes -= count

    def _new_ticket(self, record: HeldRecord) -> str:
        ticket = secrets.token_hex(ID_BYTES)
        record.tickets[ticket] = time.monotonic() + self._ticket_s
        self._by_ticket[ticket] = record
        return ticket

    def _expire(self) -> None:
        now = time.monotonic()
        # Tickets have one lifetime, so the dictionary is in the order of expiry.
        for ticket, record in tuple(self._by_ticket.items()):
            if record.tickets[ticket] > now:
                return
            self._remove(ticket)

    def _remove(self, ticket: str) -> None:
        record = self._by_ticket.pop(ticket, None)
        if record is not None:
            del record.tickets[ticket]
            self._free_unused(record)

    def _free_unused(self, record: HeldRecord) -> None:
        if record.tickets or record.num_readers:
            return
        os.close(record.file)
        self._num_bytes -= record.num_bytes
        if self._records.get(record.key) is record:
            del self._records[record.key]


def is_sealed(file: int, num_bytes: int) -> bool:
    """Returns True for a memory file of this size that cannot change in content or size."""
    try:
        seals = fcntl.fcntl(file, fcntl.F_GET_SEALS)
    except OSError:  # not a memory file
        return False
    wanted = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK
    return seals & wanted == wanted and os.fstat(file).st_size == num_bytes
