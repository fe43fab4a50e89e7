"""Transport of asyncio that records what is written to it."""

from __future__ import annotations

import asyncio


class RecordingTransport(asyncio.Transport):
    """The transport.

    Attributes:
      parts: One item for each write.
      reads: False while reading is paused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[bytes] = []
        self.reads, self._is_closed = True, False

    def write(self, data) -> None:
        self.parts.append(bytes(data))

    def write_eof(self) -> None:
        self._is_closed = True

    def close(self) -> None:
        self._is_closed = True

    def abort(self) -> None:
        self._is_closed = True

    def is_closing(self) -> bool:
        return self._is_closed

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True
