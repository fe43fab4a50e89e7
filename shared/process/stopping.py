"""What signals ask of a server: to drain, or to end."""

from __future__ import annotations

import math
import select
import signal
import socket
import time
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopSignals:
    """Turns the first SIGTERM into a drain; SIGINT, another SIGTERM or the drain's end into an end.

    A thread of its own reads the signals, as Python's handlers wait for the engine's thread, which
    may be in a call into a library. One signal more than an end needs kills.

    Attributes:
      drains: No new requests are to be taken.
      ends: It is time to end, whatever still runs.
      drain_timeout_s: How long a drain may take.
      readable: A socket that can be read when one of them has changed.
    """

    def __init__(self, drain_timeout_s: float) -> None:
        self.drains, self.ends = False, False
        self.drain_timeout_s = drain_timeout_s
        self._deadline, self._is_last = math.inf, False
        self.readable, self._tell = socket.socketpair()
        self._numbers, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def wait_for_end(self, seconds: float) -> bool:
        """Waits at most so long for a signal; whether it is time to end. One thread's alone."""
        patience = min(seconds, max(0.0, self._deadline - time.monotonic()))
        if select.select([self._numbers], [], [], patience)[0]:
            for number in self._numbers.recv(64):
                self._take(number)
        if not self.ends and time.monotonic() >= self._deadline:
            self._end()
        return self.ends

    def _take(self, number: int) -> None:
        if number == signal.SIGTERM and not self.drains:
            self._deadline = time.monotonic() + self.drain_timeout_s
            self.drains = True
            self._tell.send(b"\0")
        elif number in STOP_SIGNALS:
            self._end()

    def _end(self) -> None:
        self.ends = True
        self._tell.send(b"\0")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the engine's thread, when Python gets to it."""
        if number == signal.SIGINT or self._is_last:
            for each in STOP_SIGNALS:
                signal.signal(each, signal.SIG_DFL)
        self._is_last = True
