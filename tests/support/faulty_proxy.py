"""TCP proxy that damages, cuts off or stops what a server sends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

Damage = Callable[[int, bytes], bytes]
"""Returns the bytes to forward for those at an offset; fewer of them close the connection."""


def unchanged(offset: int, data: bytes) -> bytes:
    """Forwards everything."""
    return data


def flip(at: int) -> Damage:
    """Flips a bit of the byte at an offset."""

    def damage(offset: int, data: bytes) -> bytes:
        if not offset <= at < offset + len(data):
            return data
        changed = bytearray(data)
        changed[at - offset] ^= 1
        return bytes(changed)

    return damage


def cut(at: int) -> Damage:
    """Closes the connection after some bytes."""
    return lambda offset, data: data[: at - offset]


class FaultyProxy:
    """Proxy of one server; `released` must be set for bytes to pass after `stops_at`."""

    def __init__(self, port: int, damage: Damage, stops_at: int | None = None) -> None:
        self._target, self._damage, self._stops_at = port, damage, stops_at
        self.released, self.stopped = threading.Event(), threading.Event()
        self.num_connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.num_connections += 1
                server = socket.create_connection(("127.0.0.1", self._target))
                for work in (self._send, self._return):
                    threading.Thread(target=work, args=[client, server], daemon=True).start()

    def _send(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                server.sendall(data)
            server.shutdown(socket.SHUT_RDWR)

    def _return(self, client: socket.socket, server: socket.socket) -> None:
        offset = 0
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if self._stops_at is not None and offset + len(data) > self._stops_at:
                    self.stopped.set()
                    self.released.wait()
                changed = self._damage(offset, data)
                client.sendall(changed)
                if len(changed) < len(data):
                    break
                offset += len(data)
        for each in (client, server):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the other thread
            each.close()
