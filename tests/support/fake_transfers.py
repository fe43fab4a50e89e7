"""Engine side of KV transfer without an engine: jobs end when a test ends them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from shared.boundary.kv_transfer import (
    VERSION,
    HeaderArray,
    TransferHeader,
    TransferRecord,
    TransferRejected,
)
from shared.engine.image_inputs import CacheKeyImage
from shared.engine.request import CacheNamespace

PAGE = 4
FINGERPRINT = "ab" * 32


NO_TENANT = CacheNamespace("")


def record_of(
    tokens: Sequence[int],
    namespace: CacheNamespace = NO_TENANT,
    *,
    first_page: int = 0,
    is_last: bool = True,
) -> TransferRecord:
    """Returns a record of all full pages of some tokens, or of those from a page on."""
    count = len(tokens) // PAGE
    array = HeaderArray("kv", "target pages 0", "float32", (PAGE, 2), 0, count - first_page)
    header = TransferHeader(
        version=VERSION,
        fingerprint=FINGERPRINT,
        tenant=namespace.tenant,
        adapter=namespace.adapter,
        adapter_version=namespace.version,
        tokens=np.array(tokens[: count * PAGE], np.int32),
        images=(),
        page_size=PAGE,
        num_pages=count,
        first_page=first_page,
        is_last=is_last,
        is_whole=(True,) * count,
        has_snapshot=False,
        arrays=(array,),
    )
    words = np.arange(2 * PAGE * count, dtype=np.int32).reshape(count, -1)
    return TransferRecord(header, (words[first_page:],))


class FakeJob:
    """A job that a test ends."""

    def __init__(self, record: TransferRecord, is_done: bool = False) -> None:
        self.header, self.is_done = record.header, is_done
        self.failed: str | None = None
        self.records = [record]

    def take_record(self) -> TransferRecord:
        return self.records.pop()

    def cancel(self) -> None:
        self.failed = "cancelled"


class FakeTransfer:
    """`KVTransfer` with a number of cached tokens for all prompts.

    Attributes:
      num_cached: Result of `match`, and tokens of exports.
      num_prefilled: Tokens of running prompts that are prefilled.
      rejects: Reason of rejected imports; None to accept them.
      jobs: All jobs.
      records: Imported records.
      assigned: Requests of completed imports.
      holds: True if earlier imports hold pages.
    """

    fingerprint, num_slots = FINGERPRINT, 2

    def __init__(self) -> None:
        self.num_cached, self.num_prefilled, self.jobs = 0, 0, list[FakeJob]()
        self.rejects: str | None = None
        self.records = list[TransferRecord]()
        self.assigned, self.holds = list[int](), False

    def match(
        self, tokens: Sequence[int], namespace: CacheNamespace, images: Sequence[CacheKeyImage]
    ) -> int:
        return self.num_cached

    @property
    def is_holding(self) -> bool:
        return self.holds

    def assign(self, job: FakeJob, request_ids: Iterable[int]) -> None:
        self.assigned += request_ids

    def max_pages(self, num_tokens: int) -> int:
        return (num_tokens - 1) // PAGE

    @property
    def num_changes(self) -> int:
        return self.num_prefilled

    def begin_import(self, record: TransferRecord, *, holds: bool, num_pages: int) -> FakeJob:
        assert holds
        if self.rejects is not None:
            raise TransferRejected(self.rejects, "rejected by the test")
        self.jobs.append(FakeJob(record))
        self.records.append(record)
        return self.jobs[-1]

    def extend_import(self, job: FakeJob, record: TransferRecord) -> None:
        assert record.header.first_page == job.records[-1].header.num_pages
        job.records.append(record)
        self.records.append(record)

    def begin_export(
        self,
        tokens: Sequence[int],
        namespace: CacheNamespace,
        images: Sequence[CacheKeyImage],
        allocate: Callable[[int], memoryview],
        *,
        first_page: int,
    ) -> FakeJob | None:
        if not self.num_cached:
            return None
        record = record_of(tokens[: self.num_cached], namespace, first_page=first_page)
        return self._export(record, allocate)

    def begin_part(
        self,
        tokens: Sequence[int],
        namespace: CacheNamespace,
        images: Sequence[CacheKeyImage],
        allocate: Callable[[int], memoryview],
        *,
        first_page: int,
    ) -> FakeJob | None:
        if self.num_prefilled <= first_page * PAGE:
            return None
        prefilled = tokens[: self.num_prefilled]
        record = record_of(prefilled, namespace, first_page=first_page, is_last=False)
        return self._export(record, allocate)

    def _export(self, record: TransferRecord, allocate: Callable[[int], memoryview]) -> FakeJob:
        body = allocate(record.num_bytes)
        body[:] = b"".join(record.parts())
        self.jobs.append(FakeJob(TransferRecord.of(record.header, body)))
        return self.jobs[-1]
