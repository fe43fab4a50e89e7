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


def record_of(tokens: Sequence[int], namespace: CacheNamespace = NO_TENANT) -> TransferRecord:
    """Returns a record of all full pages of some tokens."""
    count = len(tokens) // PAGE
    array = HeaderArray("kv", "target pages 0", "float32", (PAGE, 2), 0, count)
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
        is_whole=(True,) * count,
        has_snapshot=False,
        arrays=(array,),
    )
    words = np.arange(header.num_bytes // 4, dtype=np.int32).reshape(count, -1)
    return TransferRecord(header, (words,))


class FakeJob:
    """A job that a test ends."""

    def __init__(self, record: TransferRecord, is_done: bool = False) -> None:
        self.header, self.is_done = record.header, is_done
        self.failed: str | None = None
        self.record: TransferRecord | None = record

    def cancel(self) -> None:
        self.failed = "cancelled"


class FakeTransfer:
    """`KVTransfer` with a number of cached tokens for all prompts.

    Attributes:
      num_cached: Result of `match`, and tokens of exports.
      rejects: Reason of rejected imports; None to accept them.
      jobs: All jobs.
      assigned: Requests of completed imports.
      holds: True if earlier imports hold pages.
    """

    fingerprint, num_slots = FINGERPRINT, 2

    def __init__(self) -> None:
        self.num_cached, self.jobs = 0, list[FakeJob]()
        self.rejects: str | None = None
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

    def begin_import(self, record: TransferRecord, *, holds: bool) -> FakeJob:
        assert holds
        if self.rejects is not None:
            raise TransferRejected(self.rejects, "rejected by the test")
        self.jobs.append(FakeJob(record))
        return self.jobs[-1]

    def begin_export(
        self,
        tokens: Sequence[int],
        namespace: CacheNamespace,
        images: Sequence[CacheKeyImage],
        allocate: Callable[[int], memoryview],
    ) -> FakeJob | None:
        if not self.num_cached:
            return None
        record = record_of(tokens[: self.num_cached], namespace)
        body = allocate(record.num_bytes)
        body[:] = b"".join(record.parts())
        self.jobs.append(FakeJob(TransferRecord.of(record.header, body)))
        return self.jobs[-1]
