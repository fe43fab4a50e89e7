"""Socket operations that end at a deadline, or when their transfer is cancelled."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Iterator

from shared.cluster.transfer.errors import CANCELLED, LOST, TIMEOUT, TransferError

SENDFILE_BYTES = 1 << 24


class Deadline:
    """End of all waits of one transfer; another thread may cancel it earlier.

    Args:
      seconds: Seconds from now.
    """

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._is_cancelled = False
        self._connection: socket.socket | None = None

    def cancel(self) -> None:
        """Ends the transfer; a socket operation in progress fails at once."""
        self._is_cancelled = True
        connection = self._connection
        if connection is not None:
            with contextlib.suppress(OSError):  # closed meanwhile
                connection.shutdown(socket.SHUT_RDWR)

    def remaining_s(self) -> float:
        """Returns the remaining seconds.

        Raises:
          TransferError: The deadline has passed, or the transfer is cancelled.
        """
        if self._is_cancelled:
            raise TransferError(CANCELLED, "the transfer was cancelled")
        left = self._until - time.monotonic()
        if left <= 0:
            raise TransferError(TIMEOUT, "the transfer did not finish in time")
        return left

    @contextlib.contextmanager
    def on(self, connection: socket.socket) -> Iterator[None]:
        """Converts errors of a connection to `TransferError`; `cancel` shuts the connection down.

        Raises:
          TransferError: The deadline passed, the transfer was cancelled, or the connection closed.
        """
        self._connection = connection
        try:
            connection.settimeout(self.remaining_s())
            yield
        except OSError as error:
            self.remaining_s()  # raises if this is the cause
            if isinstance(error, TimeoutError):
                raise TransferError(TIMEOUT, "the transfer did not finish in time") from error
            raise TransferError(LOST, f"the connection failed: {error}") from error
        finally:
            self._connection = None


def receive_into(connection: socket.socket, view: memoryview, deadline: Deadline) -> None:
    """Fills a buffer.

    Raises:
      TransferError: See `Deadline.on`.
    """
    with deadline.on(connection):
        while view:
            connection.settimeout(deadline.remaining_s())
            count = connection.recv_into(view)
            if not count:
                raise ConnectionResetError("closed by the other side")
            view = view[count:]


def receive(connection: socket.socket, count: int, deadline: Deadline) -> bytes:
    """Returns exactly `count` bytes; raises the errors of `receive_into`."""
    found = bytearray(count)
    receive_into(connection, memoryview(found), deadline)
    return bytes(found)


def send(connection: socket.socket, data: bytes, deadline: Deadline) -> None:
    """Sends all bytes; raises the errors of `receive_into`."""
    with deadline.on(connection):
        connection.sendall(data)


def send_file(connection: socket.socket, file: int, count: int, deadline: Deadline) -> None:
    """Sends the first `count` bytes of a file without copying them to this process.

    Raises:
      TransferError: See `Deadline.on`.
    """
    sent = 0
    with deadline.on(connection):
        poll = select.poll()
        poll.register(connection, select.POLLOUT)
        while sent < count:
            if not poll.poll(1000 * deadline.remaining_s()):
                raise TimeoutError
            # A socket with a timeout does not block, so `sendfile` sends what fits.
            most = min(SENDFILE_BYTES, count - sent)
            try:
                done = os.sendfile(connection.fileno(), file, sent, most)
            except BlockingIOError:
                continue
            if not done:
                raise OSError("the record is shorter than its length")
            sent += done
