"""Messages between the engine process and a worker rank, over a stream socket.

Each is a frame of `shared.process.ipc_messages`; its first entry is the kind of the message.

- to a worker, in this order: `options` (explicitly set options, by name), `memory` (free bytes that
  every rank assumes), `share` (path of the ring, or None if plans are sent over this socket; path,
  bytes and timeout in seconds of the shared-memory all-gather, or None; rendezvous address of ranks
  on several hosts, or None), `prepare` (program indices); then any number of `wake` and `step` (a
  plan, without a ring), and `close` (number of plans sent).
- from a worker: `beat` (heartbeat once a second: plans received, steps ended), `phase` (current
  phase), `device` (host, kind, name, free bytes), `planned` (digest of its plan), `loaded` (bytes
  so far), `began` (programs whose preparation has begun), `refused` (an error that the user can
  correct), `failed` (an error).
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

from shared.process.ipc_messages import FrameReader, pack

BEAT_S = 1.0
"""Interval of heartbeats."""

RECEIVE_BYTES = 1 << 18


class LinkEndedError(ConnectionError):
    """The other process has closed its end, or has ended."""


class Link:
    """One end of a connection. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._reader = connection, FrameReader()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Returns the socket's descriptor, for `select`."""
        return self._socket.fileno()

    def send(self, *message: Any) -> None:
        """Sends a message; if the other end is gone, the receiving thread detects it."""
        try:
            with self._sending:
                self._socket.sendall(pack(list(message)))
        except OSError:
            pass

    def receive(self, timeout_s: float | None) -> Iterator[list[Any]]:
        """Yields the received messages, after waiting for the first.

        Args:
          timeout_s: Time limit; None waits indefinitely.

        Raises:
          LinkEndedError: The connection has ended.
        """
        if not select.select([self._socket], [], [], timeout_s)[0]:
            return
        try:
            received = self._socket.recv(RECEIVE_BYTES)
        except OSError as error:
            raise LinkEndedError(str(error)) from error
        if not received:
            raise LinkEndedError("the other end is closed")
        yield from self._reader.feed(received)

    def ends_within(self, seconds: float) -> bool:
        """Waits up to these seconds for the other end to close; earlier messages can still be
        received.

        Thread-safe.
        """
        waiting = select.poll()
        waiting.register(self._socket, select.POLLRDHUP)
        return bool(waiting.poll(1000 * seconds))

    def close(self) -> None:
        """Closes this end, which the other process detects."""
        self._socket.close()


def boot() -> str:
    """Returns the boot id of this machine, equal for all processes that share its memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()} without a boot id"
