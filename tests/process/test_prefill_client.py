"""Client of prefill servers: selection, failover, and rejected responses."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from shared.boundary.kv_transfer import TransferRecord, TransferRejected
from shared.cluster.transfer.counters import TransferCounters
from shared.cluster.transfer.deadline import Deadline
from shared.cluster.transfer.errors import TransferError
from shared.cluster.transfer.record_client import RecordClient
from shared.cluster.transfer.record_server import RecordServer
from shared.cluster.transfer.record_store import RecordStore
from shared.engine.request import CacheNamespace
from shared.options.disaggregation import ServerAddress
from shared.process.disaggregation.prefill_client import PrefillClient, PrefillServers
from shared.process.disaggregation.prompt_key import PromptKey
from tests.support.fake_transfers import FINGERPRINT, PAGE, record_of
from tests.support.polling import wait_until
from tests.support.record_store import publish

OWNER = CacheNamespace("tenant", "sql", "1")
PREFIX = PromptKey(tuple(range(20)), OWNER, ())
KEY = "0123456789abcdef"


class Prefiller:
    """An HTTP server that replies with a ticket for a record, or with the status of a test.

    Attributes:
      status: Status of the response.
      record: Record of the ticket.
      parts: Ends of parts before the last one, in tokens.
      ends_early: True to close the connection before the last part.
      flips: Byte of the last body to damage; None for none.
      damage: Fields of the header to replace.
      bodies: Bodies of all requests.
      waits: Time at which it replies.
    """

    def __init__(self) -> None:
        self.status, self.record = 200, record_of(PREFIX.tokens, PREFIX.namespace)
        self.parts: tuple[int, ...] = ()
        self.ends_early, self.flips = False, None
        self.damage: dict[str, object] = {}
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.waits = threading.Event()
        self.waits.set()
        self.store = RecordStore(1 << 20, 30.0)
        listener = socket.create_server(("127.0.0.1", 0))
        self.records = RecordServer(self.store, [listener], b"", TransferCounters(), None)
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                owner.reply(self)

            def log_message(self, *args: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = ServerAddress("127.0.0.1", self._http.server_address[1], False)
        threading.Thread(target=self._http.serve_forever, args=[0.05], daemon=True).start()

    def reply(self, handler: BaseHTTPRequestHandler) -> None:
        self.bodies.append(json.loads(handler.rfile.read(int(handler.headers["Content-Length"]))))
        self.keys.append(handler.headers["Authorization"])
        self.waits.wait(10)
        handler.send_response(self.status)
        handler.end_headers()
        first = 0
        for end in self.parts:
            part = record_of(PREFIX.tokens[:end], OWNER, first_page=first, is_last=False)
            handler.wfile.write(self.line(part, part.header.to_fields(), part.parts()))
            first = end // PAGE
        if self.ends_early:
            return
        record = self.record
        if first:
            record = record_of(PREFIX.tokens, OWNER, first_page=first)
        header = record.header.to_fields() | self.damage
        handler.wfile.write(self.line(record, header, self.body(record)))

    def line(self, record: TransferRecord, header: dict, body: list[memoryview]) -> bytes:
        published = publish(self.store, b"", header, body, record.checksum())
        ticket = self.records.ticket(published[0], published[1])
        return json.dumps(ticket.to_fields()).encode() + b"\n"

    def body(self, record: TransferRecord) -> list[memoryview]:
        body = bytearray(b"".join(record.parts()))
        if self.flips is not None:
            body[self.flips] ^= 1
        return [memoryview(body)]

    def close(self) -> None:
        self.waits.set()
        self._http.shutdown()
        self._http.server_close()
        self.records.close()


@pytest.fixture
def prefillers() -> Iterator[list[Prefiller]]:
    made = [Prefiller(), Prefiller()]
    yield made
    for each in made:
        each.close()


@pytest.fixture
def fetch(prefillers) -> Iterator[Callable[..., TransferRecord]]:
    records = RecordClient("auto", b"", 1 << 20, TransferCounters(), None)
    addresses = [each.address for each in prefillers]
    client = PrefillClient(addresses, records, KEY, FINGERPRINT)

    def run(deadline: Deadline | None = None) -> TransferRecord:
        ((record, memory),) = client.fetch(PREFIX, deadline or Deadline(10))
        memory.release()
        return record

    yield run
    assert records.num_bytes == 0
    records.close()


def _reason(fetch: Callable[..., TransferRecord], deadline: Deadline | None = None) -> str:
    with pytest.raises((TransferError, TransferRejected)) as error:
        fetch(deadline)
    return error.value.reason


def test_fetch_returns_record_of_prefix(prefillers, fetch):
    assert b"".join(fetch().parts()) == b"".join(prefillers[0].record.parts())
    bodies = [body for each in prefillers for body in each.bodies]
    assert bodies == [{"tokens": list(PREFIX.tokens), "tenant": "tenant", "lora_name": "sql"}]
    assert {key for each in prefillers for key in each.keys} == {f"Bearer {KEY}"}


def test_parts_arrive_in_order(prefillers):
    prefillers[0].parts = (8, 16)
    records = RecordClient("auto", b"", 1 << 20, TransferCounters(), None)
    client = PrefillClient([prefillers[0].address], records, None, FINGERPRINT)
    found = []
    for record, memory in client.fetch(PREFIX, Deadline(10)):
        found.append(b"".join(record.parts()))
        memory.release()
    assert b"".join(found) == b"".join(prefillers[0].record.parts())
    assert len(found) == 3
    records.close()


@pytest.mark.parametrize("fault", ["end", "damage"])
def test_fault_after_first_part_selects_no_other_server(prefillers, fault):
    for each in prefillers:
        each.parts, each.ends_early = (8,), fault == "end"
        each.flips = 0 if fault == "damage" else None
    records = RecordClient("auto", b"", 1 << 20, TransferCounters(), None)
    client = PrefillClient([each.address for each in prefillers], records, None, FINGERPRINT)
    parts = client.fetch(PREFIX, Deadline(10))
    next(parts)[1].release()
    with pytest.raises((TransferError, TransferRejected)) as error:
        next(parts)
    assert error.value.reason == ("lost" if fault == "end" else "checksum")
    assert sum(len(each.bodies) for each in prefillers) == 1
    assert records.num_bytes == 0
    records.close()


def test_equal_prefixes_select_same_server(prefillers, fetch):
    for _ in range(3):
        fetch()
    assert sorted(len(each.bodies) for each in prefillers) == [0, 3]


@pytest.mark.parametrize(("status", "reason"), [(404, "not_cached"), (503, "busy")])
def test_unable_server_is_followed_by_next(prefillers, fetch, status, reason):
    for each in prefillers:
        each.status = status
    assert _reason(fetch) == reason
    assert [len(each.bodies) for each in prefillers] == [1, 1]
    for each in prefillers:
        each.status = 200
        fetch()


@pytest.mark.parametrize(
    ("status", "reason"),
    [(401, "rejected"), (599, "rejected"), (413, "too_large")],
)
def test_rejected_prompt_is_not_sent_again(prefillers, fetch, status, reason):
    for each in prefillers:
        each.status = status
    assert _reason(fetch) == reason
    assert sum(len(each.bodies) for each in prefillers) == 1


def test_unreachable_servers_are_skipped_later(prefillers, fetch):
    for each in prefillers:
        each._http.shutdown()
        each._http.server_close()
    assert _reason(fetch) == "unreachable"
    assert _reason(fetch) == "unreachable"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        (record_of(range(1, 21), OWNER), "tokens"),
        (record_of(PREFIX.tokens, OWNER._replace(tenant="other")), "tokens"),
        (record_of([*PREFIX.tokens, 20, 21, 22, 23], OWNER), "tokens"),
        (record_of(PREFIX.tokens, OWNER._replace(adapter="")), "tokens"),
        (record_of(PREFIX.tokens, OWNER._replace(version="2")), "tokens"),
    ],
    ids=["other tokens", "other tenant", "longer", "other adapter", "other version"],
)
def test_record_of_another_prompt_is_rejected(prefillers, fetch, record, reason):
    for each in prefillers:
        each.record = record
    assert _reason(fetch) == reason


@pytest.mark.parametrize("backend", ["shm", "tcp"])
@pytest.mark.parametrize(
    ("flips", "damage"),
    [(0, {}), (-1, {}), (None, {"is_whole": [1, 0, 1, 1, 1]})],
    ids=["first byte", "last byte", "header"],
)
def test_damaged_record_is_rejected(prefillers, backend, flips, damage):
    prefillers[0].flips, prefillers[0].damage = flips, damage
    records = RecordClient(backend, b"", 1 << 20, TransferCounters(), None)
    client = PrefillClient([prefillers[0].address], records, None, FINGERPRINT)
    with pytest.raises(TransferRejected) as error:
        list(client.fetch(PREFIX, Deadline(10)))
    assert error.value.reason == "checksum"
    assert records.num_bytes == 0
    records.close()


def test_record_of_other_weights_is_rejected(prefillers):
    records = RecordClient("auto", b"", 1 << 20, TransferCounters(), None)
    client = PrefillClient([prefillers[0].address], records, None, "cd" * 32)
    with pytest.raises(TransferRejected, match="another model") as error:
        list(client.fetch(PREFIX, Deadline(10)))
    assert error.value.reason == "fingerprint"
    assert records.num_bytes == 0


def test_silent_server_ends_at_deadline(prefillers, fetch):
    for each in prefillers:
        each.waits.clear()
    assert _reason(fetch, Deadline(0.3)) == "timeout"


def test_cancel_ends_request_at_once(prefillers, fetch):
    for each in prefillers:
        each.waits.clear()
    deadline, reasons = Deadline(30), list[str]()
    thread = threading.Thread(target=lambda: reasons.append(_reason(fetch, deadline)))
    thread.start()
    assert wait_until(lambda: any(each.bodies for each in prefillers))
    deadline.cancel()
    thread.join(60)
    assert reasons == ["cancelled"]


def test_busiest_server_is_tried_last():
    """Each of two servers may have 1.25 times the mean of open requests, rounded up."""
    servers = PrefillServers([ServerAddress(f"10.0.0.{n}", 80, False) for n in range(2)])
    first = servers.order(b"prefix")[0]
    with servers.counted(first), servers.counted(first):
        assert servers.order(b"prefix")[0] != first
    assert servers.order(b"prefix")[0] == first
