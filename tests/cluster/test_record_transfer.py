"""Transfer of records between servers: backends, authentication, faults, limits and leaks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from shared.cluster.transfer import record_server
from shared.cluster.transfer.counters import TransferCounters
from shared.cluster.transfer.deadline import Deadline
from shared.cluster.transfer.errors import TransferError
from shared.cluster.transfer.record_client import RecordClient
from shared.cluster.transfer.record_server import RecordServer
from shared.cluster.transfer.record_store import RecordStore
from shared.cluster.transfer.ticket import Ticket
from tests.support.faulty_proxy import Damage, FaultyProxy, cut, flip, unchanged
from tests.support.polling import wait_until
from tests.support.record_store import publish

SECRET, MAX_BYTES, COUNT, CHECKSUM = b"0123456789abcdef", 1 << 26, 3_000_001, 123
HEADER = {"version": 1, "tokens": b"\1\0\0\0"}
BODY = np.random.default_rng(0).integers(0, 256, COUNT, np.uint8)
LARGE = np.zeros(1 << 25, np.uint8)  # more than the socket buffers hold
PARTS = [BODY[:1000].data, BODY[1000:].data]
HANDSHAKE_AND_REPLY = 64 + record_server.REPLY.size


class Sender:
    """A record server of this process."""

    def __init__(self, max_bytes: int = MAX_BYTES, ticket_s: float = 30.0) -> None:
        self.store, self.counters = RecordStore(max_bytes, ticket_s), TransferCounters()
        listener = socket.create_server(("127.0.0.1", 0))
        self.server = RecordServer(self.store, [listener], SECRET, self.counters, None)

    def publish(self, key: bytes = b"key", parts: Sequence[memoryview] = PARTS) -> Ticket:
        ticket_id, record = publish(self.store, key, HEADER, parts, CHECKSUM)
        ticket = self.server.ticket(ticket_id, record)
        return Ticket.from_fields(ticket.to_fields(), "127.0.0.1")


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.server.close()


@pytest.fixture
def client() -> Iterator[Callable[..., RecordClient]]:
    made: list[RecordClient] = []

    def new(backend: str, secret: bytes = SECRET, max_bytes: int = MAX_BYTES) -> RecordClient:
        made.append(RecordClient(backend, secret, max_bytes, TransferCounters(), None))
        return made[-1]

    yield new
    for each in made:
        each.close()


@pytest.fixture
def proxied(sender) -> Iterator[Callable[..., tuple[FaultyProxy, Ticket]]]:
    made: list[FaultyProxy] = []

    def new(damage: Damage = unchanged, stops_at: int | None = None) -> tuple[FaultyProxy, Ticket]:
        ticket = sender.publish()
        made.append(FaultyProxy(ticket.address.port, damage, stops_at))
        return made[-1], replace(ticket, address=replace(ticket.address, port=made[-1].port))

    yield new
    for each in made:
        each.close()


def _fails(client: RecordClient, ticket: Ticket, seconds: float = 10.0) -> str:
    """Returns the reason of a failed transfer."""
    with pytest.raises(TransferError) as error:
        client.fetch(ticket, Deadline(seconds))
    assert client.num_bytes == 0
    return error.value.reason


@pytest.mark.parametrize(("backend", "used"), [("auto", "shm"), ("shm", "shm"), ("tcp", "tcp")])
def test_fetch_returns_published_bytes(sender, client, backend, used):
    receiver = client(backend)
    for number in range(3):
        ticket = sender.publish(b"%d" % number)
        assert (ticket.header, ticket.num_bytes, ticket.checksum) == (HEADER, COUNT, CHECKSUM)
        record = receiver.fetch(ticket, Deadline(10))
        assert record.backend == used
        assert bytes(record.body) == BODY.tobytes()
        assert receiver.num_bytes == COUNT
        record.release()
    assert receiver.num_bytes == 0
    assert wait_until(lambda: sender.store.num_bytes == 0)
    sent = f'kv_transfer_bytes_total{{direction="sent",backend="{used}"}}'
    assert wait_until(lambda: sender.counters.snapshot()[sent] == 3 * COUNT)  # after the last byte


def test_auto_selects_tcp_between_hosts(sender, client):
    receiver, ticket = client("auto"), sender.publish()
    other_host = replace(ticket.address, boot_id="another")
    assert receiver.fetch(replace(ticket, address=other_host), Deadline(10)).backend == "tcp"
    ticket = sender.publish()
    other_namespace = replace(ticket.address, socket_name="not there")
    assert receiver.fetch(replace(ticket, address=other_namespace), Deadline(10)).backend == "tcp"


def test_shm_rejects_record_of_another_host(sender, client):
    ticket = sender.publish()
    address = replace(ticket.address, socket_name="not there")
    assert _fails(client("shm"), replace(ticket, address=address)) == "unreachable"


def test_client_uses_one_connection_for_many_records(client, proxied, sender):
    proxy, first = proxied()
    receiver = client("tcp")
    for ticket in [first, *(replace(sender.publish(), address=first.address) for _ in range(4))]:
        receiver.fetch(ticket, Deadline(10)).release()
    assert proxy.num_connections == 1


def test_client_replaces_closed_idle_connection(sender, client, monkeypatch):
    """The server waits for a second request of the first connection for a short time only."""
    usual, numbers = record_server.receive, count()

    def receive(connection: socket.socket, num_bytes: int, deadline: Deadline) -> bytes:
        return usual(connection, num_bytes, Deadline(0.05) if next(numbers) == 1 else deadline)

    monkeypatch.setattr(record_server, "receive", receive)
    receiver, num_threads = client("tcp"), threading.active_count()
    receiver.fetch(sender.publish(), Deadline(60)).release()
    assert wait_until(lambda: threading.active_count() == num_threads)
    receiver.fetch(sender.publish(), Deadline(60)).release()
    assert next(numbers) >= 3


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize("secret", [b"", b"another", SECRET + b"0"])
def test_fetch_requires_same_secret(sender, client, backend, secret):
    ticket = sender.publish()
    assert _fails(client(backend, secret), ticket) == "secret"
    client(backend).fetch(ticket, Deadline(10))  # the ticket was not used


def test_server_closes_clients_without_proof(sender, monkeypatch):
    address = ("127.0.0.1", sender.publish().address.port)
    for sent, limit_s in ((b"", 0.2), (b"GET / HTTP/1.1\r\n\r\n", 0.2), (bytes(64), 60)):
        monkeypatch.setattr(record_server, "HANDSHAKE_S", limit_s)
        with socket.create_connection(address, 60) as stranger:
            stranger.sendall(sent)
            received = b""
            while data := stranger.recv(1 << 16):
                received += data
            assert len(received) <= 64
    counted = {'kv_transfer_failures_total{reason="secret"}': 1}
    assert wait_until(lambda: sender.counters.snapshot() == counted)


def test_ticket_is_valid_once(sender, client):
    receiver, ticket = client("tcp"), sender.publish()
    receiver.fetch(ticket, Deadline(10)).release()
    assert _fails(receiver, ticket) == "expired"


def test_ticket_expires_with_its_record(client):
    sender = Sender(ticket_s=0.1)
    ticket = sender.publish()
    time.sleep(0.15)
    sender.store.expire()
    assert sender.store.num_bytes == sender.store.num_records == 0
    assert _fails(client("tcp"), ticket) == "expired"
    sender.server.close()


def test_tickets_of_one_prefix_share_its_record(sender, client):
    first, receiver = sender.publish(), client("tcp")
    found = sender.store.share(b"key")
    assert found is not None
    assert sender.store.share(b"other") is None
    second = replace(first, ticket_id=found[0])
    assert (sender.store.num_records, sender.store.num_bytes) == (1, COUNT)
    for ticket in (first, second):
        assert sender.store.num_bytes == COUNT
        assert bytes(receiver.fetch(ticket, Deadline(10)).body) == BODY.tobytes()
    assert wait_until(lambda: sender.store.num_bytes == 0)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip(65), "lost"),  # the length
        (cut(HANDSHAKE_AND_REPLY + COUNT // 2), "lost"),
        (cut(3), "lost"),
    ],
    ids=["length", "truncated", "cut handshake"],
)
def test_fetch_detects_damaged_record(proxied, client, damage, reason):
    _, ticket = proxied(damage)
    assert _fails(client("tcp"), ticket) == reason


def test_fetch_ends_at_deadline(proxied, client):
    _, ticket = proxied(stops_at=COUNT // 2)
    began = time.monotonic()
    assert _fails(client("tcp"), ticket, seconds=0.3) == "timeout"
    assert time.monotonic() - began > 0.25


def test_cancel_ends_fetch_at_once(proxied, client):
    proxy, ticket = proxied(stops_at=COUNT // 2)
    deadline, reasons = Deadline(30), []

    def fetch() -> None:
        with pytest.raises(TransferError) as error:
            client("tcp").fetch(ticket, deadline)
        reasons.append(error.value.reason)

    thread = threading.Thread(target=fetch)
    thread.start()
    assert proxy.stopped.wait(10)
    deadline.cancel()
    thread.join(5)
    assert reasons == ["cancelled"]


def test_closed_port_is_unreachable(sender, client):
    ticket = sender.publish()
    sender.server.close()
    assert _fails(client("tcp"), ticket) == "unreachable"
    assert _fails(client("shm"), ticket) == "unreachable"


def test_store_limits_its_bytes(client):
    sender = Sender(max_bytes=COUNT + 5)
    ticket = sender.publish()
    with pytest.raises(TransferError, match="disaggregation-buffer-mib") as error:
        sender.publish(b"second")
    assert error.value.reason == "too_large"
    sender.store.drop(ticket.ticket_id)
    sender.publish(b"second")
    sender.server.close()


def test_client_limits_its_bytes(sender, client):
    assert _fails(client("tcp", max_bytes=COUNT - 1), sender.publish()) == "too_large"
    receiver = client("tcp", max_bytes=COUNT + 1)
    first = receiver.fetch(sender.publish(), Deadline(10))
    with pytest.raises(TransferError) as error:
        receiver.fetch(sender.publish(), Deadline(0.2))
    assert error.value.reason == "timeout"
    threading.Timer(0.1, first.release).start()
    receiver.fetch(sender.publish(), Deadline(10)).release()


def test_client_rejects_memory_without_seals(sender, client, monkeypatch):
    """Memory that the sender may truncate would end the receiver by SIGBUS."""
    monkeypatch.setattr("shared.cluster.transfer.record_memory.SEALS", 0)
    assert _fails(client("shm"), sender.publish()) == "lost"


@pytest.mark.parametrize(("backend", "is_same"), [("shm", True), ("tcp", False)])
def test_memory_is_reused_after_its_receiver(sender, client, backend, is_same):
    """A socket has the pages of a record until the receiver reads them, so TCP excludes reuse."""

    def published() -> tuple[Ticket, int]:
        ticket_id, record = publish(sender.store, b"key", HEADER, PARTS, CHECKSUM)
        fields = sender.server.ticket(ticket_id, record).to_fields()
        return Ticket.from_fields(fields, "127.0.0.1"), os.fstat(record.memory.file).st_ino

    receiver, (first, inode) = client(backend), published()
    received = receiver.fetch(first, Deadline(10))
    assert wait_until(lambda: sender.store.num_records == 0)
    second, other = published()
    assert other != inode
    sender.store.drop(second.ticket_id)
    assert bytes(received.body) == BODY.tobytes()
    received.release()
    del received
    assert (inode in (published()[1], published()[1])) == is_same


def test_transfers_leave_no_descriptors(sender, client):
    def fetch() -> None:
        for backend in ("shm", "tcp"):
            receiver = client(backend)
            receiver.fetch(sender.publish(), Deadline(10)).release()
            _fails(client(backend, b"other"), sender.publish())
            _fails(client(backend), replace(sender.publish(), ticket_id="00" * 16))
            receiver.close()
        sender.store.close()

    def count() -> int:
        sender.store.close()  # memory that waits for a later record has descriptors too
        return len(os.listdir("/proc/self/fd"))

    fetch()
    assert wait_until(lambda: not sender.store.num_bytes)
    time.sleep(0.1)
    before = count()
    for _ in range(5):
        fetch()
    assert wait_until(lambda: count() <= before)


def _serve_until_killed(link) -> None:
    sender = Sender()
    link.send(sender.publish(parts=[LARGE.data]))
    signal.pause()


def test_killed_sender_leaves_nothing(client):
    """The first client has mapped the record, the second is in the middle of it."""
    segments = set(Path("/dev/shm").iterdir())
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve_until_killed, args=[theirs])
    process.start()
    assert ours.poll(60)
    ticket = ours.recv()
    proxy = FaultyProxy(ticket.address.port, unchanged, stops_at=COUNT // 2)
    address = replace(ticket.address, port=proxy.port)
    reasons: list[str] = []
    thread = threading.Thread(
        target=lambda: reasons.append(_fails(client("tcp"), replace(ticket, address=address)))
    )
    thread.start()
    assert proxy.stopped.wait(10)
    process.kill()
    process.join(10)
    proxy.released.set()
    thread.join(10)
    proxy.close()
    assert reasons == ["lost"]
    assert _fails(client("auto"), ticket) == "unreachable"
    assert set(Path("/dev/shm").iterdir()) <= segments


def test_ticket_fields_share_header(sender):
    """A copy of each token would delay the engine's thread."""
    ticket = sender.publish()
    assert ticket.to_fields()["header"] is ticket.header
