"""Requests that wait for KV cache of another server: results, fallbacks, aborts and limits."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import ClassVar

import pytest

from shared.boundary.kv_transfer import TransferRejected
from shared.cluster.transfer.counters import TransferCounters
from shared.cluster.transfer.deadline import Deadline
from shared.cluster.transfer.errors import TransferError
from shared.engine.request import CacheNamespace, Request, SamplingParams
from shared.process.disaggregation import remote_prefill
from shared.process.disaggregation.prompt_key import PromptKey
from shared.process.disaggregation.remote_prefill import RemotePrefill
from tests.support.cached_traffic import give_back_all, make, request, serve, tokens
from tests.support.fake_transfers import PAGE, FakeTransfer, record_of
from tests.support.polling import wait_until
from tests.support.run_engine import checked_step

PROMPT = tuple(range(20))
MIN_TOKENS = 12


class Fetched:
    """Memory of a received record."""

    def __init__(self) -> None:
        self.num_released = 0

    def release(self) -> None:
        self.num_released += 1


class Fetches:
    """Threads that fetch a record once a test permits it, or raise the error of the test."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.permitted, self.memory = threading.Event(), Fetched()
        self.parts: tuple[int, ...] = ()
        self.new_memory: type[Fetched] | None = None
        self.prefixes: list[PromptKey] = []
        self.deadlines: list[Deadline] = []

    def fetch(self, prefix: PromptKey, deadline: Deadline):
        self.prefixes.append(prefix)
        self.deadlines.append(deadline)
        first = 0
        for end in self.parts:
            yield record_of(prefix.tokens[:end], first_page=first, is_last=False), self.memory
            first = end // PAGE
        assert self.permitted.wait(10)
        if self.error is not None:
            raise self.error
        memory = self.new_memory() if self.new_memory else self.memory
        yield record_of(prefix.tokens, prefix.namespace, first_page=first), memory


