"""Prefixes in several parts: exported while their prompt runs, imported as they arrive."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shared.boundary.backend import StepFuture, StepPlan
from shared.boundary.kv_transfer import TransferHeader, TransferRecord, TransferRejected
from shared.boundary.program import StepKind
from shared.engine import kv_transfer
from shared.engine.engine import Engine
from shared.engine.request import CacheNamespace
from shared.engine.transfer_jobs import CANCELLED, ImportJob
from tests.support.cached_traffic import KINDS, give_back_all, make, request, serve, tokens
from tests.support.run_engine import checked_step

LENGTH, BASE = 400, CacheNamespace("")
PROMPT = tokens(1, LENGTH)
HIT = {kind: 384 if "hybrid" in kind else 396 for kind in KINDS}
"""Tokens of the prompt that a request can skip, in pages of 4 tokens; states are at 64."""


def finish(engine: Engine) -> None:
    while engine.busy:
        checked_step(engine)


def exported_in_parts(engine: Engine, prompt: list[int]) -> list[TransferRecord]:
    """The parts of a prompt that runs here, after a transfer of their bytes."""
    running, parts, first = request(prompt, max_tokens=0), [], 0
    engine.add(running)
    jobs = []
    while engine.busy:
        checked_step(engine)
        begin = engine.transfer.begin_part
        if running.finish_reason is not None and not any(job.header.is_last for job in jobs):
            begin = engine.transfer.begin_export
        elif running.finish_reason is not None:
            continue
        job = begin(prompt, BASE, (), first_page=first)
        if job is not None:
            first = job.header.num_pages
            jobs.append(job)
    for job in jobs:
        assert job.is_done
        parts.append(received(job.record))
    return parts


def received(record: TransferRecord) -> TransferRecord:
    header = TransferHeader.from_fields(record.header.to_fields())
    return TransferRecord.checked(header, b"".join(record.parts()), record.checksum())


def whole_record(kind: str, prompt: list[int]) -> TransferRecord:
    engine = make(kind)
    serve(engine, request(prompt))
    job = engine.transfer.begin_export(prompt, BASE, ())
    finish(engine)
    return job.record


def begun(engine: Engine, part: TransferRecord, prompt: list[int] = PROMPT) -> ImportJob:
    num_pages = engine.transfer.max_pages(len(prompt))
    return engine.transfer.begin_import(part, holds=False, num_pages=num_pages)


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_parts_equal_record_and_become_cache_hit(kind, overlap):
    parts = exported_in_parts(make(kind, overlap=overlap), PROMPT)
    assert len(parts) == 4
    whole = whole_record(kind, PROMPT)
    pages = b"".join(part.arrays[0].tobytes() for part in parts)
    assert pages == whole.arrays[0].tobytes()
    for mine, other in zip(parts[-1].arrays[1:], whole.arrays[1:], strict=True):
        assert mine.tobytes() == other.tobytes()
    sink = make(kind, overlap=overlap)
    job = begun(sink, parts[0])
    for part in parts[1:]:
        finish(sink)
        assert job.is_open, "it waits for the other parts"
        assert sink.transfer.match(PROMPT, BASE, ()) == 0
        sink.transfer.extend_import(job, part)
    finish(sink)
    assert job.is_done
    again = request(PROMPT)
    serve(sink, again)
    assert again.cached_tokens == HIT[kind]
    give_back_all(sink.cache)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_that_arrive_together_are_imported(kind):
    parts = exported_in_parts(make(kind), PROMPT)
    sink = make(kind, step_bytes=96)
    serve(sink, request(PROMPT[:100]))  # some of the pages are cached
    job = begun(sink, parts[0])
    for part in parts[1:]:
        sink.transfer.extend_import(job, part)
    finish(sink)
    assert job.is_done
    assert sink.transfer.match(PROMPT, BASE, ()) == HIT[kind]
    give_back_all(sink.cache)


@pytest.mark.parametrize("kind", KINDS)
def test_cancel_between_parts_leaks_nothing(kind):
    parts = exported_in_parts(make(kind), PROMPT)
    for number in range(1, len(parts) + 1):
        for steps in (0, 1, 3):
            sink = make(kind, overlap=2)
            job = begun(sink, parts[0])
            for part in parts[1:number]:
                finish(sink)
                sink.transfer.extend_import(job, part)
            for _ in range(steps):
                checked_step(sink)
            sink.cache.check([])
            job.cancel()
            finish(sink)
            assert job.is_done or job.failed == CANCELLED
            assert not sink.cache.transfers.leases
            give_back_all(sink.cache)


def test_export_steps_precede_prompt_chunks():
    """Otherwise a part would wait for the rest of its prompt."""
    engine, kinds = make("plain model", step_bytes=32), []
    submit = engine.backend.submit

    def recorded(plan):
        kinds.append(plan.program.work)
        return submit(plan)

    engine.backend.submit = recorded
    exported_in_parts(engine, PROMPT)
    chunks = [i for i, kind in enumerate(kinds) if kind is StepKind.PREFILL]
    before = kinds[: chunks[-1]].count(StepKind.EXPORT_KV)
    assert before * 2 > kinds.count(StepKind.EXPORT_KV)


def test_parts_have_minimum_of_pages(monkeypatch):
    """Each part has a header with all tokens; the last one takes the rest."""
    monkeypatch.setattr(kv_transfer, "MAX_PARTS", 2)
    parts = exported_in_parts(make("plain model"), PROMPT)
    assert [part.header.num_pages for part in parts] == [64, 99]


def _other(part: TransferRecord, **fields) -> TransferRecord:
    return replace(part, header=replace(part.header, **fields))


@pytest.mark.parametrize("change", ["skipped part", "other tokens", "other tenant", "too long"])
def test_part_that_does_not_follow_is_rejected(change):
    parts = exported_in_parts(make("hybrid"), PROMPT)
    sink, second = make("hybrid"), parts[1]
    prompt = PROMPT[:200] if change == "too long" else PROMPT
    job = begun(sink, parts[0], prompt)
    match change:
        case "skipped part":
            second = parts[2]
        case "other tokens":
            second = _other(second, tokens=(second.header.tokens + 1) % 50)
        case "other tenant":
            second = _other(second, tenant="other")
    with pytest.raises(TransferRejected) as caught:
        sink.transfer.extend_import(job, second)
    assert caught.value.reason == "tokens"
    job.cancel()
    finish(sink)
    give_back_all(sink.cache)


def test_later_part_begins_no_import():
    parts = exported_in_parts(make("hybrid"), PROMPT)
    sink = make("hybrid")
    with pytest.raises(TransferRejected) as caught:
        begun(sink, parts[1])
    assert caught.value.reason == "tokens"
    give_back_all(sink.cache)


@pytest.mark.parametrize("overlap", [0, 2])
def test_imports_share_plans(overlap):
    """Plans of imports have megabytes of words, and new memory takes longer than a copy."""
    records = [whole_record("plain model", tokens(seed, LENGTH)) for seed in (1, 2)]
    engine, submitted = make("plain model", overlap=overlap), []
    submit = engine.backend.submit

    def spied(plan: StepPlan) -> StepFuture:
        submitted.append(plan.buffer)
        return submit(plan)

    engine.backend.submit = spied
    for record in records:
        engine.transfer.begin_import(record, holds=False)
        finish(engine)
    num_steps, num_plans = len(submitted), len({id(buffer) for buffer in submitted})
    assert num_plans <= overlap + 1 < num_steps
