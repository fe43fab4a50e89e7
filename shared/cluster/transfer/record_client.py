"""Client of record servers: fetches a record by its ticket, within limits of time and memory."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from mmap import ACCESS_COPY, mmap

from shared.cluster.transfer.counters import TransferCounters
from shared.cluster.transfer.deadline import Deadline, receive, receive_into, send
from shared.cluster.transfer.errors import (
    EXPIRED,
    LOST,
    TOO_LARGE,
    UNREACHABLE,
    TransferError,
)
from shared.cluster.transfer.handshake import connect
from shared.cluster.transfer.memory_agent import MAX_OFFER_BYTES, MemoryAgent
from shared.cluster.transfer.record_memory import is_sealed
from shared.cluster.transfer.record_server import (
    BODY,
    LENGTH,
    OFFER,
    READ,
    REPLY,
    UNKNOWN,
    UNSUPPORTED,
)
from shared.cluster.transfer.ticket import RecordAddress, Ticket, boot_id

AUTO, SHM, TCP, NIXL = BACKENDS = ("auto", "shm", "tcp", "nixl")
MAX_IDLE_CONNECTIONS = 4
CONNECT_S = 2.0
LOOK_S = 0.05


@dataclass(frozen=True, eq=False)
class FetchedRecord:
    """Body of a record, and the memory that it occupies until `release`.

    Attributes:
      body: The bytes.
      backend: Backend that has transferred it.
    """

    body: memoryview
    backend: str
    _budget: ByteBudget

    def release(self) -> None:
        """Returns its bytes to the limit; the memory is freed with the last array on it."""
        self._budget.give_back(self.body.nbytes)


class ByteBudget:
    """Limit of bytes in memory, shared by threads."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_used = max_bytes, 0
        self._changed = threading.Condition()

    @property
    def num_used(self) -> int:
        """Bytes in use."""
        return self._num_used

    def take(self, count: int, deadline: Deadline) -> None:
        """Waits until the bytes are available.

        Raises:
          TransferError: They exceed the limit alone, or see `Deadline.remaining_s`.
        """
        if count > self._max_bytes:
            raise TransferError(
                TOO_LARGE,
                f"a record of {count} bytes exceeds the {self._max_bytes} bytes of "
                "--disaggregation-buffer-mib",
            )
        with self._changed:
            while self._num_used + count > self._max_bytes:
                self._changed.wait(min(LOOK_S, deadline.remaining_s()))
            self._num_used += count

    def give_back(self, count: int) -> None:
        """Makes bytes available again."""
        with self._changed:
            self._num_used -= count
            self._changed.notify_all()


