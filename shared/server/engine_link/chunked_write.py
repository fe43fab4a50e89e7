"""Chunked writes that yield to the event loop between chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

PIECE = 1 << 18
"""Bytes."""


async def write_in_pieces(
    writer: asyncio.StreamWriter, parts: Iterable[bytes | memoryview]
) -> None:
    """Writes parts one behind the other; a pipe takes little, and asyncio would copy the rest.

    Raises:
      OSError: The other end is gone.
    """
    for part in map(memoryview, parts):
        for at in range(0, len(part), PIECE):
            writer.write(part[at : at + PIECE])
            await writer.drain()
            await asyncio.sleep(0)
