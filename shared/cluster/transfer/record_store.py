"""Records that a server holds for others, in sealed memory files.

A memory file (`shared.cluster.transfer.record_memory`) is written once for a record, and again for
a later record when no receiver maps it any more.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from shared.cluster.transfer.errors import EXPIRED, TOO_LARGE, TransferError
from shared.cluster.transfer.record_memory import RecordMemory
from shared.cluster.transfer.ticket import ID_BYTES

MAX_UNUSED = 64
"""Maximum memory files that wait for a later record."""


@dataclass(eq=False)
class HeldRecord:
    """A record in a sealed memory file.

    Attributes:
      key: Identity of the cached prefix, shared by the tickets for it.
      header: Fields of its header.
      memory: The memory file.
      num_bytes: Bytes of the body.
      checksum: See `Ticket.checksum`.
      tickets: Time at which each open ticket expires, by its id.
      num_readers: Transfers in progress.
    """

    key: bytes
    header: dict[str, Any]
    memory: RecordMemory
    num_bytes: int
    checksum: int
    tickets: dict[str, float] = field(default_factory=dict)
    num_readers: int = 0


class RecordStore:
    """Held records, within a limit of bytes; all methods may be called from any thread.

    Each ticket is valid once. A record is freed when no ticket is open and no transfer reads it.
    Its memory file is kept for a later record while all files are within the limit.

    Args:
      max_bytes: Maximum bytes of all records.
      ticket_s: Seconds after which a ticket expires.
    """

    def __init__(self, max_bytes: int, ticket_s: float) -> None:
        self._max_bytes, self._ticket_s = max_bytes, ticket_s
        self._lock = threading.Lock()
        self._records: dict[bytes, HeldRecord] = {}
        self._by_ticket: dict[str, HeldRecord] = {}
        self._unused: list[RecordMemory] = []
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
            memory = self._take_unused(count)
            capacity = count if memory is None else memory.capacity
            self._num_bytes += capacity
            self._drop_unused(self._max_bytes - self._num_bytes)
        if memory is not None:
            memory.begin(count)
            return memory
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
        memory.seal()
        with self._lock:
            # Another thread may have published the same prefix meanwhile; the newer record stays.
            record = HeldRecord(key, header, memory, memory.num_bytes, checksum)
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
        """Removes all tickets and unused memory; records in transfer stay until its end."""
        with self._lock:
            for ticket in tuple(self._by_ticket):
                self._remove(ticket)
            self._drop_unused(0)

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
        if self._records.get(record.key) is record:
            del self._records[record.key]
        memory = record.memory
        self._num_bytes -= memory.capacity
        if memory.is_reusable:
            self._unused.append(memory)
            self._drop_unused(self._max_bytes - self._num_bytes)
        else:
            _release([memory])

    def _take_unused(self, count: int) -> RecordMemory | None:
        """Returns the smallest unused memory that is large enough, and not larger than twice that.

        Memory that a receiver still maps stays unused.
        """
        for memory in sorted(self._unused, key=lambda each: each.capacity):
            if count <= memory.capacity <= 2 * count and memory.is_exclusive():
                self._unused.remove(memory)
                return memory
        return None

    def _drop_unused(self, max_bytes: int) -> None:
        """Frees the oldest unused memory, until the rest is within a number of bytes."""
        dropped, left = list[RecordMemory](), sum(each.capacity for each in self._unused)
        while self._unused and (left > max_bytes or len(self._unused) > MAX_UNUSED):
            dropped.append(self._unused.pop(0))
            left -= dropped[-1].capacity
        if dropped:
            _release(dropped)


def _release(memories: Sequence[RecordMemory]) -> None:
    """Frees memory in a thread: unmapping stops the caller, which may be the engine's thread."""

    def release() -> None:
        for each in memories:
            each.release()

    threading.Thread(target=release, daemon=True).start()
