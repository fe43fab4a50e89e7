"""Transfer of records by NIXL: bytes, faults, and memory that stays registered only in use."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from multiprocessing.connection import Connection

import numpy as np
import psutil
import pytest

from shared.cluster.transfer.counters import TransferCounters
from shared.cluster.transfer.deadline import Deadline
from shared.cluster.transfer.errors import TransferError
from shared.cluster.transfer.memory_agent import MemoryAgent
from shared.cluster.transfer.record_client import RecordClient
from shared.cluster.transfer.record_server import RecordServer
from shared.cluster.transfer.record_store import RecordStore
from shared.cluster.transfer.ticket import Ticket
from tests.support.polling import wait_until
from tests.support.record_store import publish

needs_nixl = pytest.mark.skipif(find_spec("nixl") is None, reason="NIXL is the extra nixl")
SECRET, SIZE = b"0123456789abcdef", 1 << 24
BODY = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


def _send(link: Connection) -> None:
    """Process of the sender: publishes a record for each request until the link closes."""
    store = RecordStore(16 * SIZE, 60.0)
    listener = socket.create_server(("127.0.0.1", 0))
    server = RecordServer(store, [listener], SECRET, TransferCounters(), MemoryAgent())
    while link.recv():
        ticket_id, record = publish(store, os.urandom(8), {}, [BODY.data], 1)
        link.send(server.ticket(ticket_id, record).to_fields())
        link.send(store.num_bytes)


class Sender:
    """A record server in a process of its own."""

    def __init__(self) -> None:
        spawn = multiprocessing.get_context("spawn")
        self.link, theirs = spawn.Pipe()
        self.process = spawn.Process(target=_send, args=[theirs])
        self.process.start()

    def publish(self) -> tuple[Ticket, int]:
        """Returns a ticket, and the bytes of all records."""
        self.link.send(True)
        assert self.link.poll(60)
        return Ticket.from_fields(self.link.recv(), "127.0.0.1"), self.link.recv()


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.process.kill()
    made.process.join(10)


@pytest.fixture
def client() -> Iterator[RecordClient]:
    made = RecordClient("nixl", SECRET, 16 * SIZE, TransferCounters(), MemoryAgent())
    yield made
    made.close()


@needs_nixl
def test_records_are_read_whole(sender, client):
    for _ in range(3):
        fetched = client.fetch(sender.publish()[0], Deadline(30))
        assert fetched.backend == "nixl"
        assert bytes(fetched.body) == BODY.tobytes()
        fetched.release()
    assert client.num_bytes == 0
    assert wait_until(lambda: sender.publish()[1] <= 2 * SIZE)


@needs_nixl
def test_records_are_read_at_once(sender, client):
    tickets = [sender.publish()[0] for _ in range(6)]
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda ticket: client.fetch(ticket, Deadline(30)), tickets))
    assert all(bytes(each.body) == BODY.tobytes() for each in found)


@needs_nixl
@pytest.mark.parametrize(
    ("sent", "reasons"),
    [(signal.SIGSTOP, {"timeout"}), (signal.SIGKILL, {"lost", "unreachable"})],
)
def test_lost_sender_ends_fetch(sender, client, sent, reasons):
    """The next sender is not affected."""
    client.fetch(sender.publish()[0], Deadline(30)).release()
    ticket, _ = sender.publish()
    os.kill(sender.process.pid, sent)
    ended = (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    assert wait_until(lambda: psutil.Process(sender.process.pid).status() in ended)
    with pytest.raises(TransferError) as error:
        client.fetch(ticket, Deadline(1))
    assert error.value.reason in reasons
    assert client.num_bytes == 0
    other = Sender()
    assert bytes(client.fetch(other.publish()[0], Deadline(30)).body) == BODY.tobytes()
    other.process.kill()
    other.process.join(10)


@needs_nixl
def test_lost_memory_ends_read():
    """The sender ends after its offer: the read fails or times out, and its buffer stays."""
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_offer, args=[theirs])
    process.start()
    assert ours.poll(60)
    offer, agent = ours.recv(), MemoryAgent()
    process.kill()
    process.join(10)
    with pytest.raises(TransferError) as error:
        agent.read(offer, np.empty(SIZE, np.uint8).data, Deadline(2))
    assert error.value.reason in ("lost", "timeout")


def _offer(link: Connection) -> None:
    with MemoryAgent().offered(np.array(BODY).data) as offer:
        link.send(offer)
        signal.pause()


class AgentWithoutUse:
    """Agent of a client that receives no offer."""


def test_server_without_nixl_is_unreachable():
    store = RecordStore(SIZE, 60.0)
    listener = socket.create_server(("127.0.0.1", 0))
    server = RecordServer(store, [listener], SECRET, TransferCounters(), None)
    ticket_id, record = publish(store, b"", {}, [BODY[:9].data], 1)
    ticket = Ticket.from_fields(server.ticket(ticket_id, record).to_fields(), "127.0.0.1")
    agent = AgentWithoutUse()
    client = RecordClient("nixl", SECRET, SIZE, TransferCounters(), agent)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TransferError, match="--disaggregation-transfer-backend nixl") as error:
        client.fetch(ticket, Deadline(5))
    assert error.value.reason == "unreachable"
    server.close()
    client.close()
