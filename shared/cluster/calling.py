"""The call of a process that was started on another host, told from those of strangers."""

from __future__ import annotations

import hmac
import selectors
import socket
import time
from collections.abc import Callable, Iterable

from shared.options.flags import ConfigError

CALL_BACK_S = 60.0
LOOK_S = 1.0
"""How long nothing may come until it is asked whether the process still runs."""


def called_back(
    listener: socket.socket, secret: bytes, host: str, ending: Callable[[], str | None]
) -> socket.socket:
    """The connection of the process that knows the secret, and says it first.

    Whoever reaches this host may connect too. All are heard at once, so that one who says nothing
    keeps nobody waiting; as many other words are answered by the end of the connection.

    Args:
      listener: At the address that the process calls.
      host: Of the process, for the reader.
      ending: How the process has ended, as "was ended by SIGKILL"; None while it runs.

    Raises:
      ConfigError: It ended before, or did not come in time.
    """
    until = time.monotonic() + CALL_BACK_S
    listener.setblocking(False)
    heard: dict[socket.socket, bytes] = {}
    try:
        while time.monotonic() < until:
            ready = _ready([listener, *heard])
            if not ready and (how := ending()) is not None:
                raise ConfigError(f"--launcher ray: a rank on {host} {how}")
            for each in ready:
                if each is listener:
                    heard |= _accepted(listener)
                    continue
                before = heard.pop(each)
                said = before + _received(each, len(secret) - len(before))
                if before != said and len(said) < len(secret):
                    heard[each] = said  # not judged yet: a secret is not to be guessed in parts
                elif hmac.compare_digest(said, secret):
                    return each
                else:
                    each.close()
    finally:
        for each in heard:
            each.close()
    raise ConfigError(
        f"--launcher ray: the rank on {host} did not call back within {CALL_BACK_S:g} s; let its "
        "host reach this one"
    )


def _ready(sockets: Iterable[socket.socket]) -> list[socket.socket]:
    """Those of which something can be received; none after a while."""
    with selectors.DefaultSelector() as selector:
        for each in sockets:
            selector.register(each, selectors.EVENT_READ, each)
        return [key.data for key, _ in selector.select(LOOK_S)]


def _accepted(listener: socket.socket) -> dict[socket.socket, bytes]:
    """A new connection, of which nothing is heard yet; none where it has gone again."""
    try:
        return {listener.accept()[0]: b""}
    except OSError:
        return {}


def _received(connection: socket.socket, most: int) -> bytes:
    """What has come; empty where the other end is gone."""
    try:
        return connection.recv(most)
    except OSError:
        return b""
