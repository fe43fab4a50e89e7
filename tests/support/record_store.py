"""Records of bytes for other servers."""

from collections.abc import Sequence
from typing import Any

from shared.cluster.transfer.record_store import HeldRecord, RecordStore


def publish(
    store: RecordStore,
    key: bytes,
    header: dict[str, Any],
    parts: Sequence[memoryview],
    checksum: int,
) -> tuple[str, HeldRecord]:
    """Copies a body to the store, and returns its record with a ticket."""
    body = b"".join(parts)
    memory = store.allocate(len(body))
    memory.body[:] = body
    return store.publish(key, header, memory, checksum)
