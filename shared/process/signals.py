"""Stop signals: graceful shutdown (drain) and end of a server."""

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
"""Signals that end a server; SIGTERM drains it first."""


def stop_reason(number: int) -> str:
    """Returns the reason for the end of a server."""
    return f"the server was stopped by {signal.Signals(number).name}"


@contextmanager
def block_stop_signals() -> Iterator[None]:
    """Blocks stop signals in this thread, and for their whole lifetime in processes that it starts.

    Signals are sent to process groups, and the engine process ends both processes.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class StopSignals:
    """Converts the first SIGTERM to a drain, and any further signal or the end of the drain to an
    end.

    A separate thread reads the signals, because Python's handlers run in the engine's thread, which
    may be in a library call. One more signal than an end requires kills the process. Signals that
    are ignored at startup (as with `nohup`) stay ignored.

    Attributes:
      drains: True if no new requests are accepted.
      ends: True if the server must end.
      drain_timeout_s: Maximum seconds of a drain.
      reason: Reason for the end.
      readable: Socket that becomes readable when one of them has changed.
      last_word: Socket with the signal's number once the next one kills, when no message can be
        sent.
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
        always = (signal.SIGINT, signal.SIGTERM)  # shells ignore SIGINT in background jobs
        self._taken = [
            each
            for each in STOP_SIGNALS
            if each in always or signal.getsignal(each) is not signal.SIG_IGN
        ]
        for number in self._taken:
            signal.signal(number, self._handle)

    def wait_for_end(self, seconds: float) -> bool:
        """Waits for a signal; returns True if the server must end. Called from one thread only."""
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
        self.reason = stop_reason(number)
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
        """Runs in the engine's thread when Python handles the signal."""
        if number != signal.SIGTERM or self._is_last:
            self._say.send(bytes([number]))
            for each in self._taken:
                signal.signal(each, signal.SIG_DFL)
        self._is_last = True
