"""KV cache for other servers: runs of prompts, shared records, tickets, aborts and limits."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from shared.boundary.kv_transfer import TransferHeader, TransferRecord
from shared.cluster.transfer.counters import TransferCounters
from shared.cluster.transfer.deadline import Deadline
from shared.cluster.transfer.record_client import RecordClient
from shared.cluster.transfer.record_server import RecordServer
from shared.cluster.transfer.record_store import RecordStore
from shared.cluster.transfer.ticket import Ticket
from shared.engine.request import Event, FinishReason, InvalidRequestError, Request, SamplingParams
from shared.process.disaggregation.kv_export import KVExporter
from tests.support.cached_traffic import make, request, tokens
from tests.support.fake_transfers import FakeTransfer, record_of
from tests.support.polling import wait_until
from tests.support.run_engine import checked_step

PROMPT = tuple(range(20))


class Requests:
    """Engine that records its requests."""

    def __init__(self) -> None:
        self.added: list[Request] = []
        self.aborted: list[int] = []
        self.rejects = False

    def add(self, request: Request) -> None:
        if self.rejects:
            raise InvalidRequestError("prompt", "invalid")
        self.added.append(request)

    def abort(self, request_id: int) -> None:
        self.aborted.append(request_id)


class Case:
    """An exporter with its collaborators."""

    def __init__(self, max_bytes: int = 1 << 20, runs_prompts: bool = True) -> None:
        self.transfer, self.engine, self.woken = FakeTransfer(), Requests(), threading.Event()
        self.store = RecordStore(max_bytes, 30.0)
        listener = socket.create_server(("127.0.0.1", 0))
        server = RecordServer(self.store, [listener], b"", TransferCounters(), None)
        self.exporter = KVExporter(
            self.engine,
            self.transfer,  # pyright: ignore[reportArgumentType]
            self.store,
            server,
            runs_prompts=runs_prompts,
            notify=self.woken.set,
        )

    def add(self, number: int, prompt: tuple[int, ...] = PROMPT) -> None:
        sampling = SamplingParams(max_tokens=0)
        self.exporter.add(Request(request_id=number, prompt=prompt, sampling=sampling))

    def end_prompt(self, number: int, error: str | None = None) -> None:
        """Ends the run of a prompt; its pages are cached then."""
        self.transfer.num_cached = len(PROMPT)
        reason = FinishReason.LENGTH if error is None else FinishReason.ERROR
        event = Event(number, [], None, reason, error, None)
        other = Event(99, [1], None, None, None, None)
        assert self.exporter.take([event, other]) == [other]

    def end_export(self) -> None:
        for job in self.transfer.jobs:
            job.is_done = True

    def end_chunk(self, num_tokens: int) -> None:
        """Ends a chunk of all running prompts, and the export of its pages."""
        self.transfer.num_prefilled = num_tokens
        self.exporter.replies()
        self.end_export()

    def replies(self) -> list[list[Any]]:
        found: list[list[Any]] = []
        assert wait_until(lambda: bool(found.extend(self.exporter.replies()) or found))
        return found


@pytest.fixture
def case() -> Iterator[Case]:
    made = Case()
    yield made
    made.exporter.close()


def _record(reply: list[Any]) -> TransferRecord:
    """Fetches the record of a reply."""
    kind, _, fields, reason, _ = reply
    assert (kind, reason) == ("kv_ticket", None)
    ticket = Ticket.from_fields(fields, "127.0.0.1")
    client = RecordClient("auto", b"", 1 << 20, TransferCounters(), None)
    body = client.fetch(ticket, Deadline(10)).body
    client.close()
    return TransferRecord.of(TransferHeader.from_fields(ticket.header), body)


def _bytes(record: TransferRecord) -> bytes:
    return b"".join(record.parts())


def test_prompt_is_run_and_exported(case):
    case.add(7)
    assert [request.sampling.max_tokens for request in case.engine.added] == [0]
    assert case.exporter.replies() == []
    case.end_prompt(7)
    assert case.exporter.replies() == []
    case.end_export()
    case.exporter.replies()
    assert case.woken.wait(10)
    (reply,) = case.replies()
    assert reply[1] == 7
    assert _bytes(_record(reply)) == _bytes(record_of(PROMPT))
    assert wait_until(lambda: case.store.num_bytes == 0)


def test_requests_for_one_prompt_share_run_and_record(case):
    for number in (1, 2):
        case.add(number)
    assert len(case.engine.added) == 1
    case.end_prompt(1)
    case.add(3)
    case.end_export()
    replies = case.replies()
    assert [reply[1] for reply in replies] == [1, 2, 3]
    case.add(4)
    replies += case.replies()
    assert (case.store.num_records, len(case.transfer.jobs)) == (1, 1)
    assert {_bytes(_record(reply)) for reply in replies} == {_bytes(record_of(PROMPT))}
    assert wait_until(lambda: case.store.num_bytes == 0)


def test_peer_exports_only_its_cache():
    case = Case(runs_prompts=False)
    case.add(1)
    assert case.replies() == [["kv_ticket", 1, None, "not_cached", ANY_TEXT]]
    case.transfer.num_cached = 8
    case.add(2)
    case.end_export()
    (reply,) = case.replies()
    assert _record(reply).num_tokens == 8
    assert case.engine.added == []
    case.exporter.close()


def _parts(case: Case, requests: set[int]) -> dict[int, list[list[Any]]]:
    """The replies to requests, up to the last part of each."""
    found: dict[int, list[list[Any]]] = {number: [] for number in requests}

    def are_whole() -> bool:
        for reply in case.exporter.replies():
            found[reply[1]].append(reply)
        return all(each and each[-1][2]["header"]["is_last"] for each in found.values())

    assert wait_until(are_whole)
    return found


def test_prompt_is_exported_in_parts_while_it_runs(case):
    case.add(1)
    case.add(2)
    for end in (8, 16):
        case.end_chunk(end)
        first = case.replies()
        assert [reply[1] for reply in first] == [1, 2]
        records = [_record(reply) for reply in first]
        assert {(each.header.num_tokens, each.header.is_last) for each in records} == {(end, False)}
    case.end_prompt(1)
    case.end_export()
    for (reply,) in _parts(case, {1, 2}).values():
        record = _record(reply)
        assert (record.header.first_page, record.header.num_tokens) == (4, 20)
        assert _bytes(record) == _bytes(record_of(PROMPT, first_page=4))
    assert wait_until(lambda: case.store.num_bytes == 0)


def test_request_after_first_part_gets_whole_record(case):
    """The memory of the first part may be free already."""
    case.add(1)
    case.end_chunk(8)
    (reply,) = case.replies()
    _record(reply)
    case.add(2)
    case.add(3)
    assert case.exporter.drop(3)
    case.end_prompt(1)
    case.end_export()
    assert len(_parts(case, {1})[1]) == 1
    assert [request.request_id for request in case.engine.added] == [1, 2]
    case.end_prompt(2)
    case.end_export()
    ((reply,),) = _parts(case, {2}).values()
    assert _bytes(_record(reply)) == _bytes(record_of(PROMPT))
    assert not case.exporter.drop(3)


def test_failure_after_first_part_ends_export(case):
    case.add(1)
    case.end_chunk(8)
    assert len(case.replies()) == 1
    case.end_chunk(16)
    case.end_prompt(1, error="the logits are not finite")
    assert case.replies() == [["kv_ticket", 1, None, "failed", ANY_TEXT]]
    assert not case.exporter.drop(1)
    assert case.transfer.jobs[1].is_done


def test_abort_between_parts_frees_memory(case):
    case.add(1)
    case.end_chunk(8)
    (reply,) = case.replies()
    case.transfer.num_prefilled = 16
    case.exporter.replies()
    assert case.exporter.drop(1)
    assert case.transfer.jobs[1].failed == "cancelled"
    assert case.engine.aborted == [1]
    case.store.drop(reply[2]["ticket_id"])
    assert case.store.num_bytes == 0


class _AnyText:
    def __eq__(self, other: object) -> bool:
        return isinstance(other, str)


ANY_TEXT = _AnyText()


def test_failed_prompt_is_reported(case):
    case.add(1)
    case.add(2)
    case.end_prompt(1, error="the logits are not finite")
    reasons = [(reply[1], reply[3]) for reply in case.replies()]
    assert reasons == [(1, "failed"), (2, "failed")]


def test_invalid_prompt_is_reported(case):
    case.engine.rejects = True
    case.add(1)
    assert case.replies() == [["refused", 1, "invalid", "prompt"]]
    assert not case.exporter.drop(1)


def test_full_store_is_reported():
    case = Case(max_bytes=record_of(PROMPT).num_bytes)
    for number, prompt in ((1, PROMPT), (2, (*PROMPT[:-1], 50))):
        case.add(number, prompt)
        case.end_prompt(number)
    case.end_export()
    reply = case.replies()[0]
    assert (reply[1], reply[3]) == (2, "too_large")
    assert len(case.transfer.jobs) == 1, "a job without memory has begun"
    case.exporter.close()


def test_prompts_wait_for_open_exports(case):
    """With two slots and two exports for each, four prompts are open at once."""
    for number in range(6):
        case.add(number, (*PROMPT[:-1], 50 + number))
    case.add(6, (*PROMPT[:-1], 54))
    assert [request.request_id for request in case.engine.added] == [0, 1, 2, 3]
    assert case.exporter.drop(4)
    case.end_prompt(0)
    case.exporter.replies()
    assert len(case.engine.added) == 4
    case.end_export()
    assert [reply[1] for reply in case.replies()] == [0]
    case.exporter.replies()
    assert [request.request_id for request in case.engine.added] == [0, 1, 2, 3, 4]
    assert case.exporter.drop(6)
    assert case.engine.aborted == [4]


@pytest.mark.parametrize("kind", ["head", "hybrid", "windowed hybrid"])
def test_prompts_under_load_are_all_exported(kind):
    """Exports take many more steps than prompts, and each pins a snapshot."""
    engine, store = make(kind, num_pages=800, step_bytes=32), RecordStore(1 << 24, 60.0)
    server = RecordServer(
        store, [socket.create_server(("127.0.0.1", 0))], b"", TransferCounters(), None
    )
    exporter = KVExporter(
        engine, engine.transfer, store, server, runs_prompts=True, notify=lambda: None
    )
    requests = [request(tokens(number, 200), max_tokens=0) for number in range(24)]
    for each in requests:
        exporter.add(each)
    parts, until = {each.request_id: list[TransferHeader]() for each in requests}, time.monotonic()
    while not all(each and each[-1].is_last for each in parts.values()):
        assert time.monotonic() < until + 60
        for _, number, fields, _, _ in exporter.replies():
            parts[number].append(TransferHeader.from_fields(fields["header"]))
        if engine.busy:
            assert exporter.take(checked_step(engine)) == []
    hit = 192 if "hybrid" in kind else 196
    for headers in parts.values():
        assert [each.is_last for each in headers] == [False] * (len(headers) - 1) + [True]
        ends = [each.num_pages for each in headers]
        assert [each.first_page for each in headers] == [0, *ends[:-1]]
        assert headers[-1].num_tokens == hit
    assert min(map(len, parts.values())) > 1, "no prompt was exported while it ran"
    assert engine.transfer.num_exported == 24 * hit
    exporter.close()
    engine.cache.check([])


def test_abort_of_last_request_ends_each_stage(case):
    case.add(1)
    case.add(2)
    assert case.exporter.drop(1)
    assert case.engine.aborted == []
    assert case.exporter.drop(2)
    assert case.engine.aborted == [1]  # the request that ran the prompt
    assert not case.exporter.drop(2)
    case.add(3)
    case.end_prompt(3)
    assert case.exporter.drop(3)
    assert case.transfer.jobs[0].failed == "cancelled"
    case.add(4)
    case.end_prompt(4)
    case.end_export()
    case.exporter.replies()
    assert case.woken.wait(10)
    assert case.exporter.drop(4)
    assert wait_until(lambda: case.store.num_bytes == 0)
    assert case.exporter.replies() == []
