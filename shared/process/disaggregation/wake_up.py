"""Wake-up of the engine's thread from other threads."""

import contextlib
import socket


class WakeUp:
    """Socket that becomes readable when another thread has a result for the engine's thread.

    Attributes:
      readable: Socket to wait for.
    """

    def __init__(self) -> None:
        self.readable, self._writable = socket.socketpair()
        self.readable.setblocking(False)
        self._writable.setblocking(False)

    def notify(self) -> None:
        """Makes the socket readable; may be called from any thread, also after `close`."""
        with contextlib.suppress(OSError):  # a full buffer wakes as well
            self._writable.send(b"\0")

    def close(self) -> None:
        """Closes both ends."""
        self.readable.close()
        self._writable.close()
