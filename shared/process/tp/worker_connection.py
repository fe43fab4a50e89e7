"""The messages between the engine's process and that of another rank, over a stream socket.

They are frames of `shared.process.ipc_messages`; the first entry names the message.

- to a follower, in this order: `options` (what the start was told, by name), `memory` (bytes that
  every rank takes as free), `share` (path of the ring, or None where plans come by this socket;
  path, bytes of an exchange and seconds of the mailboxes, or None; where ranks of several hosts
  meet, or None), `prepare`
  (indices of programs); then any number of `wake` and of `step` (a plan, where there is no ring),
  and `close` (how many plans there were).
- from a follower: `beat` (plans it has taken, steps that have ended; once a second), `phase` (what
  it is at), `device` (host, kind, name, free bytes), `planned` (digest of its plan), `loaded`
  (bytes so far), `began` (programs that it has begun to make ready), `refused` (a sentence that the
  user can do something about), `failed` (a sentence).
"""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from typing import Any

from shared.process.ipc_messages import FrameReader, pack

BEAT_S = 1.0
"""Between two signs of life."""

RECEIVE_BYTES = 1 << 18


class LinkEndedError(ConnectionError):
    """The other process has closed its end, or has ended."""


class Link:
    """One end. Any thread may send; one thread receives."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._reader = connection, FrameReader()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """The socket's, to wait on."""
        return self._socket.fileno()

    def send(self, *message: Any) -> None:
        """Sends a message; where the other end is gone, who receives hears of it."""
        try:
            with self._sending:
                self._socket.sendall(pack(list(message)))
        except OSError:
            pass

    def receive(self, timeout_s: float | None) -> Iterator[list[Any]]:
        """The messages that have come; waits for the first.

        Args:
          timeout_s: How long; None waits for ever.

        Raises:
          LinkEndedError: There will be no more.
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
        """Waits so long for the other end to close; what it has sent before stays to be received.

        Any thread may ask.
        """
        waiting = select.poll()
        waiting.register(self._socket, select.POLLRDHUP)
        return bool(waiting.poll(1000 * seconds))

    def close(self) -> None:
        """Lets the other process see the end."""
        self._socket.close()


def boot() -> str:
    """Names the machine that is running, the same for all that share its memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return f"{socket.gethostname()} without a boot id"
