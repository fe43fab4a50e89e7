"""Chunked writes that yield to the event loop between chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

PIECE = 1 << 18
"""Bytes per chunk."""


async def write_in_pieces(
    writer: asyncio.StreamWriter, parts: Iterable[bytes | memoryview]
) -> None:
    """Writes parts in chunks; asyncio would copy all bytes that a pipe does not take at once.

    Raises:
      OSError: The other end is closed.
    """
    for part in map(memoryview, parts):
        for at in range(0, len(part), PIECE):
            writer.write(part[at : at + PIECE])
            await writer.drain()
            await asyncio.sleep(0)