class RecordClient:
    """Fetches records; keeps authenticated connections for further records.

    Args:
      backend: One of `BACKENDS`; `auto` selects shared memory within a host, else TCP. With `nixl`
        the tickets and offers take the connection that `auto` selects.
      secret: Secret of the servers; empty for none.
      max_bytes: Maximum bytes of all fetched records that are not released.
      counters: Counters of received records.
      agent: NIXL agent of the backend `nixl`; None with others.
    """

    def __init__(
        self,
        backend: str,
        secret: bytes,
        max_bytes: int,
        counters: TransferCounters,
        agent: MemoryAgent | None,
    ) -> None:
        self._backend, self._secret, self._counters = backend, secret, counters
        self._agent = agent
        self._budget, self._boot_id = ByteBudget(max_bytes), boot_id()
        self._idle: defaultdict[RecordAddress, list[socket.socket]] = defaultdict(list)
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Bytes of fetched records that are not released."""
        return self._budget.num_used

    def fetch(self, ticket: Ticket, deadline: Deadline) -> FetchedRecord:
        """Fetches a record; `FetchedRecord.release` frees its bytes.

        Raises:
          TransferError: The record did not arrive in time, or not as a whole.
        """
        began = time.monotonic()
        self._budget.take(ticket.num_bytes, deadline)
        try:
            with self._connected(ticket, deadline) as connection:
                backend, body = self._receive(connection, ticket.num_bytes, deadline)
        except BaseException:
            self._budget.give_back(ticket.num_bytes)
            raise
        self._counters.received(backend, ticket.num_bytes, time.monotonic() - began)
        return FetchedRecord(body, backend, self._budget)

    def _receive(
        self, connection: socket.socket, num_bytes: int, deadline: Deadline
    ) -> tuple[str, memoryview]:
        """Returns the backend and the body of a record after the first byte of its reply."""
        if self._agent is not None:
            return NIXL, _read_body(connection, num_bytes, self._agent, deadline)
        if connection.family == socket.AF_UNIX:
            return SHM, _mapped_body(connection, num_bytes, deadline)
        _check_reply(receive(connection, REPLY.size, deadline), num_bytes)
        body = _new_body(num_bytes)
        receive_into(connection, body, deadline)
        return TCP, body

    @property
    def _form(self) -> bytes:
        return BODY if self._agent is None else OFFER

    def close(self) -> None:
        """Closes idle connections."""
        with self._lock:
            taken, self._idle = self._idle, defaultdict(list)
        for connections in taken.values():
            for connection in connections:
                connection.close()

    @contextlib.contextmanager
    def _connected(self, ticket: Ticket, deadline: Deadline) -> Iterator[socket.socket]:
        """Yields a connection on which the ticket was sent and a reply has begun.

        The connection is kept for the next record, unless this one fails.
        """
        connection = self._take_idle(ticket, deadline) or self._open(ticket, deadline)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            kept = self._idle[ticket.address]
            if len(kept) < MAX_IDLE_CONNECTIONS:
                kept.append(connection)
                return
        connection.close()

    def _take_idle(self, ticket: Ticket, deadline: Deadline) -> socket.socket | None:
        """Returns a kept connection that still replies; the server closes idle ones."""
        while True:
            with self._lock:
                kept = self._idle[ticket.address]
                if not kept:
                    return None
                connection = kept.pop()
            try:
                _request(connection, ticket, self._form, deadline)
            except TransferError as error:
                connection.close()
                if error.reason != LOST:
                    raise
            else:
                return connection

    def _open(self, ticket: Ticket, deadline: Deadline) -> socket.socket:
        """Returns a new connection; raises the errors of `fetch`."""
        connection = self._connect(ticket.address, deadline)
        try:
            connect(connection, self._secret, deadline)
            _request(connection, ticket, self._form, deadline)
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, address: RecordAddress, deadline: Deadline) -> socket.socket:
        is_same_host = bool(address.boot_id) and address.boot_id == self._boot_id
        if self._backend == SHM or (self._backend in (AUTO, NIXL) and is_same_host):
            local = socket.socket(socket.AF_UNIX)
            try:
                with deadline.on(local):
                    local.connect(f"\0{address.socket_name}")
                return local
            except TransferError as error:
                local.close()
                if error.reason != LOST:
                    raise
                if self._backend == SHM:
                    message = "the record is on another host, which shared memory does not reach"
                    raise TransferError(UNREACHABLE, message) from error
            # Another network namespace of this host: TCP reaches it.
        try:
            remote = socket.create_connection(
                (address.host, address.port), min(CONNECT_S, deadline.remaining_s())
            )
        except OSError as error:
            deadline.remaining_s()
            message = f"{address.host}:{address.port} cannot be reached: {error}"
            raise TransferError(UNREACHABLE, message) from error
        remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return remote


def _request(connection: socket.socket, ticket: Ticket, form: bytes, deadline: Deadline) -> None:
    """Sends a request, and waits for the first byte of the reply, which stays in the socket."""
    send(connection, bytes.fromhex(ticket.ticket_id) + form, deadline)
    with deadline.on(connection):
        if not connection.recv(1, socket.MSG_PEEK):
            raise ConnectionResetError("closed by the other side")


def _new_body(num_bytes: int) -> memoryview:
    """Returns new memory; unlike an array's it is freed without the GIL."""
    return memoryview(mmap(-1, num_bytes)) if num_bytes else _EMPTY


def _read_body(
    connection: socket.socket, num_bytes: int, agent: MemoryAgent, deadline: Deadline
) -> memoryview:
    _check_reply(receive(connection, REPLY.size, deadline), num_bytes)
    (length,) = LENGTH.unpack(receive(connection, LENGTH.size, deadline))
    if length > MAX_OFFER_BYTES:
        raise TransferError(LOST, f"the offer has {length} bytes; at most {MAX_OFFER_BYTES} fit")
    offer = receive(connection, length, deadline)
    body = _new_body(num_bytes)
    agent.read(offer, body, deadline)
    send(connection, READ, deadline)
    return body


def _mapped_body(connection: socket.socket, num_bytes: int, deadline: Deadline) -> memoryview:
    with deadline.on(connection):
        reply, files, _, _ = socket.recv_fds(connection, REPLY.size, 1)
    try:
        reply += receive(connection, REPLY.size - len(reply), deadline)
        _check_reply(reply, num_bytes)
        if len(files) != 1 or not is_sealed(files[0], num_bytes):
            raise TransferError(LOST, "the other server passed no sealed memory of that size")
        # Pages are copied when written, so that arrays on it need not be read-only.
        return memoryview(mmap(files[0], num_bytes, access=ACCESS_COPY)) if num_bytes else _EMPTY
    finally:
        for file in files:
            os.close(file)  # the mapping stays


_EMPTY = memoryview(b"")


def _check_reply(reply: bytes, num_bytes: int) -> None:
    status, found = REPLY.unpack(reply)
    if status == UNSUPPORTED:
        raise TransferError(
            UNREACHABLE,
            "the prefill server has no NIXL; start it with --disaggregation-transfer-backend nixl",
        )
    if status == UNKNOWN:
        raise TransferError(EXPIRED, "the ticket has expired or was used before")
    if found != num_bytes:
        raise TransferError(LOST, f"the ticket has {num_bytes} bytes, but the server sends {found}")
