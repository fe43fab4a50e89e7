"""Server of held records: a Unix socket passes a descriptor, TCP sends the bytes.

After the handshake a client sends ticket ids of `ID_BYTES`. Each reply is a `REPLY`, followed by
the body on TCP. One connection serves many records.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence

from shared.cluster.transfer.counters import TransferCounters
from shared.cluster.transfer.deadline import Deadline, receive, send, send_file
from shared.cluster.transfer.errors import SECRET, TransferError
from shared.cluster.transfer.handshake import accept
from shared.cluster.transfer.record_store import HeldRecord, RecordStore
from shared.cluster.transfer.ticket import ID_BYTES, RecordAddress, Ticket, boot_id

REPLY = struct.Struct("<BQ")
"""Reply: 1 for a record or 0 for an unknown ticket, and bytes of the body."""

MAX_CONNECTIONS = 64
HANDSHAKE_S, IDLE_S, SEND_S, END_S = 5.0, 120.0, 60.0, 0.5
"""Limits: handshake, time between two records of a connection, one record, end of all threads."""


class RecordServer:
    """Threads that send held records to other servers.

    Args:
      store: The records.
      listeners: Listening TCP sockets; closed with the server.
      secret: Secret that clients must have; empty for none.
      counters: Counters of sent records and failures.
    """

    def __init__(
        self,
        store: RecordStore,
        listeners: Sequence[socket.socket],
        secret: bytes,
        counters: TransferCounters,
    ) -> None:
        self._store, self._secret, self._counters = store, secret, counters
        name = f"tandem-kv-{secrets.token_hex(ID_BYTES)}"
        local = socket.socket(socket.AF_UNIX)
        local.bind(f"\0{name}")  # an abstract name leaves no file
        local.listen()
        port = listeners[0].getsockname()[1]
        self._address = RecordAddress(boot_id=boot_id(), socket_name=name, host="", port=port)
        self._listeners = [local, *listeners]
        self._connections: set[socket.socket] = set()
        self._lock, self._is_closed = threading.Lock(), False
        self._threads = [
            threading.Thread(target=self._accept, args=[each], daemon=True)
            for each in self._listeners
        ]
        for thread in self._threads:
            thread.start()

    def ticket(self, ticket_id: str, record: HeldRecord) -> Ticket:
        """Returns the ticket of a published record."""
        return Ticket(
            ticket_id=ticket_id,
            address=self._address,
            num_bytes=record.num_bytes,
            checksum=record.checksum,
            header=record.header,
        )

    def close(self) -> None:
        """Ends all threads and transfers, and frees all records."""
        with self._lock:
            self._is_closed = True
            open_sockets = [*self._listeners, *self._connections]
        for each in open_sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits
        until = time.monotonic() + END_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        for each in self._listeners:
            each.close()
        self._store.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                if self._is_closed:
                    return
                time.sleep(0.1)  # for example no free descriptors
                continue
            with self._lock:
                if self._is_closed or len(self._connections) >= MAX_CONNECTIONS:
                    connection.close()
                    continue
                self._connections.add(connection)
                thread = threading.Thread(target=self._serve, args=[connection], daemon=True)
                self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
                thread.start()

    def _serve(self, connection: socket.socket) -> None:
        """Serves one connection until it closes, is idle for too long, or a transfer fails."""
        with contextlib.suppress(TransferError), connection:
            self._authenticate(connection)
            while not self._is_closed:
                ticket = receive(connection, ID_BYTES, Deadline(IDLE_S))
                self._send(connection, ticket.hex())
        with self._lock:
            self._connections.discard(connection)

    def _authenticate(self, connection: socket.socket) -> None:
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            accept(connection, self._secret, Deadline(HANDSHAKE_S))
        except TransferError as error:
            if error.reason == SECRET:  # other causes are port scans and health checks
                self._counters.fail(SECRET)
            raise

    def _send(self, connection: socket.socket, ticket: str) -> None:
        deadline, began = Deadline(SEND_S), time.monotonic()
        try:
            record = self._store.open(ticket)
        except TransferError as error:
            self._counters.fail(error.reason)
            send(connection, REPLY.pack(0, 0), deadline)
            return
        is_local = connection.family == socket.AF_UNIX
        try:
            if is_local:
                _send_descriptor(connection, record, deadline)
            else:
                send(connection, REPLY.pack(1, record.num_bytes), deadline)
                send_file(connection, record.file, record.num_bytes, deadline)
        except TransferError as error:
            self._counters.fail(error.reason)
            raise
        finally:
            self._store.close_reader(record)
        seconds = time.monotonic() - began
        self._counters.sent("shm" if is_local else "tcp", record.num_bytes, seconds)


def _send_descriptor(connection: socket.socket, record: HeldRecord, deadline: Deadline) -> None:
    with deadline.on(connection):
        socket.send_fds(connection, [REPLY.pack(1, record.num_bytes)], [record.file])