class Case:
    """A queue with its collaborators."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self.transfer, self.fetches = FakeTransfer(), Fetches()
        self.counters, self.woken = TransferCounters(), threading.Event()
        self.queue = RemotePrefill(
            self.transfer,  # pyright: ignore[reportArgumentType]
            self.fetches.fetch,  # pyright: ignore[reportArgumentType]
            min_tokens=MIN_TOKENS,
            timeout_s=timeout_s,
            counters=self.counters,
            notify=self.woken.set,
        )

    def take(self, number: int, prompt: tuple[int, ...] = PROMPT, tenant: str = "") -> bool:
        sampling = SamplingParams(max_tokens=1)
        return self.queue.take(
            Request(request_id=number, prompt=prompt, sampling=sampling, tenant=tenant)
        )

    def ready(self) -> list[int]:
        return [request.request_id for request in self.queue.ready()]

    def next_ready(self) -> list[int]:
        found: list[int] = []
        assert wait_until(lambda: bool(found.extend(self.ready()) or found))
        return found

    def arrived(self) -> None:
        """Lets the fetch end, and begins the import."""
        self.fetches.permitted.set()
        assert self.woken.wait(10)
        assert self.ready() == []
        assert len(self.transfer.jobs) == 1

    def failures(self) -> dict[str, float]:
        return self.counters.snapshot()


@pytest.fixture
def case() -> Iterator[Case]:
    made = Case()
    yield made
    made.fetches.permitted.set()
    made.queue.close()


def _failure(reason: str, count: int = 1) -> dict[str, float]:
    return {f'kv_transfer_failures_total{{reason="{reason}"}}': count}


def test_request_follows_import_of_its_prompt(case):
    assert case.take(1)
    assert case.ready() == []
    case.arrived()
    assert case.fetches.memory.num_released == 0
    case.transfer.jobs[0].is_done = True
    assert case.ready() == [1]
    assert case.fetches.memory.num_released == 1
    assert case.failures() == {}
    assert case.queue.num_waiting == 0


def test_parts_are_imported_as_they_arrive(case):
    case.fetches.parts = (8, 16)
    case.take(1)
    assert wait_until(lambda: bool(case.ready()) or len(case.transfer.records) == 2)
    case.fetches.permitted.set()
    assert wait_until(lambda: bool(case.ready()) or len(case.transfer.records) == 3)
    case.transfer.jobs[0].is_done = True
    assert case.next_ready() == [1]
    ends = [record.num_tokens for record in case.transfer.records]
    assert (ends, len(case.transfer.jobs)) == ([8, 16, 20], 1)
    assert case.fetches.memory.num_released == 3
    assert case.failures() == {}


class Mapped(Fetched):
    """Memory that reports the thread that frees it."""

    freed_by: ClassVar[list[str]] = []

    def __del__(self) -> None:
        self.freed_by.append(threading.current_thread().name)


@pytest.mark.parametrize("is_aborted", [False, True])
def test_record_is_unmapped_by_another_thread(case, is_aborted):
    """That takes longer than a decode step."""
    case.fetches.new_memory = Mapped
    Mapped.freed_by.clear()
    case.take(1)
    case.arrived()
    if is_aborted:
        assert case.queue.drop(1)
    else:
        case.transfer.jobs[0].is_done = True
        assert case.ready() == [1]
    assert wait_until(lambda: bool(Mapped.freed_by))
    assert Mapped.freed_by[0].startswith("kv records")


def test_lost_part_cancels_import(case):
    case.fetches.parts, case.fetches.error = (8,), TransferError("lost", "the server has ended")
    case.take(1)
    assert wait_until(lambda: bool(case.ready()) or len(case.transfer.records) == 1)
    case.fetches.permitted.set()
    assert case.next_ready() == [1]
    assert case.transfer.jobs[0].failed == "cancelled"
    assert case.transfer.assigned == []
    assert case.fetches.memory.num_released == 1
    assert case.failures() == _failure("lost")


def test_abort_between_parts_cancels_import(case):
    case.fetches.parts = (8, 16)
    case.take(1)
    assert wait_until(lambda: bool(case.ready()) or len(case.transfer.records) == 2)
    assert case.queue.drop(1)
    assert case.transfer.jobs[0].failed == "cancelled"
    case.fetches.permitted.set()
    assert wait_until(lambda: case.fetches.memory.num_released == 3)
    assert case.ready() == []


def test_short_or_cached_prompts_are_not_taken(case):
    assert not case.take(1, PROMPT[: MIN_TOKENS - 1])
    case.transfer.num_cached = len(PROMPT) - MIN_TOKENS + 1
    assert not case.take(2)
    case.transfer.num_cached -= 1
    assert case.take(3)


def test_equal_prompts_share_transfer(case):
    assert case.take(1)
    assert case.take(2)
    assert case.take(3, tenant="other")
    assert wait_until(lambda: len(case.fetches.prefixes) == 2)
    assert case.queue.num_waiting == 3
    case.fetches.permitted.set()
    assert wait_until(lambda: bool(case.ready() or len(case.transfer.jobs) == 2))
    for job in case.transfer.jobs:
        job.is_done = True
    assert sorted(case.ready()) == [1, 2, 3]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (TransferError("unreachable", "no server"), "unreachable"),
        (TransferRejected("fingerprint", "other weights"), "fingerprint"),
        (ZeroDivisionError("a fault of the program"), "internal"),
    ],
    ids=["transfer", "record", "fault"],
)
def test_failed_fetch_leads_to_local_prefill(case, error, reason):
    case.fetches.error = error
    case.take(1)
    case.fetches.permitted.set()
    assert case.next_ready() == [1]
    assert case.failures() == _failure(reason)


def test_failed_fetch_frees_its_record(case):
    """The traceback of the error would keep the frames that advance all transfers."""
    case.fetches.error = error = TransferError("unreachable", "no server")
    case.take(1)
    case.fetches.permitted.set()
    assert case.next_ready() == [1]
    assert error.__traceback__ is None


def test_rejected_import_leads_to_local_prefill(case):
    case.transfer.rejects = "no_pages"
    case.take(1)
    case.fetches.permitted.set()
    assert case.next_ready() == [1]
    assert case.failures() == _failure("no_pages")
    assert case.fetches.memory.num_released == 1


def test_record_waits_for_room_in_order(case):
    """Earlier imports hold the pages; only the first record tries again."""
    case.transfer.rejects, case.transfer.holds = "no_pages", True
    case.fetches.permitted.set()
    for number in (1, 2):
        case.take(number, (*PROMPT, number))
    assert wait_until(lambda: len(case.fetches.prefixes) == 2)
    for _ in range(3):
        time.sleep(0.05)
        assert case.ready() == []
    assert case.fetches.memory.num_released == 0
    case.transfer.rejects = None
    assert case.ready() == []
    for number in (1, 2):
        assert len(case.transfer.jobs) == 2
        case.transfer.jobs[number - 1].is_done = True
        assert case.next_ready() == [number]
    assert case.transfer.assigned == [1, 2]
    assert case.failures() == {}


def test_failed_import_leads_to_local_prefill(case):
    case.take(1)
    case.arrived()
    case.transfer.jobs[0].failed = "cancelled"
    assert case.ready() == [1]
    assert case.fetches.memory.num_released == 1


def test_silent_thread_ends_at_timeout(monkeypatch):
    monkeypatch.setattr(remote_prefill, "GRACE_S", 0.1)
    case = Case(timeout_s=0.1)
    case.take(1)
    began = time.monotonic()
    assert case.next_ready() == [1]
    assert time.monotonic() - began < 5
    assert case.failures() == _failure("timeout")
    case.fetches.permitted.set()
    assert wait_until(lambda: case.fetches.memory.num_released == 1)
    case.queue.close()


@pytest.mark.parametrize("kind", ["head", "hybrid", "windowed hybrid"])
def test_many_imports_evict_no_waiting_prefix(kind):
    """24 records arrive at once, and the cache has room for five of them."""
    prompts = [tokens(number, 200) for number in range(24)]
    source, records = make(kind), {}
    for prompt in prompts:
        serve(source, request(prompt))
        job = source.transfer.begin_export(prompt, CacheNamespace(""), ())
        while source.busy:
            source.step()
        records[tuple(prompt)] = job.record
    sink, counters, arrived = make(kind, num_pages=320), TransferCounters(), list[bool]()
    queue = RemotePrefill(
        sink.transfer,
        lambda prefix, _: [(records[prefix.tokens], Fetched())],  # pyright: ignore[reportArgumentType]
        min_tokens=MIN_TOKENS,
        timeout_s=30.0,
        counters=counters,
        notify=lambda: arrived.append(True),
    )
    requests = [request(prompt, max_tokens=40) for prompt in prompts]
    assert all(map(queue.take, requests))
    assert wait_until(lambda: len(arrived) == 2 * len(requests))  # a record and the end of each
    while queue.num_waiting or sink.busy:
        for ready in queue.ready():
            sink.add(ready)
        checked_step(sink)
    hit = 192 if "hybrid" in kind else 196
    assert [each.cached_tokens for each in requests] == [hit] * 24
    assert sink.transfer.num_imported == sum(each.num_tokens for each in records.values())
    assert counters.snapshot() == {}
    assert not sink.transfer.is_holding
    give_back_all(sink.cache)
    queue.close()


def test_abort_of_last_request_cancels_fetch(case):
    case.take(1)
    case.take(2)
    assert wait_until(lambda: bool(case.fetches.deadlines))
    assert case.queue.drop(1)
    case.fetches.deadlines[0].remaining_s()
    assert case.queue.drop(2)
    assert not case.queue.drop(2)
    with pytest.raises(TransferError) as error:
        case.fetches.deadlines[0].remaining_s()
    assert error.value.reason == "cancelled"
    case.fetches.permitted.set()
    assert wait_until(lambda: case.fetches.memory.num_released == 1)
    assert case.ready() == []
    assert case.failures() == _failure("cancelled")


def test_abort_during_import_cancels_it(case):
    case.take(1)
    case.arrived()
    assert case.queue.drop(1)
    assert case.transfer.jobs[0].failed == "cancelled"
    assert case.fetches.memory.num_released == 1
    assert case.take(2)  # the same prompt again


def test_close_ends_queued_and_running_fetches():
    case = Case()
    for number in range(2 * remote_prefill.MAX_FETCHES):
        case.take(number, (*PROMPT, number))
    case.queue.close()
    case.fetches.permitted.set()
    assert case.queue.num_waiting == 0
    assert case.ready() == []
