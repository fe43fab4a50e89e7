"""KV transfer between engines on the toy backend: a transferred prefix is a cache hit."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from shared.boundary.kv_transfer import TransferHeader, TransferRecord, TransferRejected
from shared.boundary.transfer_spec import TRANSFERS
from shared.engine.engine import Engine
from shared.engine.request import CacheNamespace
from shared.engine.transfer_jobs import CANCELLED, ImportJob
from tests.support.cached_traffic import (
    KINDS,
    CachedTraffic,
    give_back_all,
    make,
    request,
    serve,
    tokens,
)
from tests.support.run_engine import checked_step, drive

PROMPT, BASE = 200, CacheNamespace("")
HIT = {kind: 192 if "hybrid" in kind else 196 for kind in KINDS}
"""Tokens of a prompt of 200 that a request can skip, in pages of 4 tokens; states are at 64."""


def finish(engine: Engine) -> None:
    while engine.busy:
        checked_step(engine)


def exported(engine: Engine, prompt: list[int], owner: CacheNamespace = BASE) -> TransferRecord:
    job = engine.transfer.begin_export(prompt, owner, ())
    finish(engine)
    assert job.is_done
    return job.record


def received(record: TransferRecord) -> TransferRecord:
    """The record after a transfer of its bytes."""
    header = TransferHeader.from_fields(record.header.to_fields())
    body = b"".join(record.parts())
    assert len(body) == record.num_bytes
    return TransferRecord.checked(header, body, record.checksum())


def imported(engine: Engine, record: TransferRecord) -> ImportJob:
    job = engine.transfer.begin_import(record, holds=False)
    finish(engine)
    assert job.is_done
    return job


def filled(kind: str, prompt: list[int], **how) -> Engine:
    engine = make(kind, **how)
    serve(engine, request(prompt))
    return engine


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_imported_prefix_is_cache_hit(kind, overlap):
    prompt = tokens(1, PROMPT)
    source, sink = filled(kind, prompt), make(kind, overlap=overlap)
    assert sink.transfer.match(prompt, BASE, ()) == 0
    record = received(exported(source, prompt))
    assert record.num_tokens == imported(sink, record).num_tokens >= HIT[kind] > 0
    assert sink.transfer.match(prompt, BASE, ()) == HIT[kind]
    again = request(prompt)
    serve(sink, again)
    assert again.cached_tokens == HIT[kind]
    assert sink.backend.num_fed == PROMPT - HIT[kind]
    assert source.metrics.snapshot()["kv_transfer_exported_tokens_total"] == record.num_tokens
    assert sink.metrics.snapshot()["kv_transfer_imported_tokens_total"] == record.num_tokens
    for engine in (source, sink):
        give_back_all(engine.cache)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_of_whole_pages_is_cache_hit(kind):
    """The request prefills its last token, so a snapshot after the whole prompt is of no use."""
    prompt = tokens(1, 192)
    source, sink = filled(kind, prompt), make(kind)
    record = exported(source, prompt)
    imported(sink, record)
    again = request(prompt)
    serve(sink, again)
    assert again.cached_tokens == record.num_tokens == (128 if "hybrid" in kind else 188)


@pytest.mark.parametrize("kind", KINDS)
def test_record_is_equal_for_any_step_size(kind):
    prompt = tokens(1, PROMPT)
    few, many = (exported(filled(kind, prompt, step_bytes=n), prompt) for n in (32, 1 << 20))
    assert b"".join(few.parts()) == b"".join(many.parts())
    sink = make(kind, step_bytes=96)
    imported(sink, many)
    assert b"".join(exported(sink, prompt).parts()) == b"".join(many.parts())


@pytest.mark.parametrize("kind", KINDS)
def test_import_extends_cached_prefix(kind):
    """Pages that are cached are not written again, and none is cached twice."""
    prompt = tokens(1, PROMPT)
    record = exported(filled(kind, prompt), prompt)
    sink = filled(kind, prompt[:100])
    imported(sink, record)
    again = request(prompt)
    serve(sink, again)
    assert again.cached_tokens == HIT[kind]
    give_back_all(sink.cache)


@pytest.mark.parametrize("kind", KINDS)
def test_import_beside_same_prompt_frees_duplicates(kind):
    prompt = tokens(1, PROMPT)
    record = exported(filled(kind, prompt), prompt)
    sink = make(kind)
    job = sink.transfer.begin_import(record, holds=False)
    serve(sink, request(prompt), request(prompt, seed32=5))
    assert job.is_done
    give_back_all(sink.cache)


def test_import_of_cached_record_takes_no_step():
    prompt = tokens(1, PROMPT)
    source = filled("hybrid", prompt)
    job = source.transfer.begin_import(exported(source, prompt), holds=False)
    assert job.is_done
    assert not source.busy


@pytest.mark.parametrize("kind", KINDS)
def test_cancel_after_any_step_leaks_nothing(kind):
    prompt = tokens(1, PROMPT)
    source = filled(kind, prompt)
    record = exported(source, prompt)
    for direction in ("export", "import"):
        for steps in range(20):
            engine = source if direction == "export" else make(kind, overlap=2)
            transfer = engine.transfer
            job = (
                transfer.begin_export(prompt, BASE, ())
                if direction == "export"
                else transfer.begin_import(record, holds=False)
            )
            for _ in range(steps):
                checked_step(engine)
            job.cancel()
            engine.cache.check([])
            finish(engine)
            assert job.is_done or job.failed == CANCELLED
            engine.cache.check([])
            assert not engine.cache.transfers.leases
            if direction == "import":
                again = request(prompt)
                serve(engine, again)
                assert again.cached_tokens == (HIT[kind] if job.is_done else 0)
                give_back_all(engine.cache)


def test_closed_engine_cancels_jobs():
    prompt = tokens(1, PROMPT)
    source = filled("hybrid", prompt)
    job = source.transfer.begin_export(prompt, BASE, ())
    source.close()
    assert job.failed == CANCELLED
    assert not source.cache.transfers.leases


@pytest.mark.parametrize("kind", ["hybrid", "windowed hybrid"])
def test_export_pins_pages_and_snapshot(kind):
    """Other prompts need all snapshots and pages meanwhile."""
    prompt = tokens(1, PROMPT)
    want = exported(filled(kind, prompt), prompt)
    source = filled(kind, prompt, step_bytes=32, overlap=0)
    job = source.transfer.begin_export(prompt, BASE, ())
    drive(source, crowd_of(24))
    assert job.is_done
    assert b"".join(job.record.parts()) == b"".join(want.parts())
    other = filled(kind, prompt)
    drive(other, crowd_of(24))
    assert other.transfer.begin_export(prompt, BASE, ()) is None, "the crowd was too small"


def crowd_of(count: int) -> list:
    return [request(tokens(30 + n, 300)) for n in range(count)]


def test_transfer_steps_alternate_with_others():
    prompt = tokens(1, PROMPT)
    record = exported(filled("hybrid", prompt), prompt)
    sink, kinds = make("hybrid", step_bytes=32), []
    submit = sink.backend.submit

    def recorded(plan):
        kinds.append(plan.program.work in TRANSFERS)
        return submit(plan)

    sink.backend.submit = recorded
    running = request(tokens(9, 20), max_tokens=400)
    sink.add(running)
    checked_step(sink)
    job = sink.transfer.begin_import(record, holds=False)
    while not job.is_done:
        checked_step(sink)
    assert sum(kinds) > 20
    assert (True, True) not in list(pairwise(kinds))
    finish(sink)


def test_record_depends_on_tenant():
    prompt = tokens(1, PROMPT)
    engine = make("head")
    serve(engine, request(prompt, tenant="a"))
    assert engine.transfer.begin_export(prompt, BASE, ()) is None
    sink = make("head")
    imported(sink, exported(engine, prompt, CacheNamespace("a")))
    assert sink.transfer.match(prompt, BASE, ()) == 0
    assert sink.transfer.match(prompt, CacheNamespace("a"), ()) == HIT["head"]


def test_incomplete_draft_kv_travels_with_record():
    prompt = tokens(1, PROMPT)
    source = make("head")
    serve(source, request(prompt, max_draft_tokens=0))
    path = source.cache.tree.path(("", "", ""), np.array(prompt, np.int32))
    path[20].is_whole = False
    record = received(exported(source, prompt))
    assert [i for i, whole in enumerate(record.header.is_whole) if not whole] == [20]
    sink = make("head")
    imported(sink, record)
    path = sink.cache.tree.path(("", "", ""), np.array(prompt, np.int32))
    assert [i for i, node in enumerate(path) if not node.is_whole] == [20]


def test_sequence_without_restorable_prefix_is_not_exported():
    engine = make("hybrid")
    assert engine.transfer.begin_export(tokens(1, 100), BASE, ()) is None
    serve(engine, request(tokens(1, 60)))
    assert engine.cache.num_pages > 0
    assert engine.transfer.begin_export(tokens(1, 60), BASE, ()) is None


# Rejected records


def changed(record: TransferRecord, **fields) -> TransferRecord:
    return replace(record, header=replace(record.header, **fields))


CHANGES = {
    "version": ("version", lambda h: {"version": h.version - 1}),
    "fingerprint": ("fingerprint", lambda h: {"fingerprint": "other"}),
    "page size": ("arrays", lambda h: {"page_size": 8}),
    "array": ("arrays", lambda h: {"arrays": h.arrays[1:]}),
    "few tokens": ("tokens", lambda h: {"tokens": h.tokens[:-1]}),
    "token": ("tokens", lambda h: {"tokens": h.tokens + 97}),
    "snapshot": (
        "not_restorable",
        lambda h: {"has_snapshot": False, "arrays": h.arrays[:-1]},
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_import_rejects_record_with_reason(change):
    prompt = tokens(1, PROMPT)
    record = exported(filled("hybrid", prompt), prompt)
    reason, fields = CHANGES[change]
    sink = make("hybrid")
    with pytest.raises(TransferRejected) as caught:
        sink.transfer.begin_import(changed(record, **fields(record.header)), holds=False)
    assert caught.value.reason == reason
    assert not sink.busy
    give_back_all(sink.cache)


def test_import_is_rejected_without_pages_or_snapshots():
    prompt = tokens(1, PROMPT)
    record = exported(filled("hybrid", prompt), prompt)
    small = make("hybrid", num_pages=40)
    with pytest.raises(TransferRejected) as caught:
        small.transfer.begin_import(record, holds=False)
    assert caught.value.reason == "no_pages"
    give_back_all(small.cache)
    sink = make("hybrid")
    held = [sink.cache.tree.snapshots.allocate() for _ in range(15)]
    with pytest.raises(TransferRejected) as caught:
        sink.transfer.begin_import(record, holds=False)
    assert caught.value.reason == "no_snapshots"
    for snapshot in held:
        sink.cache.tree.snapshots.free(snapshot)
    give_back_all(sink.cache)


def test_import_leaves_pages_of_running_requests():
    """Otherwise an import could preempt a request, which then waits for the import."""
    prompt = tokens(1, PROMPT)
    record = exported(filled("plain model", prompt), prompt)
    sink = make("plain model", num_pages=66)
    sink.add(request(tokens(9, 60), max_tokens=100))
    checked_step(sink)
    with pytest.raises(TransferRejected) as caught:
        sink.transfer.begin_import(record, holds=False)
    assert caught.value.reason == "no_pages"
    finish(sink)
    imported(sink, record)
    assert sink.transfer.match(prompt, BASE, ()) == HIT["plain model"]


# Held prefixes


def pool_for(prompts: int, kind: str) -> dict[str, int]:
    """Sizes of pools that hold some prompts of `PROMPT` tokens in pages of 4."""
    return {"num_pages": 1 + prompts * (PROMPT // 4 + 10), "window_pages": 200}


@pytest.mark.parametrize("kind", KINDS)
def test_held_prefix_survives_other_imports(kind):
    prompts = [tokens(seed, PROMPT) for seed in (1, 2)]
    first, second = (exported(filled(kind, prompt), prompt) for prompt in prompts)
    sink = make(kind, **pool_for(1, kind))
    job = sink.transfer.begin_import(first, holds=True)
    finish(sink)
    sink.transfer.assign(job, [-1])
    assert sink.transfer.is_holding
    with pytest.raises(TransferRejected) as caught:
        sink.transfer.begin_import(second, holds=True)
    assert caught.value.reason == "no_pages"
    assert sink.transfer.match(prompts[0], BASE, ()) == HIT[kind]
    sink.abort(-1)
    assert not sink.transfer.is_holding
    imported(sink, second)
    assert sink.transfer.match(prompts[0], BASE, ()) < HIT[kind]
    give_back_all(sink.cache)


@pytest.mark.parametrize("kind", KINDS)
def test_held_prefix_ends_with_admission(kind):
    prompt = tokens(1, PROMPT)
    record, sink = exported(filled(kind, prompt), prompt), make(kind)
    job = sink.transfer.begin_import(record, holds=True)
    finish(sink)
    again = [request(prompt), request(prompt, seed32=5)]
    sink.transfer.assign(job, [each.request_id for each in again])
    serve(sink, *again)
    assert [each.cached_tokens for each in again] == [HIT[kind]] * 2
    give_back_all(sink.cache)


@pytest.mark.parametrize("kind", KINDS)
def test_request_ahead_releases_held_prefixes(kind):
    """It could not run otherwise: no other request runs."""
    prompts = [tokens(seed, PROMPT) for seed in (1, 2)]
    records = [exported(filled(kind, prompt), prompt) for prompt in prompts]
    sink = make(kind, **pool_for(2, kind))
    for record in records:
        job = sink.transfer.begin_import(record, holds=True)
        finish(sink)
        sink.transfer.assign(job, [-1])
    serve(sink, request(tokens(3, PROMPT)))
    assert sink.transfer.match(prompts[0], BASE, ()) == HIT[kind]
    assert sink.transfer.match(prompts[1], BASE, ()) < HIT[kind]
    sink.transfer.cancel_all()
    give_back_all(sink.cache)


def test_waiting_request_keeps_imports_from_its_pages():
    """Imports would otherwise take all pages that running requests return."""
    prompt = tokens(1, PROMPT)
    record = exported(filled("plain model", prompt), prompt)
    sink = make("plain model", num_pages=80)
    running, waiting = request(tokens(2, 120), max_tokens=60), request(tokens(3, 200))
    for each in (running, waiting):
        sink.add(each)
    checked_step(sink)
    assert len(sink.scheduler.waiting) == 1
    with pytest.raises(TransferRejected) as caught:
        sink.transfer.begin_import(record, holds=True)
    assert caught.value.reason == "no_pages"


class TransferTraffic(CachedTraffic):
    """Requests with common prefixes, exports, imports and cancellations at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.jobs, self.records, self.reasons = [], [], set()

    @rule(which=st.integers(0, 100), tenant=st.sampled_from(("", "other")))
    def export(self, which, tenant):
        text = self.texts[which % len(self.texts)]
        job = self.engine.transfer.begin_export(text, CacheNamespace(tenant), ())
        if job is not None:
            self.jobs.append(job)

    @rule(which=st.integers(0, 100), holds=st.booleans())
    def import_record(self, which, holds):
        self.records += [each.record for each in self.jobs if getattr(each, "record", None)]
        self.jobs = [each for each in self.jobs if each.is_open]
        if not self.records:
            return
        try:
            job = self.engine.transfer.begin_import(
                self.records[which % len(self.records)], holds=holds
            )
        except TransferRejected as error:
            self.reasons.add(error.reason)
            return
        self.jobs.append(job)

    @rule(which=st.integers(0, 100), requests=st.integers(1, 3))
    def assign(self, which, requests):
        """The last requests wait for an import, whatever their state."""
        done = [job for job in self.jobs if isinstance(job, ImportJob) and job.is_done]
        if done:
            job = done[which % len(done)]
            self.engine.transfer.assign(job, [*self.requests][-requests:] or [-1])

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.transfer.cancel_all()
        super().teardown()

    @rule(which=st.integers(0, 100))
    def cancel(self, which):
        if self.jobs:
            self.jobs.pop(which % len(self.jobs)).cancel()

    @rule()
    def evict(self):
        self.engine.cache.tree.evict(1000)

    @invariant()
    def only_lack_of_room_is_a_reason(self):
        assert self.reasons <= {"no_pages", "no_snapshots"}


TestTransferTraffic = TransferTraffic.TestCase
TestTransferTraffic.settings = settings(max_examples=15, stateful_step_count=40, deadline=None)
