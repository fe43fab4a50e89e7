"""Server of held records: a Unix socket passes a descriptor, TCP sends the bytes, NIXL lets the
client read registered memory.

After the handshake a client sends requests: a ticket id of `ID_BYTES`, and `BODY` or `OFFER`. Each
reply is a `REPLY`. The body follows on TCP. With `OFFER` the length and bytes of an offer follow,
and the client sends `READ` once it has read the memory. One connection serves many records.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import struct
import threading
import time
from collections.abc import Sequence
from mmap import ACCESS_COPY, mmap

from shared.cluster.transfer.counters import TransferCounters
from shared.cluster.transfer.deadline import Deadline, receive, send, send_file
from shared.cluster.transfer.errors import SECRET, TransferError
from shared.cluster.transfer.handshake import accept
from shared.cluster.transfer.memory_agent import MemoryAgent
from shared.cluster.transfer.record_store import HeldRecord, RecordStore
from shared.cluster.transfer.ticket import ID_BYTES, RecordAddress, Ticket, boot_id

BODY, OFFER, READ = b"\0", b"\1", b"\2"
REPLY, LENGTH = struct.Struct("<BQ"), struct.Struct("<I")
UNKNOWN, FOUND, UNSUPPORTED = range(3)
"""States of a `REPLY`, which has the bytes of the body too: unknown ticket, record, no NIXL."""

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
      agent: NIXL agent; None without NIXL.
    """

    def __init__(
        self,
        store: RecordStore,
        listeners: Sequence[socket.socket],
        secret: bytes,
        counters: TransferCounters,
        agent: MemoryAgent | None,
    ) -> None:
        self._store, self._secret, self._counters = store, secret, counters
        self._agent = agent
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
                request = receive(connection, ID_BYTES + 1, Deadline(IDLE_S))
                self._send(connection, request[:ID_BYTES].hex(), request[ID_BYTES:])
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

    def _send(self, connection: socket.socket, ticket: str, form: bytes) -> None:
        deadline, began = Deadline(SEND_S), time.monotonic()
        try:
            record = self._store.open(ticket)
        except TransferError as error:
            self._counters.fail(error.reason)
            send(connection, REPLY.pack(UNKNOWN, 0), deadline)
            return
        try:
            backend = self._send_record(connection, record, form, deadline)
        except TransferError as error:
            self._counters.fail(error.reason)
            raise
        finally:
            self._store.close_reader(record)
        if backend is not None:
            self._counters.sent(backend, record.num_bytes, time.monotonic() - began)

    def _send_record(
        self, connection: socket.socket, record: HeldRecord, form: bytes, deadline: Deadline
    ) -> str | None:
        """Sends a record; returns the backend, or None if it is not supported here."""
        if form == OFFER:
            if self._agent is None:
                send(connection, REPLY.pack(UNSUPPORTED, 0), deadline)
                return None
            _offer(connection, record, self._agent, deadline)
            return "nixl"
        if connection.family == socket.AF_UNIX:
            _send_descriptor(connection, record, deadline)
            return "shm"
        record.memory.is_reusable = False  # the socket has its pages until the client reads them
        send(connection, REPLY.pack(FOUND, record.num_bytes), deadline)
        send_file(connection, record.memory.file, record.num_bytes, deadline)
        return "tcp"


def _send_descriptor(connection: socket.socket, record: HeldRecord, deadline: Deadline) -> None:
    with deadline.on(connection), record.memory.opened() as file:
        socket.send_fds(connection, [REPLY.pack(FOUND, record.num_bytes)], [file])


def _offer(
    connection: socket.socket, record: HeldRecord, agent: MemoryAgent, deadline: Deadline
) -> None:
    # A network adapter registers writable memory only; a shared mapping of a sealed file is not.
    body = memoryview(mmap(record.memory.file, record.num_bytes, access=ACCESS_COPY))
    with agent.offered(body) as offer:
        reply = REPLY.pack(FOUND, record.num_bytes) + LENGTH.pack(len(offer)) + offer
        send(connection, reply, deadline)
        receive(connection, len(READ), deadline)
