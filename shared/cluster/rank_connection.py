"""Authenticated connection from a process that was started on another host."""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections.abc import Callable, Iterable

from shared.options.flags import ConfigError

CALL_BACK_S = 60.0
LOOK_S = 1.0
"""Seconds without data before the state of the process is checked."""


def accept_rank_connection(
    listener: socket.socket, secret: bytes, host: str, ending: Callable[[], str | None]
) -> socket.socket:
    """Accepts the connection of the process that sends the secret first.

    Other clients may connect too. All connections are read concurrently, so a silent one delays
    nothing; one that sends other bytes is closed.

    Args:
      listener: Socket at the address that the process connects to.
      secret: Bytes that authenticate the process.
      host: Name of the host of the process, for messages.
      ending: Returns how the process has ended, as "was ended by SIGKILL", or None while it runs.

    Raises:
      ConfigError: The process ended first, or did not connect in time.
    """
    until = time.monotonic() + CALL_BACK_S
    listener.setblocking(False)
    pending: dict[socket.socket, bytes] = {}
    try:
        while time.monotonic() < until:
            ready = _ready([listener, *pending])
            if not ready and (how := ending()) is not None:
                raise ConfigError(f"--distributed-executor-backend ray: a rank on {host} {how}")
            for each in ready:
                if each is listener:
                    pending |= _accepted(listener)
                    continue
                before = pending.pop(each)
                received = before + _received(each, len(secret) - len(before))
                if before != received and len(received) < len(secret):
                    pending[each] = received  # incomplete: a secret must not be guessed in parts
                elif hmac.compare_digest(received, secret):
                    return each
                else:
                    each.close()
    finally:
        for each in pending:
            each.close()
    raise ConfigError(
        f"--distributed-executor-backend ray: the rank on {host} did not connect within "
        f"{CALL_BACK_S:g} s; allow its host to reach this one"
    )


def _ready(sockets: Iterable[socket.socket]) -> list[socket.socket]:
    """Returns the readable sockets, none after `LOOK_S`."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ, each)
        return [key.data for key, _ in selector.select(LOOK_S)]


def _accepted(listener: socket.socket) -> dict[socket.socket, bytes]:
    """Returns a new connection without data, or nothing if it has closed again."""
    try:
        return {listener.accept()[0]: b""}
    except OSError:
        return {}


def _received(connection: socket.socket, most: int) -> bytes:
    """Returns the received bytes, none if the other end is closed."""
    try:
        return connection.recv(most)
    except OSError:
        return b""
