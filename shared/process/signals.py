"""What signals ask of a server: to drain, or to end."""

from __future__ import annotations

import math
import select
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

STOP_SIGNALS = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
"""All end a server; SIGTERM lets it drain first."""


def stopped_by(number: int) -> str:
    """Why a server has ended."""
    return f"the server was stopped by {signal.Signals(number).name}"


@contextmanager
def held_back() -> Iterator[None]:
    """No stop signal reaches this thread, nor for their whole lives the processes that it starts.

    Signals are sent to groups of processes, and the engine's process is the one that ends both.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopSignals:
    """Turns the first SIGTERM into a drain; every other signal or the drain's end into an end.

    A thread of its own reads the signals, as Python's handlers wait for the engine's thread, which
    may be in a call into a library. One signal more than an end needs kills. What the start was
    told to ignore (`nohup` does it) stays ignored.

    Attributes:
      drains: No new requests are to be taken.
      ends: It is time to end, whatever still runs.
      drain_timeout_s: How long a drain may take.
      reason: Why it is time to end.
      readable: A socket that can be read when one of them has changed.
      last_word: Holds the signal's number once the next one kills, when nothing can be said.
    """

    def __init__(self, drain_timeout_s: float) -> None:
        self.drains, self.ends = False, False
        self.drain_timeout_s, self.reason = drain_timeout_s, "the server was stopped"
        self._deadline, self._is_last = math.inf, False
        self.readable, self._tell = socket.socketpair()
        self.last_word, self._say = socket.socketpair()
        self._numbers, self._wake = socket.socketpair()
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())
        asked = (signal.SIGINT, signal.SIGTERM)  # a shell has its background jobs ignore SIGINT
        self._taken = [
            each
            for each in STOP_SIGNALS
            if each in asked or signal.getsignal(each) is not signal.SIG_IGN
        ]
        for number in self._taken:
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
        if number not in self._taken or self.ends:
            return
        self.reason = stopped_by(number)
        if number == signal.SIGTERM and not self.drains:
            self._deadline = time.monotonic() + self.drain_timeout_s
            self.drains = True
            self._tell.send(b"\0")
        else:
            self._end()

    def _end(self) -> None:
        self.ends = True
        self._tell.send(b"\0")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs in the engine's thread, when Python gets to it."""
        if number != signal.SIGTERM or self._is_last:
            self._say.send(bytes([number]))
            for each in self._taken:
                signal.signal(each, signal.SIG_DFL)
        self._is_last = True
